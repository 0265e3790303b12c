"""Multi-turn trajectories: the policy calls tools, reads their replies, and takes the next turn."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from common.data.protocols import Call, Code, ToolProtocol
from common.engine.protocol import Engine
from common.files import shorten
from common.flags import Rollout
from common.pictures import Media
from common.processes import cpus_of_rank
from common.progress import say
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
from common.types import (
    Completion,
    Episode,
    Row,
    Tool,
    ToolReply,
    Watch,
    error_text,
    with_replies,
)
from common.vision import Vision

# Calls that no policy makes. They are compared by identity: a policy may write a call of such a
# name.
OPENING = Call(RESET)  # the environment's `reset`
CLOSING = Call(CLOSE)  # the end of the environment, with its reward
FUNCTION_REPLY = Call("answer()")  # the function of --environment replies as a user does
MAX_TRIED_ROWS = 100  # rows searched for one to which the function of --environment replies
TRIAL = -1  # key of a trial before the first step: no trajectory has it


@dataclass
class Trajectory:
    """A trajectory under way. `take_turn` and `take_reply` set what comes next: the reply to
    `call`, or the end; with neither, the policy takes another turn."""

    key: int  # of its episode in the queue
    episode: Episode
    row: Row
    protocol: ToolProtocol
    max_tokens: int  # of all that follows the prompt
    seed: str  # of the step: the first part of every seed
    call: Call | None = None
    ended: bool = False


class Turns:
    """Samples trajectories of several turns.

    protocol: how the policy writes calls and reads replies; None: that of `tool_pool`. ValueError
    if the chat template cannot render the reply of a tool.
    """

    def __init__(
        self,
        tokenizer: "transformers.PreTrainedTokenizerBase",
        tool_pool: ToolPool,
        vision: Vision | None = None,
        flags: Rollout | None = None,
        protocol: ToolProtocol | None = None,
    ):
        self.tokenizer = tokenizer
        self.tool_pool = tool_pool
        self.vision = vision
        self.flags = flags or Rollout()
        self.protocol = protocol or tool_pool.protocol(tokenizer)
        # Prompts for the python tool may teach programs between tags, although the model has a
        # protocol of its own: then the prompt of a row decides between the two (`protocol_of`).
        self.taught_protocol: Code | None = None
        if protocol and tool_pool.protocol is Code:
            self.taught_protocol = Code(tokenizer)
        # Each turn waits for the slowest trajectory. The engine's batches, and with them the last
        # bits of its log-probs, are then repeatable, and ranks that share an engine submit alike.
        self.lockstep = self.flags.deterministic or self.flags.engine_parallel > 1
        # pictures are decoded while the engine samples
        self.decoders = ThreadPoolExecutor(cpus_of_rank())
        tools = tool_pool.tools.values()
        self.stateful_names = {tool.name for tool in tools if tool.stateful}
        # --environment names a function, which replies as a user does
        environment = self.flags.environment
        self.has_function = bool(environment) and not is_class(environment)
        self.failed_tools: set[str] = set()  # whose first failure has been printed
        self.observations = Observations(tokenizer, self.protocol, vision)
        roles = {tool.role for tool in tools}
        if self.has_function:
            roles.add("user")
        for role in roles:
            self.observations.check_role(role)
        # of the reply to a program that was written in the model's own protocol
        self.own_reply_role = "user"
        if self.taught_protocol and self.observations.can_show("tool"):
            self.own_reply_role = "tool"

    def protocol_of(self, row: Row) -> ToolProtocol:
        """The protocol of a row's trajectory: that of its prompt if the prompt teaches one."""
        if not self.taught_protocol:
            return self.protocol
        prompt = row.prompt
        if not isinstance(prompt, str):
            prompt = "\n".join(message["content"] for message in prompt)
        for name in row.tools:
            if self.tool_pool.tools[name].is_taught(prompt):
                return self.taught_protocol
        return self.protocol

    # --- before the first step ---

    def try_out(self, rows: Iterable[Row]) -> bool:
        """Try the function or the environment of --environment on a row. Returns whether the
        environment gives a reward. ValueError if the trial fails."""
        if self.has_function:
            self._try_function(rows)
            return False
        if self.stateful_names:
            return self._try_environment(rows)
        return False

    def _try_function(self, rows: Iterable[Row]) -> None:
        """Let the function reply to the truth of a row, as if the policy had written that."""
        for row in islice(rows, MAX_TRIED_ROWS):
            if row.answer_kwargs is None:
                continue
            self._ask_function(TRIAL, row, [{"role": "assistant", "content": row.truth}])
            ((_, reply),) = self.tool_pool.poll(inf)
            if reply.failed:
                raise ValueError(
                    f"--environment cannot answer the truth of a row: {reply.text}; it is called "
                    "as NAME(messages, ground_truth, **interaction_kwargs of the row)"
                )
            return

    def _try_environment(self, rows: Iterable[Row]) -> bool:
        """Open and close the environment of a row. Returns whether it gives a reward."""
        columns = {}
        has_truth = True
        for row in rows:
            if row.environment is not None:
                columns = row.environment
                has_truth = row.ground_truth not in (None, "")  # see `PromptData`
                break
        transcript = Transcript(TRIAL, seed="", columns=columns)
        opening = self._try_call(OPENING, transcript, RESET)
        transcript = replace(transcript, opening=opening.text)
        closing = self._try_call(CLOSING, transcript, "its reward")
        if "reward" not in closing.info and not has_truth and not self.flags.reward_function:
            say(
                f"warning: --environment {self.flags.environment} has no reward, and the first row "
                "no ground truth: without a --reward-function nothing scores its responses"
            )
        return "reward" in closing.info  # before the first turn it may be None

    def _try_call(self, call: Call, transcript: Transcript, label: str) -> ToolReply:
        job = EnvironmentJob(call.name, {}, transcript)
        self.tool_pool.submit_job(TRIAL, call.name, job, home=TRIAL)
        ((_, reply),) = self.tool_pool.poll(inf)
        if reply.failed:
            raise ValueError(f"--environment: {label} fails on the first row: {reply.text}")
        return reply

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
        those that have ended. The caller must call `queue.end(key)` for each before it asks for the
        next one: that makes room in the queue.

        submit: requests the next turn of queue.episodes[key] from the engine. seed: the step's; an
        environment's adds the number of the prompt, a tool's also that of the sample.
        """
        trajectories: dict[int, Trajectory] = {}
        ended_keys: list[int] = []

        def proceed(trajectory: Trajectory) -> None:
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
                row = queue.row_of(key)
                trajectory = self.begin(key, queue.episodes[key], row, max_tokens, seed)
                trajectories[key] = trajectory
                proceed(trajectory)
            if engine.busy:
                with watch("engine"):
                    for key, (completion,) in engine.step():
                        completions[key] = completion
            # in lock-step all turns are taken together, after the slowest
            if not (self.lockstep and engine.busy):
                for key in sorted(completions):
                    trajectory = trajectories[key]
                    self.take_turn(trajectory, completions.pop(key))
                    proceed(trajectory)
            while ended_keys:  # the caller ends them in the queue, which then has room
                yield ended_keys.pop(0)
            engine_has_work = engine.busy or queue.can_take
            with watch("tools"):
                self._poll_tools(engine_has_work, replies)
            for key in self._usable_replies(replies, engine_has_work):
                trajectory = trajectories[key]
                self.take_reply(trajectory, replies.pop(key))
                proceed(trajectory)
            while ended_keys:
                yield ended_keys.pop(0)

    def begin(self, key: int, episode: Episode, row: Row, max_tokens: int, seed: str) -> Trajectory:
        """The trajectory of an episode of which nothing was sampled so far."""
        trajectory = Trajectory(key, episode, row, self.protocol_of(row), max_tokens, seed)
        if episode.finish_reason:  # the row could not be read
            trajectory.ended = True
        elif row.environment is not None:
            trajectory.call = OPENING
        return trajectory

    def _poll_tools(self, engine_has_work: bool, replies: dict[int, ToolReply]) -> None:
        """Add to `replies` those that have come, and begin to decode their pictures."""
        # Wait for a tool only if there is nothing else to do. Replies whose pictures are being
        # decoded come next, but in lock-step only when all are there.
        has_next_reply = bool(replies) and not self.lockstep
        timeout_s = 0.0 if engine_has_work or has_next_reply else 1.0
        for key, reply in self.tool_pool.poll(timeout_s):
            reply.decoding = self.decoders.submit(self.observations.open_pictures, reply)
            replies[key] = reply
        if not engine_has_work:
            # not for long: the reply of another tool may come first
            futures = [reply.decoding for reply in replies.values()]
            wait(futures, timeout=0.01, return_when=FIRST_COMPLETED)

    def _usable_replies(self, replies: dict[int, ToolReply], engine_has_work: bool) -> list[int]:
        """The keys of the replies that the trajectories take now."""
        if not self.lockstep:
            return [key for key in sorted(replies) if replies[key].decoding.done()]
        # all together, and after new prompts: a fast reply must not overtake them
        if engine_has_work or self.tool_pool.pending:
            return []
        return sorted(replies)

    def take_turn(self, trajectory: Trajectory, completion: Completion) -> None:
        """Append a turn of the policy. Set the call in it, or end the trajectory."""
        trajectory.episode.add_turn(completion, trajectory.max_tokens)
        trajectory.call = self.read_turn(trajectory, completion.token_ids)
        if trajectory.call is None:
            self.finish(trajectory)

    def take_reply(self, trajectory: Trajectory, reply: ToolReply) -> None:
        """Process the reply to the call that the trajectory waited for."""
        call = trajectory.call
        trajectory.call = None
        if call is CLOSING:
            self.take_environment_reward(trajectory.episode, reply)
            trajectory.ended = True
        elif call is OPENING:
            self.take_opening(trajectory, reply)
            if trajectory.episode.finish_reason:
                self.finish(trajectory)
        else:
            goes_on = self.append_reply(trajectory, call, reply)
            if not goes_on:
                self.finish(trajectory)

    def finish(self, trajectory: Trajectory) -> None:
        """End the trajectory; if it has an environment, close that first, which yields its
        reward."""
        if trajectory.row.environment is not None:
            trajectory.call = CLOSING
        else:
            trajectory.ended = True

    # --- calls ---

    def read_turn(self, trajectory: Trajectory, turn_ids: list[int]) -> Call | None:
        """Append a turn to the messages if something may answer it; return the call that it ends
        in, or FUNCTION_REPLY. None if the trajectory ends here; `finish_reason` says why."""
        episode = trajectory.episode
        row = trajectory.row
        gets_function_reply = row.answer_kwargs is not None
        if episode.finish_reason != "stop" or not (row.tools or gets_function_reply):
            return None
        text = self.tokenizer.decode(turn_ids, skip_special_tokens=True)
        episode.messages.append({"role": "assistant", "content": text})
        call = None
        if row.tools:
            protocol = trajectory.protocol
            call = protocol.find_call(protocol.read(turn_ids))
        if call is None:
            # even after the last turn that --max-turns allows: the function may reward it
            return FUNCTION_REPLY if gets_function_reply else None
        if episode.turns >= self.flags.max_turns:
            episode.finish_reason = "max_turns"
            return None
        return call

    def ask(self, trajectory: Trajectory) -> None:
        """Submit the trajectory's call to the workers."""
        call = trajectory.call
        row = trajectory.row
        if call is FUNCTION_REPLY:
            self._ask_function(trajectory.key, row, trajectory.episode.messages)
            return
        if call is OPENING or call is CLOSING:
            self._ask_environment(trajectory)
            return
        tools = {name: self.tool_pool.tools[name] for name in row.tools}
        tool = find_tool(tools, call.name)
        if tool and tool.stateful:
            self._ask_environment(trajectory)
        else:
            self._ask_tool(trajectory, tool)

    def _ask_function(self, key: int, row: Row, dialogue: list[dict]) -> None:
        """Let the function reply. dialogue: the messages that follow the prompt."""
        prompt = row.prompt
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        kwargs = dict(row.answer_kwargs)
        ground_truth = kwargs.pop("ground_truth", row.ground_truth)
        messages = with_replies(prompt, dialogue)
        job = FunctionJob(messages, ground_truth, kwargs)
        self.tool_pool.submit_job(key, FUNCTION_REPLY.name, job)

    def _ask_environment(self, trajectory: Trajectory) -> None:
        """Submit the call with the earlier ones: if the environment's process has died, they are
        repeated in a new one."""
        key = trajectory.key
        call = trajectory.call
        episode = trajectory.episode
        past_calls = []
        for record in episode.calls:
            # a call that has not reached the environment has no step
            if record["name"] in self.stateful_names and "step" in record["info"]:
                past_calls.append(PastCall(record["name"], record["arguments"], record["text"]))
        transcript = Transcript(
            trajectory=key,
            seed=f"{trajectory.seed}/{episode.prompt_index}",
            columns=trajectory.row.environment,
            opening=episode.opening,
            calls=past_calls,
        )
        job = EnvironmentJob(call.name, call.arguments, transcript)
        # home: always the process that holds this environment
        self.tool_pool.submit_job(key, call.name, job, home=key)

    def _ask_tool(self, trajectory: Trajectory, tool: Tool | None) -> None:
        """Submit the call with the pictures so far and the earlier calls."""
        call = trajectory.call
        row = trajectory.row
        episode = trajectory.episode
        if tool is None and not call.error:
            # here, since `submit` would name the tools of all rows
            call = Call(error=f"there is no tool {call.name!r:.100}, but {', '.join(row.tools)}")
        media = []
        for medium in episode.media:
            kind = "frame" if medium.is_frame else medium.kind
            media.append({"kind": kind, "frames": medium.frames})
        context = {"media": media, "num_prompt_media": len(row.media), "calls": episode.calls}
        if self.vision:
            context |= vars(self.vision.limits)  # min_pixels, max_pixels, max_frame_pixels, cell
        context["seed"] = f"{trajectory.seed}/{episode.prompt_index}/{episode.sample_index}"
        kwargs = row.tools[tool.name] if tool else {}
        self.tool_pool.submit(trajectory.key, call, context, kwargs)

    # --- replies ---

    def take_opening(self, trajectory: Trajectory, reply: ToolReply) -> None:
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

    def take_environment_reward(self, episode: Episode, reply: ToolReply) -> None:
        episode.environment_reward = reply.info.get("reward")
        # an earlier failure has been recorded with its own reason
        if reply.failed and episode.finish_reason != "tool_failed":
            self.fail(episode, CLOSING, reply.text)

    def fail(self, episode: Episode, call: Call, reason: str) -> None:
        """Record a failure that is not the policy's fault, as a call and as the finish_reason."""
        self.add_call(episode, call, ToolReply(reason, failed=True))
        episode.finish_reason = "tool_failed"

    def add_call(self, episode: Episode, call: Call, reply: ToolReply) -> None:
        """Record a call and its reply in the episode."""
        record = {
            "turn": episode.turns - 1,  # -1: before the first turn
            "name": call.name,
            "arguments": call.arguments,
            "text": reply.text,
            "error": reply.error or reply.failed,
            "info": reply.info,
            "media": 0,  # pictures in the response; set when they are appended
        }
        episode.calls.append(record)

    def append_reply(self, trajectory: Trajectory, call: Call, reply: ToolReply) -> bool:
        """Append a tool's reply, or the function's, to the trajectory. Returns whether the
        trajectory goes on."""
        episode = trajectory.episode
        is_own = trajectory.protocol is self.protocol
        if self.taught_protocol and is_own and call is not FUNCTION_REPLY:
            # a program in the model's own protocol, whose template must show the reply
            reply = replace(reply, role=self.own_reply_role)
        reply, pictures = self._decode(call, reply)
        if reply.failed:
            self.fail(episode, call, reply.text)
            return False
        if reply.error and reply.info.get("failure"):
            self._note_failure(call.name, reply.info["failure"])
        if call is FUNCTION_REPLY:
            reward = reply.info["reward"]
            if reward is not None:
                num_sampled = sum(episode.loss_mask)
                episode.turn_rewards.append((num_sampled, reward))
            if reply.info["ends"]:
                return False
        else:
            self.add_call(episode, call, reply)
        return self._append_observation(trajectory, call, reply, pictures)

    def _note_failure(self, name: str, reason: str) -> None:
        """Print how a tool has failed for the first time: the tool itself may be wrong."""
        if name not in self.failed_tools:
            self.failed_tools.add(name)
            say(
                f"the tool {name} fails, the first time with {shorten(reason, 300)}: the policy "
                "reads that, and tool/error_rate counts it"
            )

    def _decode(self, call: Call, reply: ToolReply) -> tuple[ToolReply, list[Media]]:
        """The reply and its pictures; an error without pictures if one cannot be read."""
        try:
            if reply.decoding:  # by `_poll_tools`
                return reply, reply.decoding.result()
            return reply, self.observations.open_pictures(reply)
        except ValueError as error:
            # `call_tool` sends no such picture, but a tool may itself write to the worker's socket
            text = error_text(f"{call.name}: {error}", reply.role)
            return ToolReply(text, error=True, info=reply.info, role=reply.role), []

    def _append_observation(
        self, trajectory: Trajectory, call: Call, reply: ToolReply, pictures: list[Media]
    ) -> bool:
        """Append what the policy reads of a reply, unless a limit is reached. Returns whether the
        trajectory goes on."""
        episode = trajectory.episode
        ids = self.observations.ids(
            [reply.text, *pictures], reply.role, len(episode.media), trajectory.protocol
        )
        # the policy may have sampled another end token than the template's
        if episode.response_ids[-1] != self.tokenizer.eos_token_id:
            ids = [self.tokenizer.eos_token_id, *ids]
        limit = self._limit_reached(trajectory, call, reply, len(pictures), len(ids))
        if limit:
            episode.finish_reason = limit
            return False
        episode.response_ids += ids
        episode.loss_mask += [0] * len(ids)
        episode.logprobs += [0.0] * len(ids)
        episode.media += pictures
        episode.messages.append({"role": reply.role, "content": reply.text})
        if call is not FUNCTION_REPLY:
            episode.calls[-1]["media"] = len(pictures)
        return True

    def _limit_reached(
        self,
        trajectory: Trajectory,
        call: Call,
        reply: ToolReply,
        num_pictures: int,
        num_tokens: int,
    ) -> str:
        """The finish_reason if no turn may follow an observation of that size; "" if one may."""
        episode = trajectory.episode
        if call is FUNCTION_REPLY and episode.turns >= self.flags.max_turns:
            return "unanswered"
        num_errors = sum(record["error"] for record in episode.calls)
        if num_errors > self.flags.max_tool_errors:
            return "max_tool_errors"
        if len(episode.media) + num_pictures > self.flags.max_images:
            return "max_images"
        if call.name in self.stateful_names and reply.info.get("done"):
            return "done"
        # not one token would be left for the answer
        if len(episode.response_ids) + num_tokens >= trajectory.max_tokens:
            return "length"
        return ""
