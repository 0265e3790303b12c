"""Multi-turn trajectories: the policy calls tools, reads their replies, and takes the next turn."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from common.data.protocols import Call, Code, Protocol, error_text
from common.engine.protocol import Engine
from common.flags import Rollout
from common.pictures import Media
from common.processes import cpus_of_rank
from common.rollout.observations import Observations
from common.rollout.queue import PromptQueue
from common.tools import find_tool
from common.tools.environments import (
    CLOSE,
    RESET,
    EnvironmentJob,
    FunctionJob,
    PastCall,
    Transcript,
    is_class,
)
from common.tools.pools import ToolPool
from common.torch_repair import transformers
from common.types import Completion, Episode, Row, Tool, ToolReply, Watch, with_replies
from common.vision import Vision

# Calls that no policy makes. They are told apart by identity: a policy may write a call with such
# a name.
OPENING = Call(RESET)
CLOSING = Call(CLOSE)
ANSWERING = Call("answer()")
MAX_TRIED_ROWS = 100  # to find one that the function of --environment can be tried with
TRIAL = -1  # key of a trial before the first step: no trajectory has it


@dataclass
class Trajectory:
    """A trajectory under way. It waits for the reply to `call`, or, without one, for a turn of the
    policy."""

    key: int  # its place in the list of episodes
    episode: Episode
    row: Row
    protocol: Protocol
    max_tokens: int  # of all that follows the prompt
    seed: str  # of the step
    call: Call | None = None
    ended: bool = False


class Turns:
    """Samples trajectories of several turns.

    protocol: how the policy writes calls and reads replies; None: the protocol of the workers.
    ValueError if the chat template cannot render the reply of a tool.
    """

    def __init__(
        self,
        tokenizer: "transformers.PreTrainedTokenizerBase",
        workers: ToolPool,
        vision: Vision | None = None,
        flags: Rollout | None = None,
        protocol: Protocol | None = None,
    ):
        self.tokenizer = tokenizer
        self.workers = workers
        self.vision = vision
        self.flags = flags or Rollout()
        # Programs between tags, for rows whose prompt teaches them although the model has a
        # protocol of its own. None if there is no such choice.
        self.taught_protocol: Code | None = None
        if protocol and workers.protocol is Code:
            self.taught_protocol = Code(tokenizer)
        self.protocol = protocol or workers.protocol(tokenizer)
        # Each turn waits for the slowest trajectory. The engine's batches, and with them the last
        # bits of its log-probs, are then repeatable, and ranks that share an engine submit alike.
        self.lockstep = self.flags.deterministic or self.flags.engine_parallel > 1
        # pictures are decoded while the engine samples
        self.threads = ThreadPoolExecutor(cpus_of_rank())
        tools = workers.tools.values()
        self.stateful = {tool.name for tool in tools if tool.stateful}
        # --environment names a function, which answers as a user does
        environment = self.flags.environment
        self.has_function = bool(environment) and not is_class(environment)
        self.observations = Observations(tokenizer, self.protocol, vision)
        roles = {tool.role for tool in tools}
        if self.has_function:
            roles.add("user")
        for role in roles:
            self.observations.check_role(role)
        self.code_reply_role = "user"
        if self.taught_protocol and self.observations.can_show("tool"):
            self.code_reply_role = "tool"

    def protocol_of(self, row: Row) -> Protocol:
        """The protocol of a row's trajectory: that of its prompt if the prompt teaches one."""
        if not self.taught_protocol:
            return self.protocol
        prompt = row.prompt
        if not isinstance(prompt, str):
            prompt = "\n".join(message["content"] for message in prompt)
        for name in row.tools:
            if self.workers.tools[name].is_taught(prompt):
                return self.taught_protocol
        return self.protocol

    # --- before the first step ---

    def try_out(self, rows: Iterable[Row]) -> bool:
        """Try the function or the environment of --environment on a row. Returns whether the
        environment gives a reward. ValueError if the trial fails."""
        if self.has_function:
            for row in islice(rows, MAX_TRIED_ROWS):
                if row.answer_kwargs is not None:
                    self._try_function(row)
                    break
        if not self.stateful:
            return False
        columns = {}
        for row in rows:
            if row.environment is not None:
                columns = row.environment
                break
        transcript = Transcript(TRIAL, seed="", columns=columns)
        opening = self._try_environment(OPENING, transcript, RESET)
        transcript = replace(transcript, opening=opening.text)
        closing = self._try_environment(CLOSING, transcript, "its reward")
        return closing.info["reward"] is not None

    def _try_environment(self, call: Call, transcript: Transcript, label: str) -> ToolReply:
        job = EnvironmentJob(call.name, {}, transcript)
        self.workers.submit_job(TRIAL, call.name, job, home=TRIAL)
        ((_, reply),) = self.workers.poll(inf)
        if reply.failed:
            raise ValueError(f"--environment: {label} fails on the first row: {reply.text}")
        return reply

    def _try_function(self, row: Row) -> None:
        """Let the function answer the row's ground truth, as if the policy had written that.
        ValueError if it fails."""
        self._ask_function(TRIAL, row, [{"role": "assistant", "content": row.truth}])
        ((_, reply),) = self.workers.poll(inf)
        if reply.failed:
            usage = "it is called as NAME(messages, ground_truth, **interaction_kwargs of the row)"
            raise ValueError(
                f"--environment cannot answer the truth of a row: {reply.text}; {usage}"
            )

    # --- the loop ---

    def sample(
        self,
        engine: Engine,
        queue: PromptQueue,
        max_tokens: int,
        submit: Callable[[int], None],
        watch: Watch,
        seed: str,
    ) -> Iterator[int]:
        """Take prompts from the queue, and fill their episodes turn after turn. Yields the keys of
        those that have ended.

        submit: requests the next turn of queue.episodes[key] from the engine. seed: of the step;
        environments get it with the number of the prompt, tools with that of the sample, too.
        """
        trajectories: dict[int, Trajectory] = {}
        ended_keys: list[int] = []

        def go_on(trajectory: Trajectory) -> None:
            if trajectory.ended:
                del trajectories[trajectory.key]
                ended_keys.append(trajectory.key)
            elif trajectory.call:
                self.ask(trajectory)
            else:
                submit(trajectory.key)

        completions: dict[int, Completion] = {}
        replies: dict[int, ToolReply] = {}  # their pictures are being decoded
        while queue.can_take or trajectories:
            for key in queue.take():
                episode = queue.episodes[key]
                if episode.finish_reason:
                    ended_keys.append(key)
                    continue
                row = queue.row_of(key)
                protocol = self.protocol_of(row)
                trajectory = Trajectory(key, episode, row, protocol, max_tokens, seed)
                trajectories[key] = trajectory
                if row.environment is not None:
                    trajectory.call = OPENING
                go_on(trajectory)
            if engine.busy:
                with watch("engine"):
                    for key, (completion,) in engine.step():
                        completions[key] = completion
            turns_may_go_on = not (self.lockstep and engine.busy)
            if turns_may_go_on:
                for key in sorted(completions):
                    trajectory = trajectories[key]
                    self.take_turn(trajectory, completions.pop(key))
                    go_on(trajectory)
            yield from ended_keys
            ended_keys.clear()
            with watch("tools"):
                engine_has_work = engine.busy or queue.can_take
                self._poll_tools(engine_has_work, replies)
            # In lock-step new prompts come first: a reply that is fast must not overtake them.
            everything_is_idle = not engine_has_work and not self.workers.pending
            replies_may_go_on = everything_is_idle or not self.lockstep
            if replies_may_go_on:
                for key in sorted(replies):
                    if self.lockstep or replies[key].opened.done():
                        trajectory = trajectories[key]
                        self.take_reply(trajectory, replies.pop(key))
                        go_on(trajectory)
            yield from ended_keys
            ended_keys.clear()

    def _poll_tools(self, engine_has_work: bool, replies: dict[int, ToolReply]) -> None:
        """Add to `replies` those that have come, and begin to decode their pictures."""
        # wait for a tool only if nothing else is left to do; in lock-step replies go on together
        can_go_on = bool(replies) and not self.lockstep
        timeout_s = 0.0 if engine_has_work or can_go_on else 1.0
        for key, reply in self.workers.poll(timeout_s):
            reply.opened = self.threads.submit(self.observations.open_pictures, reply)
            replies[key] = reply
        if not engine_has_work:
            # not for long: the reply of another tool may come first
            wait([reply.opened for reply in replies.values()], 0.01, FIRST_COMPLETED)

    def take_turn(self, trajectory: Trajectory, completion: Completion) -> None:
        """Append a turn of the policy, and find the call in it."""
        trajectory.episode.add_turn(completion, trajectory.max_tokens)
        trajectory.call = self.read_turn(trajectory, completion.token_ids)
        if trajectory.call is None:
            self.close_or_end(trajectory)

    def take_reply(self, trajectory: Trajectory, reply: ToolReply) -> None:
        """Process the reply to the call that the trajectory waited for."""
        call = trajectory.call
        trajectory.call = None
        if call is CLOSING:
            self.close_environment(trajectory.episode, reply)
            trajectory.ended = True
        elif call is OPENING:
            self.open_environment(trajectory, reply)
            if trajectory.episode.finish_reason:
                self.close_or_end(trajectory)
        elif not self.append_reply(trajectory, call, reply):
            self.close_or_end(trajectory)

    def close_or_end(self, trajectory: Trajectory) -> None:
        """End the trajectory; if it has an environment, close that first, which yields its
        reward."""
        if trajectory.row.environment is not None:
            trajectory.call = CLOSING
        else:
            trajectory.ended = True

    # --- calls ---

    def read_turn(self, trajectory: Trajectory, last_turn: list[int]) -> Call | None:
        """Append the last turn to the messages; return the call that it ends in, or ANSWERING. None
        if the trajectory ends here; `finish_reason` says why."""
        episode = trajectory.episode
        row = trajectory.row
        is_answered = row.answer_kwargs is not None
        if episode.finish_reason != "stop" or not (row.tools or is_answered):
            return None
        text = self.tokenizer.decode(last_turn, skip_special_tokens=True)
        episode.messages.append({"role": "assistant", "content": text})
        call = None
        if row.tools:
            protocol = trajectory.protocol
            call = protocol.find_call(protocol.read(last_turn))
        if call is None:
            return ANSWERING if is_answered else None
        if episode.turns >= self.flags.max_turns:
            episode.finish_reason = "max_turns"
            return None
        return call

    def ask(self, trajectory: Trajectory) -> None:
        """Submit the trajectory's call to the workers."""
        call = trajectory.call
        row = trajectory.row
        if call is ANSWERING:
            self._ask_function(trajectory.key, row, trajectory.episode.messages)
            return
        if call is OPENING or call is CLOSING:
            self._ask_environment(trajectory)
            return
        tool = find_tool({name: self.workers.tools[name] for name in row.tools}, call.name)
        if tool and tool.stateful:
            self._ask_environment(trajectory)
        else:
            self._ask_tool(trajectory, tool)

    def _ask_function(self, key: int, row: Row, replies: list[dict]) -> None:
        """Let the function answer the prompt and the `replies` to it."""
        prompt = row.prompt
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        kwargs = dict(row.answer_kwargs)
        ground_truth = kwargs.pop("ground_truth", row.ground_truth)
        messages = with_replies(prompt, replies)
        self.workers.submit_job(key, ANSWERING.name, FunctionJob(messages, ground_truth, kwargs))

    def _ask_environment(self, trajectory: Trajectory) -> None:
        """Submit the call with the earlier ones: if the environment's process has died, they are
        repeated in a new one."""
        key = trajectory.key
        call = trajectory.call
        episode = trajectory.episode
        past_calls = []
        for record in episode.calls:
            # a call that has not reached the environment has no step
            if record["name"] in self.stateful and "step" in record["info"]:
                past_calls.append(PastCall(record["name"], record["arguments"], record["text"]))
        transcript = Transcript(
            trajectory=key,
            seed=f"{trajectory.seed}/{episode.prompt_index}",
            columns=trajectory.row.environment,
            opening=episode.opening,
            calls=past_calls,
        )
        job = EnvironmentJob(call.name, call.arguments, transcript)
        self.workers.submit_job(key, call.name, job, home=key)

    def _ask_tool(self, trajectory: Trajectory, tool: Tool | None) -> None:
        """Submit the call with the pictures so far and the earlier calls."""
        call = trajectory.call
        row = trajectory.row
        episode = trajectory.episode
        if tool is None and not call.error:
            call = Call(error=f"there is no tool {call.name!r:.100}, but {', '.join(row.tools)}")
        media = []
        for medium in episode.media:
            kind = "frame" if medium.is_frame else medium.kind
            media.append({"kind": kind, "frames": medium.frames})
        context = {"media": media, "num_prompt_media": len(row.media), "calls": episode.calls}
        if self.vision:
            context |= vars(self.vision.limits)
        context["seed"] = f"{trajectory.seed}/{episode.prompt_index}/{episode.sample_index}"
        kwargs = row.tools[tool.name] if tool else {}
        self.workers.submit(trajectory.key, call, context, kwargs)

    # --- replies ---

    def open_environment(self, trajectory: Trajectory, reply: ToolReply) -> None:
        """Append the environment's opening to the prompt's last message."""
        episode = trajectory.episode
        row = trajectory.row
        if reply.failed:
            self.fail(episode, OPENING, reply.text)
            return
        episode.opening = reply.text
        ids = self.observations.prompt_ids(row, reply.text)
        if len(ids) > self.flags.max_prompt_tokens:
            reason = f"the prompt then has {len(ids)} tokens: raise --max-prompt-tokens"
            self.fail(episode, OPENING, reason)
            return
        episode.prompt_ids = ids

    def close_environment(self, episode: Episode, reply: ToolReply) -> None:
        episode.environment_reward = reply.info.get("reward")
        # an earlier failure has been recorded with its own reason
        if reply.failed and episode.finish_reason != "tool_failed":
            self.fail(episode, CLOSING, reply.text)

    def fail(self, episode: Episode, call: Call, reason: str) -> None:
        """Record a failure that is not the policy's fault, as a call and as the finish_reason."""
        self.add_call(episode, call, ToolReply(reason, failed=True))
        episode.finish_reason = "tool_failed"

    def add_call(self, episode: Episode, call: Call, reply: ToolReply) -> None:
        record = {
            "turn": episode.turns - 1,
            "name": call.name,
            "arguments": call.arguments,
            "text": reply.text,
            "error": reply.error or reply.failed,
            "info": reply.info,
            "media": 0,  # pictures appended to the response; `append_reply` sets it when they are
        }
        episode.calls.append(record)

    def append_reply(self, trajectory: Trajectory, call: Call, reply: ToolReply) -> bool:
        """Append a tool's reply, or the function's, to the trajectory. Returns whether the
        trajectory goes on."""
        episode = trajectory.episode
        is_program = self.taught_protocol is not None and call is not ANSWERING
        # a program that came as a native call: answer in a role that the template shows
        if is_program and trajectory.protocol is not self.taught_protocol:
            reply = replace(reply, role=self.code_reply_role)
        reply, media = self._open_pictures(call, reply)
        if reply.failed:
            self.fail(episode, call, reply.text)
            return False
        if call is ANSWERING:
            reward = reply.info["reward"]
            if reward is not None:
                episode.turn_rewards.append((sum(episode.loss_mask), reward))
            if reply.info["ends"]:
                return False
        else:
            self.add_call(episode, call, reply)
        ids = self.observations.ids(
            [reply.text, *media], reply.role, len(episode.media), trajectory.protocol
        )
        # the policy may have sampled another end token than the template's
        if episode.response_ids[-1] != self.tokenizer.eos_token_id:
            ids = [self.tokenizer.eos_token_id, *ids]
        limit = self._limit_reached(trajectory, call, reply, len(media), len(ids))
        if limit:
            episode.finish_reason = limit
            return False
        episode.response_ids += ids
        episode.loss_mask += [0] * len(ids)
        episode.logprobs += [0.0] * len(ids)
        episode.media += media
        episode.messages.append({"role": reply.role, "content": reply.text})
        if call is not ANSWERING:
            episode.calls[-1]["media"] = len(media)
        return True

    def _open_pictures(self, call: Call, reply: ToolReply) -> tuple[ToolReply, list[Media]]:
        """The reply and its pictures; an error without pictures if one cannot be read."""
        try:
            if reply.opened:
                return reply, reply.opened.result()
            return reply, self.observations.open_pictures(reply)
        except ValueError as error:
            # `call_tool` sends no such picture, but a tool may itself write to the worker's socket
            text = error_text(f"{call.name}: {error}", reply.role)
            return ToolReply(text, error=True, info=reply.info, role=reply.role), []

    def _limit_reached(
        self, trajectory: Trajectory, call: Call, reply: ToolReply, num_media: int, num_tokens: int
    ) -> str:
        """The finish_reason if no turn may follow an observation of that size; "" if one may."""
        episode = trajectory.episode
        if call is ANSWERING and episode.turns >= self.flags.max_turns:
            return "unanswered"
        num_errors = sum(record["error"] for record in episode.calls)
        if num_errors > self.flags.max_tool_errors:
            return "max_tool_errors"
        if len(episode.media) + num_media > self.flags.max_images:
            return "max_images"
        if call.name in self.stateful and reply.info.get("done"):
            return "done"
        # not one token would be left for the answer
        if len(episode.response_ids) + num_tokens >= trajectory.max_tokens:
            return "length"
        return ""
