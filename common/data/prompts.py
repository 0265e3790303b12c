"""Data sets in verl's format (parquet or jsonl) as tokenised prompts, and the seeded order in which
they are used."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path

import numpy as np
from jinja2 import TemplateError

from common.data import render
from common.data.media import (
    FOREIGN_COLUMNS,
    Picture,
    count_tokens,
    open_media,
    picture_sources,
    read_tool_media,
)
from common.data.protocols import spacing
from common.data.rows import RowFiles
from common.data.scan import Fingerprint, Found, KnownTokens, Lengths, once_per_machine
from common.data.verl import OPTIONAL, REQUIRED, row_problem, to_verl, truth_of
from common.distributed import World
from common.flags import Data, Rollout
from common.pictures import BadRow
from common.progress import say
from common.types import Prompt, Row, Tool, is_continued
from common.vision import Vision

AS_THEY_STAND = (
    "are texts: the model sees them as they stand, without its chat template, which takes a "
    "list of messages, "
    '[{"role": "user", "content": TEXT}]; `python -m common.look FILE --tokenizer MODEL` '
    "shows what it sees"
)


@dataclass(slots=True)
class Prepared:
    """A row up to its chat template."""

    prompt: Prompt  # cleaned
    messages: Prompt  # for the template: with tools, typed parts, and control tokens as text
    pictures: list[Picture]
    tools: dict[str, dict]  # on offer
    spelled: bool  # was there a control token?


class PromptData:
    """Rows of one or several files, kept in Arrow; one becomes Python objects and token ids when it
    is asked for.

    What is wrong with the files is said here, at start-up: ValueError with file, row, reason and
    the flag that helps. `max_rows` counts the concatenated files before anything is dropped. With
    --eval-only or a class as --environment a row may lack its truth: then it is sampled, and not
    scored. With a `world`, in which all ranks come here, the first rank of each machine looks at
    the rows for the others.
    """

    def __init__(
        self,
        files: str | list[str],
        data: Data,
        rollout: Rollout,
        *,
        tokenizer,
        flag: str = "--train-data",
        max_rows: int | None = None,
        vision: Vision | None = None,
        tools: Mapping[str, Tool] | None = None,
        world: World | None = None,
        num_embeddings: int | None = None,
        plays: bool = False,
    ):
        self.known = KnownTokens(tokenizer, num_embeddings)
        self.tokenizer, self.vision, self.tools = tokenizer, vision, tools or {}
        self.max_prompt_tokens, self.max_images = rollout.max_prompt_tokens, rollout.max_images
        self.media_root = data.media_root
        self.plays = plays
        # which rows a function answers: all, or their own if any has arguments for it
        self.answered = "none"
        if rollout.environment and not self.plays:
            self.answered = "own"
        self.needs_truth = not (rollout.eval_only or self.plays)
        convert = partial(
            to_verl,
            flag=flag,
            media_root=data.media_root,
            with_tools=bool(tools),
            needs_truth=self.needs_truth,
        )
        self.files = RowFiles(
            files, flag, max_rows, convert, partial(once_per_machine, world, alike=False)
        )
        self.placeholders = (
            tokenizer.convert_ids_to_tokens([*vision.placeholders.values()]) if vision else []
        )
        self.spaced, self.lengths = spacing(tokenizer, self.placeholders), Lengths(tokenizer)
        found = once_per_machine(world, self._scan)
        self.files.refuse(found.bad, "unusable rows", drop := data.bad_rows == "drop")
        too_long = f"prompts longer than --max-prompt-tokens {self.max_prompt_tokens}"
        self.files.refuse(found.too_long, too_long, drop)
        self.sources, self.fingerprint = found.sources, found.fingerprint
        self.uses_template = found.templated > 0
        self.positions = np.array(
            [index for index in found.kept if index not in found.too_long], dtype=np.int64
        )
        if not len(self.positions):
            raise ValueError(f"{flag}: no usable row in {', '.join(map(str, self.files.paths))}")
        for what, count in found.told.items():
            say(f"{flag}: {count} prompts {what}")
        if found.all_answered:
            self.answered = "all"
            say(
                f"{flag}: no row has extra_info.interaction_kwargs: all are answered by "
                "--environment"
            )
        for what, count in found.unheeded.items():
            if what:
                say(f"warning: {flag}: {count} rows ask in vain for something: {what}")

    def _scan(self) -> Found:
        found, texts, progress, fingerprint = Found(), {}, self.files.progress(), Fingerprint()
        if self.answered == "own":
            records = (
                record for record in self.files.records(OPTIONAL) if isinstance(record, dict)
            )
            found.all_answered = not any(render.interaction_kwargs(record) for record in records)
            self.answered = "all" if found.all_answered else "own"
        # millions of rows that come and go would make the collector visit all of torch, over and
        # over
        gc.freeze()
        # what is used, and what tells of another system
        read = (*REQUIRED, *OPTIONAL, *FOREIGN_COLUMNS)
        rows = enumerate(self.files.records(read if self.needs_truth else None))
        while batch := list(islice(rows, 1024)):
            progress.add(len(batch))
            prepared = {}
            for index, record in batch:
                fingerprint.add(record)
                problem = row_problem(record, self.needs_truth)
                try:
                    if problem:
                        raise BadRow(problem)
                    prepared[index] = prompt = self._prepare(record)
                    beside = self.files.folder(index)
                    read_tool_media(prompt.tools, self.media_root, size=0, beside=beside)
                    if len(prompt.pictures) > self.max_images:
                        raise BadRow(
                            f"{len(prompt.pictures)} pictures are more than --max-images "
                            f"{self.max_images}"
                        )
                except (AttributeError, BadRow, LookupError, TypeError) as error:
                    # a number for a list, ...
                    prepared.pop(index, None)
                    kind = (
                        "" if isinstance(error, BadRow) else f"malformed: {type(error).__name__}: "
                    )
                    found.bad[index] = f"{kind}{error}"
            records = dict(batch)
            for index, text in self._render(prepared, found.bad).items():
                prompt = prepared[index]
                try:
                    self._check_whole(prompt.messages, text)
                    self.known.check(text)
                    num_tokens = self._picture_tokens(
                        text, prompt.pictures, self.files.folder(index)
                    )
                    num_bytes = len(text.encode())
                except (BadRow, UnicodeEncodeError) as error:  # the latter: half a surrogate pair
                    found.bad[index] = (
                        str(error) if isinstance(error, BadRow) else f"cannot be rendered: {error}"
                    )
                    continue
                found.kept.append(index)
                if truth_of(records[index]) is not None:
                    found.sources.add(records[index]["data_source"])
                if not isinstance(prompt.prompt, str):
                    found.templated += 1
                elif isinstance(records[index]["prompt"], list):
                    found.told[
                        "are rendered templates in one message: used without chat template"
                    ] += 1
                elif self.tokenizer.chat_template:
                    found.told[AS_THEY_STAND] += 1
                beginning = render.beginning_ids(self.tokenizer, prompt.messages)
                if beginning:
                    token = self.tokenizer.decode(beginning)
                    found.told[
                        f"are texts without {token} in front, which the tokenizer puts there: "
                        "they get it"
                    ] += 1
                    num_tokens += len(beginning)
                if is_continued(prompt.messages):
                    found.told["end in a message of the assistant: the model goes on with it"] += 1
                found.look_at(
                    render.bare_text(prompt.prompt), prompt.pictures, prompt.spelled, self.tokenizer
                )
                found.unheeded[render.unheeded(records[index], self.tools, self.answered)] += 1
                # At most a token per byte, and one for a leading space; NFC can triple the bytes of
                # non-ASCII text.
                if num_bytes * (1 if text.isascii() else 3) + num_tokens >= self.max_prompt_tokens:
                    # a placeholder is in the text already
                    texts[index] = text, num_tokens - len(prompt.pictures)
            if len(texts) >= 1024:
                found.too_long |= self.lengths.above(texts, self.max_prompt_tokens)
                texts = {}
        found.too_long |= self.lengths.above(texts, self.max_prompt_tokens)
        found.bad = dict(sorted(found.bad.items()))
        found.fingerprint = str(fingerprint)
        return found

    def _prepare(self, record: dict) -> Prepared:
        """A row up to its chat template. BadRow for what does not go together."""
        prompt = render.clean_prompt(record["prompt"])
        pictures = picture_sources(record, render.bare_text(record["prompt"]))
        if pictures and not self.vision:
            raise BadRow("has pictures, and the model reads text alone")
        plays = self.plays and record.get("agent_name") != "single_turn_agent"
        if plays and isinstance(prompt, str):
            raise BadRow("is a rendered prompt, which an --environment cannot add to")
        if plays and is_continued(prompt):
            raise BadRow("ends in a message of the assistant, which an --environment cannot add to")
        if not isinstance(render.answer_kwargs(record, self.answered) or {}, dict):
            raise BadRow("extra_info.interaction_kwargs is no object")
        offered = render.row_tools(record, self.tools) if self.tools else {}
        messages = prompt if isinstance(prompt, str) else render.as_text(prompt, self.spaced)
        spelled = messages != prompt
        tools = {name: self.tools[name] for name in offered}
        messages = render.to_messages(messages, self.tokenizer, tools, bool(pictures))
        return Prepared(prompt, messages, pictures, offered, spelled)

    def _render(self, prepared: dict[int, Prepared], bad: dict[int, str]) -> dict[int, str]:
        """The texts of prompts; those that the template refuses are told in `bad` instead."""
        try:
            texts = render.apply_template([p.messages for p in prepared.values()], self.tokenizer)
            return dict(zip(prepared, texts))
        except (TemplateError, TypeError, ValueError) as error:
            # a role that it refuses, a tool call without a name
            if len(prepared) == 1:
                bad |= dict.fromkeys(prepared, f"cannot be rendered: {error}")
                return {}
            alone = ({index: prompt} for index, prompt in prepared.items())
            return {index: text for one in alone for index, text in self._render(one, bad).items()}

    def _check_whole(self, messages: Prompt, text: str) -> None:
        """BadRow if the template has left out a message. Of the assistant's earlier turns some drop
        the thoughts."""
        if isinstance(messages, str):
            return
        flat = render.without_spaces(text)
        for message in messages:
            others = message["role"] != "assistant" and isinstance(message["content"], str)
            if others and render.end_of_text(message["content"], flat) < 0:
                raise BadRow(f"the chat template leaves out a message of role {message['role']!r}")

    def _picture_tokens(self, text: str, pictures: list, beside: Path) -> int:
        """Tokens of the pictures of a prompt. BadRow, too, if its text has not one placeholder for
        each."""
        spelled = sum(map(text.count, self.placeholders))
        if spelled != len(pictures):
            names = " or ".join(self.placeholders)
            raise BadRow(
                f"{spelled} placeholders of pictures ({names}) in its text, and "
                f"{len(pictures)} pictures"
            )
        root = self.media_root
        return sum(
            count_tokens(picture, root, self.vision.limits, beside=beside) for picture in pictures
        )

    def __len__(self) -> int:
        return len(self.positions)

    def record(self, index: int) -> dict:
        """The row of that `Row.index` with all its columns, as it stands in the file."""
        return self.files.row(index)

    def __getitem__(self, i: int) -> Row:
        index = int(self.positions[i])
        record = self.files.row(index, None if self.plays else (*REQUIRED, *OPTIONAL))
        prepared = self._prepare(record)
        ground_truth, extra_info = truth_of(record), record.get("extra_info") or {}
        row = Row(index, record["data_source"], prepared.prompt, ground_truth, extra_info, [])
        row.answer_kwargs, row.messages = (
            render.answer_kwargs(record, self.answered),
            prepared.messages,
        )
        if self.plays and record.get("agent_name") != "single_turn_agent":
            # it may be the environment that knows
            row.ground_truth = "" if ground_truth is None else ground_truth
            columns = {name: render.without_nulls(value) for name, value in record.items()}
            row.environment = columns | {"ground_truth": ground_truth}
        (text,) = render.apply_template([prepared.messages], self.tokenizer)
        try:
            ids = render.beginning_ids(self.tokenizer, prepared.messages) + render.encode(
                self.tokenizer, text
            )
            root, beside = self.media_root, self.files.folder(index)
            row.tools = read_tool_media(prepared.tools, root, beside=beside)
            row.media = [
                open_media(p, root, self.vision.limits, beside=beside) for p in prepared.pictures
            ]
            row.prompt_ids = self.vision.expand(ids, row.media) if self.vision else ids
            if len(row.prompt_ids) > self.max_prompt_tokens:  # what `Lengths` has taken for short
                raise BadRow(
                    f"{len(row.prompt_ids)} tokens, above --max-prompt-tokens "
                    f"{self.max_prompt_tokens}"
                )
        except BadRow as error:
            row.media, row.prompt_ids, row.problem = (
                [],
                [],
                f"{self.files.flag}: {self.files.place(index)}: {error}",
            )
            print(f"warning: {row.problem}; left out", flush=True)
        return row


def steps_of(epochs: float, num_rows: int, rows_per_step: int) -> int:
    """Steps that pass so many times over the data; the last one, for the last rows, may begin
    another pass."""
    return max(1, ceil(round(epochs * num_rows / rows_per_step, 6)))


class PromptLoader:
    """Row positions for each step: a fresh permutation per epoch from (seed, epoch). Its state is a
    count.

    fingerprint: of the rows.
    """

    def __init__(self, num_rows: int, seed: int, fingerprint: str = ""):
        if num_rows < 1:
            raise ValueError("need at least 1 row")
        self.num_rows, self.seed, self.consumed = num_rows, seed, 0
        self.fingerprint = fingerprint
        self._permutation = (-1, np.empty(0, dtype=np.int64))  # (epoch, order)

    @property
    def epoch(self) -> float:
        return self.consumed / self.num_rows

    def next(self, count: int) -> list[int]:
        """The next `count` positions; at the end of an epoch the next permutation goes on."""
        positions = []
        while len(positions) < count:
            epoch, start = divmod(self.consumed, self.num_rows)
            if self._permutation[0] != epoch:
                order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(
                    self.num_rows
                )
                self._permutation = (epoch, order)
            taken = self._permutation[1][start : start + count - len(positions)]
            positions += taken.tolist()
            self.consumed += len(taken)
        return positions

    def state_dict(self) -> dict[str, int | str]:
        place = {"consumed": self.consumed, "seed": self.seed, "num_rows": self.num_rows}
        return place | {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict) -> None:
        """SystemExit if the saved position belongs to another data set or seed."""
        anew = "or give another --output-dir or --resume never"
        for name in ("num_rows", "seed"):
            now = getattr(self, name)
            if state[name] != now:
                told = f"--resume: {name} of the training data was {state[name]}, now it is {now}"
                raise SystemExit(f"{told}; go on with the same flags, {anew}")
        saved = state["fingerprint"]
        if saved != self.fingerprint:
            told = (
                "--resume: the training data has other rows than before (fingerprint "
                f"{saved}, now {self.fingerprint})"
            )
            raise SystemExit(f"{told}; go on with the same files, {anew}")
        self.consumed = state["consumed"]
