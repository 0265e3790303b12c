"""How trajectories go on after the policy's first turn: calls, replies, and where they end."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

from common.data.protocols import UNSEEN, Call, Code, Protocol, error_text
from common.flags import Rollout
from common.pictures import Media
from common.processes import cpus_of_rank
from common.progress import Progress
from common.tools import find_tool
from common.tools.environments import CLOSE, RESET, State, is_class
from common.tools.pools import ToolPool
from common.torch_repair import transformers
from common.types import Completion, Episode, Row, ToolReply, Watch, with_replies
from common.vision import Vision

OPENING, CLOSING, ANSWERING = Call(RESET), Call(CLOSE), Call("answer()")  # no tool is called so
PROBE = "7 apples"  # a reply that a template must show
FIRST_ROWS = 100  # among which a function that answers finds one to be tried with


@dataclass
class Turns:
    """How trajectories go on after the policy's first turn."""

    tokenizer: "transformers.PreTrainedTokenizerBase"
    workers: ToolPool
    vision: Vision | None = None
    flags: Rollout = field(default_factory=Rollout)
    # how the policy calls, and sees replies; None: that of the workers
    protocol: Protocol | None = None

    def __post_init__(self) -> None:
        """ValueError for a chat template that cannot show what a tool returns."""
        tools = self.workers.tools.values()
        # all wait for the slowest: the engine's batches, and so the last bits, are repeatable;
        # ranks submit alike
        self.lockstep = self.flags.deterministic or self.flags.engine_parallel > 1
        self.stateful = {tool.name for tool in tools if tool.stateful}
        self.code = (
            Code(self.tokenizer) if self.protocol and self.workers.protocol is Code else None
        )
        self.protocol = self.protocol or self.workers.protocol(self.tokenizer)
        # decode pictures while the engine samples
        self.threads = ThreadPoolExecutor(cpus_of_rank())
        environment = self.flags.environment
        # a function that speaks as a user
        self.answers = bool(environment) and not is_class(environment)
        for role in {tool.role for tool in tools} | ({"user"} if self.answers else set()):
            if PROBE not in self.protocol.observation([PROBE], role, shown=0):
                raise ValueError(
                    f"tools: the chat template leaves out messages of role {role!r}: {UNSEEN}"
                )
            self.observation_ids([PROBE], role)
        self.program_role = "tool" if self.code and self.shows("tool") else "user"

    def shows(self, role: str) -> bool:
        """Does the chat template show messages of a role?"""
        try:
            return PROBE in self.protocol.observation([PROBE], role) and bool(
                self.observation_ids([PROBE], role)
            )
        except ValueError:
            return False

    def protocol_of(self, row: Row) -> Protocol:
        """That of programs between tags, where the prompt teaches it."""
        prompt = row.prompt
        if not isinstance(prompt, str):
            prompt = "\n".join(message["content"] for message in prompt)
        if self.code and any(self.workers.tools[name].is_taught(prompt) for name in row.tools):
            return self.code
        return self.protocol

    def sample(
        self,
        engine,
        episodes: list[Episode],
        prompts: Mapping[int, Row],
        max_tokens: int,
        submit: Callable[[int], None],
        progress: Progress,
        watch: Watch,
        seed: str,
    ) -> None:
        """Turn after turn, until all episodes have ended; those that have a finish_reason are left
        alone. A key is an episode's number. `submit` asks the engine for the next turn; `seed` is
        that of environments."""
        rows = [prompts[episode.prompt_index] for episode in episodes]
        running = {
            key: self.trajectory(episode, rows[key], max_tokens)
            for key, episode in enumerate(episodes)
            if not episode.finish_reason
        }
        answered: dict[int, Completion] = {}
        replies: dict[int, ToolReply] = {}  # whose pictures are being decoded

        def go_on(key: int, came: Completion | ToolReply | None = None) -> None:
            try:
                call = running[key].send(came)
            except StopIteration:
                progress.add()
                return
            if call:
                self.ask(key, call, episodes[key], rows[key], seed)
            else:
                submit(key)

        for key in running:
            go_on(key)
        while engine.busy or self.workers.pending or replies:
            if engine.busy:
                with watch("engine"):
                    answered |= {key: completion for key, (completion,) in engine.step()}
            if not (self.lockstep and engine.busy):
                for key in sorted(answered):
                    go_on(key, answered.pop(key))
            with watch("tools"):
                for key, reply in self.workers.poll(0.0 if engine.busy or replies else 1.0):
                    reply.opened = self.threads.submit(self.open_pictures, reply)
                    replies[key] = reply
                if not engine.busy:
                    # a tool may be first
                    wait([reply.opened for reply in replies.values()], 0.01, FIRST_COMPLETED)
            if not (self.lockstep and (engine.busy or self.workers.pending)):
                for key in [
                    key for key in sorted(replies) if self.lockstep or replies[key].opened.done()
                ]:
                    go_on(key, replies.pop(key))

    def trajectory(
        self, episode: Episode, row: Row, max_tokens: int
    ) -> Generator[Call | None, Completion | ToolReply, None]:
        """What happens in one: yields None and is sent what was sampled, or a call and is sent its
        reply."""
        if row.environment is not None:
            self.begin(episode, row, (yield OPENING))
        protocol = self.protocol_of(row)
        goes_on = not episode.finish_reason
        while goes_on:
            episode.add_turn(turn := (yield None), max_tokens)
            call = self.next_call(episode, row, turn.token_ids)
            goes_on = call is not None and self.observe(
                episode, call, (yield call), max_tokens, protocol
            )
        if row.environment is not None:
            reply = yield CLOSING
            episode.environment_reward = reply.info.get("reward")
            if reply.failed and episode.finish_reason != "tool_failed":  # else why has been told
                self.fail(episode, CLOSING, reply.text)

    def try_out(self, rows: Iterable[Row]) -> bool:
        """Has the environment, opened for the first row that has one, and closed, a reward?
        ValueError if that fails, or what a function answers."""
        if self.answers:
            self.try_answer(rows)
        if not self.stateful:
            return False
        state = State(
            -1, "", next((row.environment for row in rows if row.environment is not None), {})
        )
        for call in (OPENING, CLOSING):
            self.workers.hand_on((-1, call.name), (call.name, {}, state, {}), home=-1)
            ((_, reply),) = self.workers.poll(inf)
            if reply.failed:
                what = call.name if call is OPENING else "its reward"
                raise ValueError(f"--environment: {what} fails on the first row: {reply.text}")
            state = replace(state, opening=reply.text)
        return reply.info["reward"] is not None

    def try_answer(self, rows: Iterable[Row]) -> None:
        """Have it answer the truth of a row, as if the policy had said it. ValueError if it
        cannot."""
        row = next((row for row in islice(rows, FIRST_ROWS) if row.answer_kwargs is not None), None)
        if row is None:
            return
        episode = Episode(
            0, 0, [], [], [], [], messages=[{"role": "assistant", "content": row.truth}]
        )
        self.ask(-1, ANSWERING, episode, row, "")
        ((_, reply),) = self.workers.poll(inf)
        if reply.failed:
            how = "it is called as NAME(messages, ground_truth, **interaction_kwargs of the row)"
            raise ValueError(f"--environment cannot answer the truth of a row: {reply.text}; {how}")

    def next_call(self, episode: Episode, row: Row, last_turn: list[int]) -> Call | None:
        """The call that the last turn ends in, or that for a function to answer; None if the
        trajectory ends here."""
        if episode.finish_reason != "stop" or not (row.tools or row.answer_kwargs is not None):
            return None
        text = self.tokenizer.decode(last_turn, skip_special_tokens=True)
        episode.messages.append({"role": "assistant", "content": text})
        protocol = self.protocol_of(row)
        call = protocol.find_call(protocol.read(last_turn)) if row.tools else None
        if call and episode.turns >= self.flags.max_turns:
            episode.finish_reason = "max_turns"
            return None
        return call or (ANSWERING if row.answer_kwargs is not None else None)

    def ask(self, key: int, call: Call, episode: Episode, row: Row, seed: str) -> None:
        """Hand a call to the workers, with what a tool may know of the trajectory and what the row
        gives."""
        if call is ANSWERING:
            said = (
                row.prompt
                if isinstance(row.prompt, list)
                else [{"role": "user", "content": row.prompt}]
            )
            truth = {"ground_truth": row.answer_kwargs.get("ground_truth", row.ground_truth)}
            given = {name: value for name, value in row.answer_kwargs.items() if name not in truth}
            self.workers.hand_on(
                (key, call.name), (call.name, truth, with_replies(said, episode.messages), given)
            )
            return
        tool = find_tool({name: self.workers.tools[name] for name in row.tools}, call.name)
        if call is OPENING or call is CLOSING or (tool and tool.stateful):
            calls = [c for c in episode.calls if c["name"] in self.stateful and "step" in c["info"]]
            calls = [(c["name"], c["arguments"], c["text"]) for c in calls]
            state = State(
                key, f"{seed}/{episode.prompt_index}", row.environment, episode.opening, calls
            )
            self.workers.hand_on((key, call.name), (call.name, call.arguments, state, {}), home=key)
            return
        if tool is None and not call.error:
            call = Call(error=f"there is no tool {call.name!r:.100}, but {', '.join(row.tools)}")
        media = [
            {"kind": "frame" if m.is_frame else m.kind, "frames": m.frames} for m in episode.media
        ]
        context = {"media": media, "num_prompt_media": len(row.media), "calls": episode.calls}
        context |= vars(self.vision.limits) if self.vision else {}
        context["seed"] = f"{seed}/{episode.prompt_index}/{episode.sample_index}"
        self.workers.submit(key, call, context, row.tools[tool.name] if tool else {})

    def begin(self, episode: Episode, row: Row, reply: ToolReply) -> None:
        """Put what an environment's `reset` has said at the end of the prompt."""
        if reply.failed:
            self.fail(episode, OPENING, reply.text)
            return
        *before, last = row.messages
        own, episode.opening = last["content"], reply.text
        added = self.protocol.spaced(reply.text)
        whole = own + added if isinstance(own, str) else [*own, {"type": "text", "text": added}]
        messages = [*before, last | {"content": whole}]
        ids = self.tokenizer.encode(self.protocol.prompt(messages), add_special_tokens=False)
        ids = self.vision.expand(ids, row.media) if self.vision else ids
        if len(ids) > self.flags.max_prompt_tokens:
            self.fail(
                episode,
                OPENING,
                f"the prompt then has {len(ids)} tokens: raise --max-prompt-tokens",
            )
            return
        episode.prompt_ids = ids

    def fail(self, episode: Episode, call: Call, why: str) -> None:
        """It ends through our fault."""
        self.record(episode, call, ToolReply(why, failed=True))
        episode.finish_reason = "tool_failed"

    def record(self, episode: Episode, call: Call, reply: ToolReply) -> None:
        known = {
            "turn": episode.turns - 1,
            "name": call.name,
            "arguments": call.arguments,
            "text": reply.text,
        }
        episode.calls.append(
            known | {"error": reply.error or reply.failed, "info": reply.info, "media": 0}
        )

    def observe(
        self,
        episode: Episode,
        call: Call,
        reply: ToolReply,
        max_tokens: int,
        protocol: Protocol | None = None,
    ) -> bool:
        """Append what came of a call. False, with its finish_reason, if the trajectory ends
        instead."""
        if self.code and call is not ANSWERING and protocol is not self.code:
            reply = replace(reply, role=self.program_role)
        try:
            media = reply.opened.result() if reply.opened else self.open_pictures(reply)
        except ValueError as error:  # what a tool has written past `call_tool`
            told, media = error_text(f"{call.name}: {error}", reply.role), []
            reply = ToolReply(told, error=True, info=reply.info, role=reply.role)
        if reply.failed:
            self.fail(episode, call, reply.text)
            return False
        if call is ANSWERING:
            if (reward := reply.info["reward"]) is not None:
                episode.turn_rewards.append((sum(episode.loss_mask), reward))
            if reply.info["ends"]:
                return False
        else:
            self.record(episode, call, reply)
        ids = self.observation_ids([reply.text, *media], reply.role, len(episode.media), protocol)
        # the policy has sampled another end token
        if episode.response_ids[-1] != self.tokenizer.eos_token_id:
            ids = [self.tokenizer.eos_token_id, *ids]
        if call is ANSWERING and episode.turns >= self.flags.max_turns:
            episode.finish_reason = "unanswered"
        elif sum(call["error"] for call in episode.calls) > self.flags.max_tool_errors:
            episode.finish_reason = "max_tool_errors"
        elif len(episode.media) + len(media) > self.flags.max_images:
            episode.finish_reason = "max_images"
        elif call.name in self.stateful and reply.info.get("done"):
            episode.finish_reason = "done"
        elif len(episode.response_ids) + len(ids) >= max_tokens:
            # not one token would be left for the answer
            episode.finish_reason = "length"
        else:
            episode.response_ids += ids
            episode.loss_mask += [0] * len(ids)
            episode.logprobs += [0.0] * len(ids)
            episode.media += media
            episode.messages.append({"role": reply.role, "content": reply.text})
            if call is not ANSWERING:
                episode.calls[-1]["media"] = len(media)
            return True
        return False

    def open_pictures(self, reply: ToolReply) -> list[Media]:
        """Those of a reply, for a model that sees. ValueError for one that cannot be read."""
        limits, is_frame = self.vision and self.vision.limits, "frames" in reply.info
        return [Media.open("image", [x], limits, is_frame) for x in reply.images if limits]

    def observation_ids(
        self,
        parts: Sequence[str | Media],
        role: str,
        shown: int = 0,
        protocol: Protocol | None = None,
    ) -> list[int]:
        """What stands between an end-of-turn token and the next turn, from the new message alone.

        Its ids are those that it has behind that token: by itself a tokenizer may put a space
        before it. ValueError if they depend on what comes before.
        """
        text = (protocol or self.protocol).observation(parts, role, shown)
        end = self.tokenizer.eos_token
        before = self.tokenizer.encode("-" + end, add_special_tokens=False)
        whole = self.tokenizer.encode("-" + end + text, add_special_tokens=False)
        ids = whole[len(before) :]
        if whole != before + ids or before[-1] != self.tokenizer.eos_token_id:
            told = (
                f"the tokenizer of {self.tokenizer.name_or_path!r} does not keep {end!r} "
                "apart from what follows"
            )
            raise ValueError(f"tools: {told}: take another model")
        return (
            self.vision.expand(ids, [part for part in parts if isinstance(part, Media)])
            if self.vision
            else ids
        )
