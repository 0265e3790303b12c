"""Data sets in verl's format (parquet or jsonl) as tokenised prompts, and the seeded order in which they are used."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from jinja2 import TemplateError

from common.data import visual_qa
from common.data.media import count_tokens, open_media, picture_sources
from common.data.render import bare_text, clean_prompt, render, row_tools
from common.data.rows import JSON_LINE, RowFiles, records
from common.episodes import Prompt, Row
from common.flags import Data, Rollout
from common.pictures import BadRow
from common.tools import Tool
from common.vision import Vision

REQUIRED = ("data_source", "prompt", "reward_model")
OPTIONAL = ("extra_info", "images", "videos", "image", "mm_hint", "agent_name")
FORMAT = (
    "data_source (string), prompt (list of {role, content}, or an already rendered string), reward_model "
    "({style, ground_truth}), optionally extra_info, images, videos, agent_name. `python -m common.prepare.NAME` "
    "writes such files"
)
ROLES = ("system", "user", "assistant", "tool")


def to_verl(table: pa.Table, path: Path, flag: str, media_root: Path | None, with_tools: bool) -> pa.Table:
    """The table of a file, in verl's columns or Pixel Reasoner's, in verl's. ValueError if it has neither."""
    if set(table.column_names) >= visual_qa.COLUMNS and not set(REQUIRED) <= set(table.column_names):
        return visual_qa.to_verl(table, path, media_root, with_tools)
    columns = next(records(table), REQUIRED) if table.column_names == [JSON_LINE] else table.column_names
    missing = [name for name in REQUIRED if name not in columns]
    if missing and not isinstance(columns, str):  # a first line that is no JSON object is reported as a bad row
        has = ", ".join(columns)
        raise ValueError(f"{flag}: {path} lacks {', '.join(missing)}; it has the columns {has}. Expected: {FORMAT}.")
    return table


def row_problem(record: dict | str) -> str | None:
    """Why this record cannot be used, in a few words; None if it can."""
    if isinstance(record, str):
        return record
    prompt, reward_model = record.get("prompt"), record.get("reward_model")
    if not isinstance(record.get("data_source"), str):
        return f"data_source is {record.get('data_source')!r}, expected a string"
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        return "reward_model.ground_truth is missing"
    if not isinstance(record.get("extra_info"), dict | None):
        return f"extra_info is {record['extra_info']!r:.80}, expected an object"
    if not isinstance(prompt, list | str):
        return f"prompt is {prompt!r:.80}, expected a list of messages or a string"
    for message in prompt if isinstance(prompt, list) else ():
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return f"message {message!r:.80} is not {{role, content}} with a string as content"
        if message.get("role") not in ROLES:
            return f"unknown role {message.get('role')!r}, expected one of {', '.join(ROLES)}"
    return None if bare_text(prompt).strip() else "prompt is empty"


class PromptData:
    """Rows of one or several files, kept in Arrow; one becomes Python objects and token ids when it is asked for.

    What is wrong with the files is said here, at start-up: ValueError with file, row, reason and the flag that helps.
    `max_rows` counts the concatenated files before anything is dropped. Ranks other than 0 pass a silent `notice`.
    """

    def __init__(
        self,
        paths: str | list[str],
        tokenizer,
        *,
        max_prompt_tokens: int,
        bad_rows: Literal["error", "drop"] = "error",
        max_rows: int | None = None,
        flag: str = "--train-data",
        notice: Callable[[str], None] = print,
        vision: Vision | None = None,
        tools: Mapping[str, Tool] | None = None,
        media_root: Path | None = None,
        max_images: int = 16,
    ):
        self.files = RowFiles(
            paths, flag, max_rows, lambda table, path: to_verl(table, path, flag, media_root, bool(tools))
        )
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        self.vision, self.tools, self.media_root = vision, tools or {}, media_root
        self.sources: set[str] = set()  # every data_source of a usable row
        bad, too_long, texts, kept, num_rendered = {}, {}, {}, [], 0  # bad, too_long: row index -> reason
        for index, record in enumerate(self.files.records((*REQUIRED, *OPTIONAL))):
            if problem := row_problem(record):
                bad[index] = problem
                continue
            try:
                prompt, text, pictures, _ = self._prepare(record)
                if len(pictures) > max_images:
                    raise BadRow(f"{len(pictures)} pictures are more than --max-images {max_images}")
                picture_tokens = sum(count_tokens(picture, media_root, vision.limits) for picture in pictures)
                num_bytes = len(text.encode())
            except BadRow as error:
                bad[index] = str(error)
                continue
            except (TemplateError, UnicodeEncodeError) as error:  # a role that it refuses; half a surrogate pair
                bad[index] = f"cannot be rendered: {error}"
                continue
            except (AttributeError, TypeError) as error:  # a number where a list should be, ...
                bad[index] = f"malformed: {type(error).__name__}: {error}"
                continue
            kept.append(index)
            self.sources.add(record["data_source"])
            num_rendered += isinstance(prompt, str) and isinstance(record["prompt"], list)
            # At most one token per byte, and one for a leading space; NFC can triple the bytes of non-ASCII text.
            if num_bytes * (1 if text.isascii() else 3) + picture_tokens >= max_prompt_tokens:
                texts[index] = (text, picture_tokens - len(pictures))  # a placeholder is in the text already
            if len(texts) == 1024:
                too_long |= self._too_long(texts)
                texts = {}
        too_long |= self._too_long(texts) if texts else {}
        self.files.refuse(bad, "unusable rows", bad_rows == "drop", notice)
        too_long_for = f"prompts longer than --max-prompt-tokens {max_prompt_tokens}"
        self.files.refuse(too_long, too_long_for, bad_rows == "drop", notice)
        self.positions = np.array([index for index in kept if index not in too_long], dtype=np.int64)
        if not len(self.positions):
            raise ValueError(f"{flag}: no usable row in {', '.join(map(str, self.files.paths))}")
        if num_rendered:
            notice(f"{flag}: {num_rendered} prompts are rendered templates in one message: used without chat template")

    @classmethod
    def of_flags(cls, data: Data, rollout: Rollout, files: str, **options) -> "PromptData":
        """Files of prompts as the flags ask for; the other options as above."""
        return cls(
            files,
            max_prompt_tokens=rollout.max_prompt_tokens,
            bad_rows=data.bad_rows,
            media_root=data.media_root,
            max_images=rollout.max_images,
            **options,
        )

    def _prepare(self, record: dict) -> tuple[Prompt, str, list, dict[str, dict]]:
        """Cleaned prompt, its text, its pictures (kind, encoded frames or paths), the tools on offer."""
        prompt, pictures = clean_prompt(record["prompt"]), picture_sources(record, bare_text(record["prompt"]))
        if pictures and not self.vision:
            raise BadRow("has pictures, and the model reads text alone")
        offered = row_tools(record, self.tools) if self.tools else {}
        tools = {name: self.tools[name] for name in offered}
        return prompt, render(prompt, self.tokenizer, tools, bool(pictures)), pictures, offered

    def _too_long(self, texts: dict[int, tuple[str, int]]) -> dict[int, str]:
        """Row index -> its length, for those of the texts that exceed the limit; tokenised as one batch.

        texts: row index -> text, and how many tokens its pictures add.
        """
        ids = self.tokenizer([text for text, _ in texts.values()], add_special_tokens=False)["input_ids"]
        lengths = {index: len(x) + more for (index, (_, more)), x in zip(texts.items(), ids)}
        return {index: f"{n} tokens" for index, n in lengths.items() if n > self.max_prompt_tokens}

    def __len__(self) -> int:
        return len(self.positions)

    def record(self, i: int) -> dict:
        """Row i with all its columns, as it stands in the file."""
        return self.files[int(self.positions[i])]

    def __getitem__(self, i: int) -> Row:
        record, index = self.record(i), int(self.positions[i])
        prompt, text, pictures, tools = self._prepare(record)
        ground_truth, extra_info = record["reward_model"]["ground_truth"], record.get("extra_info") or {}
        row = Row(index, record["data_source"], prompt, ground_truth, extra_info, [], tools=tools)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        try:
            row.media = [open_media(picture, self.media_root, self.vision.limits) for picture in pictures]
            row.prompt_ids = self.vision.expand(ids, row.media) if self.vision else ids
        except BadRow as error:
            row.media, row.problem = [], f"{self.files.flag}: {self.files.place(index)}: {error}"
            print(f"warning: {row.problem}; left out", flush=True)
        return row


class PromptLoader:
    """Row positions for each step: a fresh permutation per epoch from (seed, epoch). Its state is a count."""

    def __init__(self, num_rows: int, seed: int):
        if num_rows < 1:
            raise ValueError("need at least 1 row")
        self.num_rows, self.seed, self.consumed = num_rows, seed, 0
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
                order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.num_rows)
                self._permutation = (epoch, order)
            taken = self._permutation[1][start : start + count - len(positions)]
            positions += taken.tolist()
            self.consumed += len(taken)
        return positions

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed, "seed": self.seed, "num_rows": self.num_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """SystemExit if the saved position belongs to another data set or seed."""
        for name, now in (("num_rows", self.num_rows), ("seed", self.seed)):
            if state[name] != now:
                told = f"--resume: {name} of the training data was {state[name]}, now it is {now}"
                raise SystemExit(f"{told}; go on with the same flags, or give another --output-dir or --resume never")
        self.consumed = state["consumed"]
