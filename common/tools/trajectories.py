"""How trajectories go on after the policy's first turn: calls, replies, and where they end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from torch.distributed import ProcessGroup

from common.engine.books import Completion
from common.episodes import Episode, Row, Watch, add_turn
from common.flags import Rollout
from common.pictures import Media
from common.progress import Progress
from common.tools import ToolWorkers, find_tool, load_tools
from common.tools.python import TOOL, PythonWorkers
from common.tools.shared import SharedWorkers
from common.tools.turns import Call, Protocol, ToolReply, error_text
from common.torch_repair import transformers
from common.vision import Vision

Workers = ToolWorkers | PythonWorkers | SharedWorkers


@dataclass
class Turns:
    """How trajectories go on after the policy's first turn."""

    tokenizer: transformers.PreTrainedTokenizerBase
    workers: Workers
    vision: Vision | None = None
    max_turns: int = 5
    max_turn_tokens: int | None = None  # of one turn; all turns and observations: Sampling.max_tokens
    max_images: int = 16  # of a trajectory, the prompt's included
    max_tool_errors: int = 3
    lockstep: bool = False  # all wait for the slowest: the engine's batches, and so the last bits, are repeatable
    protocol: Protocol | None = None  # how the policy calls, and sees replies; None: as the workers' tools have it

    def __post_init__(self) -> None:
        self.protocol = self.protocol or self.workers.protocol(self.tokenizer)

    @classmethod
    def of_flags(cls, flags: Rollout, tokenizer, workers: Workers, vision: Vision | None) -> "Turns":
        """ValueError for a chat template that cannot show what a tool returns."""
        limits = {"max_turns": flags.max_turns, "max_turn_tokens": flags.max_turn_tokens}
        limits |= {"max_images": flags.max_images, "max_tool_errors": flags.max_tool_errors}
        lockstep = flags.deterministic or flags.engine_parallel > 1  # ranks that share an engine submit alike
        turns = cls(tokenizer, workers, vision, **limits, lockstep=lockstep)
        for tool in workers.tools.values():
            turns.observation_ids([""], tool.role)
        return turns

    def go_on(
        self,
        engine,
        episodes: list[Episode],
        prompts: Mapping[int, Row],
        max_tokens: int,
        submit: Callable[[int], None],
        progress: Progress,
        watch: Watch,
    ) -> None:
        """Turn after turn, until all episodes have ended; the first ones are submitted.

        A key is an episode's number.
        """
        calls: dict[int, Call] = {}
        answered: list[tuple[int, Completion]] = []
        replies: list[tuple[int, ToolReply]] = []
        while engine.busy or self.workers.pending:
            if engine.busy:
                with watch("engine"):
                    answered += [(key, completion) for key, (completion,) in engine.step()]
            if not (self.lockstep and engine.busy):
                for key, completion in sorted(answered, key=itemgetter(0)):
                    row = prompts[episodes[key].prompt_index]
                    add_turn(episodes[key], completion, max_tokens)
                    if call := self.next_call(episodes[key], row.tools):
                        calls[key] = call
                        self.ask(key, call, episodes[key], row)
                    else:
                        progress.add()
                answered = []
            with watch("tools"):
                replies += self.workers.poll(0.0 if engine.busy else 1.0)
            if not (self.lockstep and self.workers.pending):
                for key, reply in sorted(replies, key=itemgetter(0)):
                    if self.add_observation(episodes[key], calls[key], reply, max_tokens):
                        submit(key)
                    else:
                        progress.add()
                replies = []

    def next_call(self, episode: Episode, tools: Mapping) -> Call | None:
        """The call that the last turn ends in; None if the trajectory ends here. tools: those that the row offers."""
        if episode.finish_reason != "stop" or not tools:
            return None
        last_turn = episode.response_ids[len(episode.loss_mask) - trailing_ones(episode.loss_mask) :]
        call = self.protocol.find_call(self.tokenizer.decode(last_turn, skip_special_tokens=True))
        if call and episode.turns >= self.max_turns:
            episode.finish_reason, call = "max_turns", None
        return call

    def ask(self, key: int, call: Call, episode: Episode, row: Row) -> None:
        """Hand a call to the workers, with what a tool may know of the trajectory and what the row gives."""
        tool = find_tool({name: self.workers.tools[name] for name in row.tools}, call.name)
        if tool is None and not call.error:
            call = Call(error=f"there is no tool {call.name!r:.100}, but {', '.join(row.tools)}")
        media = [{"kind": "frame" if m.is_frame else m.kind, "frames": m.frames} for m in episode.media]
        context = {
            "media": media,
            "num_prompt_media": len(row.media),
            "calls": episode.calls,
            **(vars(self.vision.limits) if self.vision else {}),
        }
        self.workers.submit(key, call, context, row.tools[tool.name] if tool else {})

    def add_observation(self, episode: Episode, call: Call, reply: ToolReply, max_tokens: int) -> bool:
        """Append what a tool has replied. False, with its finish_reason, if the trajectory ends instead."""
        try:
            parts = self.open_parts(reply)
        except ValueError as error:  # what a tool has written past `call_tool`
            reply = ToolReply(error_text(f"{call.name}: {error}", reply.role), error=True, role=reply.role)
            parts = self.open_parts(reply)
        media = [part for part in parts if isinstance(part, Media)]
        record = {"turn": episode.turns - 1, "name": call.name, "arguments": call.arguments, "text": reply.text}
        episode.calls.append(record | {"error": reply.error or reply.failed, "info": reply.info, "media": 0})
        ids = self.observation_ids(parts, reply.role, shown=len(episode.media))
        if episode.response_ids[-1] != self.tokenizer.eos_token_id:  # the policy has sampled another end token
            ids = [self.tokenizer.eos_token_id, *ids]
        errors = sum(call["error"] for call in episode.calls)
        if reply.failed:
            episode.finish_reason = "tool_failed"
        elif errors > self.max_tool_errors:
            episode.finish_reason = "max_tool_errors"
        elif len(episode.media) + len(media) > self.max_images:
            episode.finish_reason = "max_images"
        elif len(episode.response_ids) + len(ids) >= max_tokens:  # not one token would be left for the answer
            episode.finish_reason = "length"
        else:
            episode.response_ids += ids
            episode.loss_mask += [0] * len(ids)
            episode.logprobs += [0.0] * len(ids)
            episode.media += media
            episode.calls[-1]["media"] = len(media)
            return True
        return False

    def open_parts(self, reply: ToolReply) -> list[str | Media]:
        """Texts and, for a model that sees, pictures of a reply. ValueError for one that cannot be read."""
        parts: list[str | Media] = []
        for part in reply.parts:
            if isinstance(part, str):
                parts.append(part)
            elif self.vision:
                parts.append(Media.open("image", [part], self.vision.limits, is_frame="frames" in reply.info))
        return parts

    def observation_ids(self, parts: Sequence[str | Media], role: str, shown: int = 0) -> list[int]:
        """What stands between an end-of-turn token and the next turn, from the new message alone."""
        ids = self.tokenizer.encode(self.protocol.observation(parts, role, shown), add_special_tokens=False)
        return self.vision.expand(ids, [part for part in parts if isinstance(part, Media)]) if self.vision else ids


def open_tools(flags: Rollout, notice: Callable[[str], None], group: ProcessGroup | None = None) -> Workers:
    """The tools of --tools in their processes; a group has them on its first rank. ValueError if they do not start."""
    names = [part.strip() for part in flags.tools.split(",")]
    python = {"python", "python_unconfined"} & {*names}
    ranks = group.size() if group else 1
    if not python:
        start = partial(ToolWorkers, flags.tools, ranks * flags.tool_workers, flags.tool_timeout)
        return SharedWorkers(group, load_tools(flags.tools), ToolWorkers.protocol, start) if group else start()
    if len(names) > 1:
        raise ValueError(f"--tools {flags.tools}: python is called in a way of its own, and stands alone")
    confined = "python" in python
    if not confined:
        notice("warning: --tools python_unconfined: the policy's programs run as you, with your files and network")
    options = {"confined": confined, "anew": flags.deterministic, "ranks": ranks}
    start = partial(PythonWorkers, ranks * flags.tool_workers, flags.tool_timeout, **options)
    return SharedWorkers(group, {TOOL.name: TOOL}, PythonWorkers.protocol, start) if group else start()


def trailing_ones(mask: list[int]) -> int:
    """How many ones a mask ends in."""
    return next((i for i, value in enumerate(reversed(mask)) if not value), len(mask))
