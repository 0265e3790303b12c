"""Data sets in verl's format (parquet or jsonl) as tokenised prompts."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from jinja2 import TemplateError

from common.data import render
from common.data.columns import check_column, column_value, first_part
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
from common.data.scan import (
    Fingerprint,
    KnownTokens,
    Lengths,
    ScanReport,
    max_num_tokens,
    once_per_machine,
)
from common.data.verl import (
    OPTIONAL,
    REQUIRED,
    answer_kwargs,
    ignored_request,
    interaction_kwargs,
    row_problem,
    row_tools,
    to_verl,
    truth_of,
)
from common.distributed import World
from common.flags import Data, Rollout
from common.pictures import BadRow
from common.progress import say
from common.types import Prompt, Row, Tool, is_continued
from common.vision import UNREAD_PICTURES, Vision

RAW_TEXT_NOTE = (
    "are texts: the model sees them as they stand, without its chat template, which takes a "
    'list of messages, [{"role": "user", "content": TEXT}]; `python -m common.look FILE '
    "--tokenizer MODEL` shows what it sees"
)
BATCH = 1024  # rows of the scan that are rendered together


@dataclass(slots=True)
class PreparedRow:
    """A row, ready for its chat template."""

    prompt: Prompt  # cleaned
    # as the template takes them: tools added, texts and pictures as parts, and a space in control
    # tokens that a message spells (`spacing`)
    messages: Prompt
    pictures: list[Picture]
    kwargs_of_tool: dict[str, dict]  # tools on offer: name -> the row's keyword arguments
    has_control_tokens: bool  # whether a message spelled one


class PromptData:
    """The rows of one or several files, kept in Arrow. `data[i]` is usable row i, tokenised;
    `usable_row` and `file_row` take a `Row.index`, which counts all rows of the files.

    The constructor looks at every row. It raises a ValueError for files that cannot be used, a
    FileNotFoundError for one that is missing, and a ValueError for bad rows unless they are
    dropped, with file, row, reason and the flag that helps.

    max_rows: how many rows of the concatenated files are used, counted before bad ones are dropped.
    world: all ranks call this, and the first rank of each machine scans for the others.
    num_embeddings: of the model, for `KnownTokens`. has_environment_class: whether --environment is
    a class, not a function. needs_truth: whether a row without a ground truth is unusable; it never
    is with such a class, nor with --eval-only. prompt_column: the column to read instead of
    "prompt", EXTRA.NAME for a key of an object; its prompts may be as long as --max-prompt-tokens
    and --max-response-tokens together.
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
        has_environment_class: bool = False,
        needs_truth: bool = True,
        prompt_column: str = "prompt",
    ):
        self.tokenizer = tokenizer
        self.vision = vision
        self.tools = tools or {}
        self.prompt_column = prompt_column
        self.max_prompt_tokens = rollout.max_prompt_tokens
        self.length_limit = f"--max-prompt-tokens {self.max_prompt_tokens}"
        if prompt_column != "prompt":  # a teacher's prompt may hold a solution, too
            self.max_prompt_tokens = rollout.max_model_len
            flags = "--max-prompt-tokens plus --max-response-tokens"
            self.length_limit = f"{flags}: {self.max_prompt_tokens}"
        self.max_images = rollout.max_images
        self.media_root = data.media_root
        self.has_environment_class = has_environment_class
        self.needs_truth = needs_truth and not (rollout.eval_only or has_environment_class)
        self.files = RowFiles(
            files,
            flag,
            max_rows,
            convert=partial(
                to_verl,
                flag=flag,
                media_root=data.media_root,
                with_tools=bool(tools),
                needs_truth=self.needs_truth,
            ),
            # the paths of the hub's files differ from machine to machine
            once=partial(once_per_machine, world, alike=False),
        )
        check_column(self.files, prompt_column)
        # Which rows the function of --environment answers: "own", those with arguments for it;
        # "all", if no row has any.
        self.answered_rows: Literal["none", "own", "all"] = "none"
        if rollout.environment and not has_environment_class:
            any_has_arguments = once_per_machine(world, self._any_row_has_arguments)
            self.answered_rows = "own" if any_has_arguments else "all"
        self.placeholders: list[str] = []
        if vision:
            self.placeholders = tokenizer.convert_ids_to_tokens([*vision.placeholders.values()])
        self.space_control_tokens = spacing(tokenizer, self.placeholders)
        self.known_tokens = KnownTokens(tokenizer, num_embeddings)
        self.lengths = Lengths(tokenizer)

        report = once_per_machine(world, self._scan)
        self._refuse(report, drop=data.bad_rows == "drop")
        usable = [index for index in report.kept if index not in report.too_long]
        if not usable:
            raise ValueError(f"{flag}: no usable row in {', '.join(map(str, self.files.paths))}")
        self.usable = np.array(usable, dtype=np.int64)  # the Row.index of each usable row
        self.sources = report.sources
        self.fingerprint = report.fingerprint
        self.uses_template = report.num_templated > 0
        self._print_notes(report)

    def __len__(self) -> int:
        return len(self.usable)

    def __getitem__(self, i: int) -> Row:
        """Usable row i. If it cannot be read now, it has a `problem` and no prompt_ids."""
        index = int(self.usable[i])
        record = self._with_prompt(self.files.row(index, self._columns))
        prepared = self._prepare(record)
        ground_truth = truth_of(record)
        row = Row(
            index=index,
            data_source=record["data_source"],
            prompt=prepared.prompt,
            ground_truth=ground_truth,
            extra_info=record.get("extra_info") or {},
            prompt_ids=[],
            answer_kwargs=answer_kwargs(record, self.answered_rows),
            messages=prepared.messages,
        )
        if self._has_environment(record):
            # its environment may know the truth; with None no response would be scored
            row.ground_truth = "" if ground_truth is None else ground_truth
            row.environment = {name: render.without_nulls(value) for name, value in record.items()}
            row.environment["ground_truth"] = ground_truth
        (text,) = render.apply_template([prepared.messages], self.tokenizer)
        try:
            self._tokenize(row, prepared, text)
        except BadRow as error:
            row.media = []
            row.prompt_ids = []
            row.problem = f"{self.files.flag}: {self.files.place(index)}: {error}"
            # not `say`: each rank reads rows of its own
            print(f"warning: {row.problem}; left out", flush=True)
        return row

    def usable_row(self, index: int) -> Row:
        """The usable row with this `Row.index`."""
        return self[int(np.searchsorted(self.usable, index))]

    def file_row(self, index: int) -> dict:
        """The row with this `Row.index`: all its columns, in verl's layout."""
        return self.files.row(index)

    def keep(self, indices: Sequence[int] | np.ndarray) -> None:
        """Use only rows whose `Row.index` is among these. ValueError if none is."""
        self.usable = np.intersect1d(self.usable, indices)
        if not len(self.usable):
            raise ValueError(f"{self.files.flag}: no usable row is left")

    def _tokenize(self, row: Row, prepared: PreparedRow, text: str) -> None:
        """Set the row's tools, media and prompt_ids. BadRow for what cannot be read."""
        beginning = render.beginning_ids(self.tokenizer, prepared.messages)
        ids = beginning + render.encode(self.tokenizer, text)
        beside = self.files.folder(row.index)
        row.tools = read_tool_media(prepared.kwargs_of_tool, self.media_root, beside=beside)
        row.media = [
            open_media(picture, self.media_root, self.vision.limits, beside=beside)
            for picture in prepared.pictures
        ]
        row.prompt_ids = self.vision.expand(ids, row.media) if self.vision else ids
        num_tokens = len(row.prompt_ids)
        if num_tokens > self.max_prompt_tokens:  # the scan's count was lower
            raise BadRow(f"{num_tokens} tokens, above {self.length_limit}")

    # --- the scan ---

    def _refuse(self, report: ScanReport, drop: bool) -> None:
        self.files.refuse(report.bad_rows, "unusable rows", drop)
        too_long = f"prompts longer than {self.length_limit}"
        if self.tools:
            too_long += f", with the descriptions of {', '.join(self.tools)} in them"
        self.files.refuse(report.too_long, too_long, drop)

    def _print_notes(self, report: ScanReport) -> None:
        flag = self.files.flag
        for note, count in report.notes.items():
            say(f"{flag}: {count} prompts {note}")
        if self.answered_rows == "all":
            say(
                f"{flag}: no row has extra_info.interaction_kwargs: all are answered by "
                "--environment"
            )
        for request, count in report.ignored_requests.items():
            say(f"warning: {flag}: {count} rows ask for what is not there: {request}")

    def _scan(self) -> ScanReport:
        """Look at every row once, without tokenising every text."""
        report = ScanReport()
        # Rows are millions of short-lived objects. Frozen, torch's objects are not visited by each
        # collection that they set off.
        gc.freeze()
        progress = self.files.progress()
        fingerprint = Fingerprint()
        # The fingerprint is of all columns where no truth is needed: --eval-only writes them all,
        # and `reset` of an environment gets them.
        columns = None
        if self.needs_truth:
            # `picture_sources` refuses rows whose pictures are in FOREIGN_COLUMNS
            columns = (*self._columns, *FOREIGN_COLUMNS)
        rows = enumerate(map(self._with_prompt, self.files.records(columns)))
        maybe_too_long: dict[int, tuple[str, int]] = {}
        while records := dict(islice(rows, BATCH)):
            progress.add(len(records))
            for record in records.values():
                fingerprint.add(record)
            maybe_too_long |= self._scan_batch(records, report)
            if len(maybe_too_long) >= BATCH:
                report.too_long |= self.lengths.above(maybe_too_long, self.max_prompt_tokens)
                maybe_too_long = {}
        report.too_long |= self.lengths.above(maybe_too_long, self.max_prompt_tokens)
        report.bad_rows = dict(sorted(report.bad_rows.items()))
        report.fingerprint = str(fingerprint)
        return report

    def _any_row_has_arguments(self) -> bool:
        """Whether a row has arguments of its own for a function that answers."""
        for record in self.files.records(("extra_info",)):
            if isinstance(record, dict) and interaction_kwargs(record):
                return True
        return False

    def _scan_batch(
        self, records: dict[int, dict | str], report: ScanReport
    ) -> dict[int, tuple[str, int]]:
        """Add rows to the report. Returns the texts that may be too long, as `Lengths.above` takes
        them.

        records: row index -> row, or why it cannot be read.
        """
        prepared = self._prepare_batch(records, report.bad_rows)
        texts = self._render(prepared, report.bad_rows)
        maybe_too_long: dict[int, tuple[str, int]] = {}
        for index, text in texts.items():
            row = prepared[index]
            try:
                self._check_whole(row.messages, text)
                max_text_tokens = max_num_tokens(text)
                self.known_tokens.check(text)
                extra_tokens = self._picture_tokens(text, row.pictures, self.files.folder(index))
            except UnicodeEncodeError as error:  # half a surrogate pair
                report.bad_rows[index] = f"cannot be rendered: {error}"
                continue
            except BadRow as error:
                report.bad_rows[index] = str(error)
                continue
            beginning = render.beginning_ids(self.tokenizer, row.messages)
            extra_tokens += len(beginning)
            self._add_to_report(report, index, records[index], row, beginning)
            # >=: the bound leaves out a space that the tokenizer may prepend
            if max_text_tokens + extra_tokens >= self.max_prompt_tokens:
                # `Lengths` counts the text's placeholders, one for each picture: they come off
                maybe_too_long[index] = (text, extra_tokens - len(row.pictures))
        return maybe_too_long

    def _prepare_batch(
        self, records: dict[int, dict | str], bad_rows: dict[int, str]
    ) -> dict[int, PreparedRow]:
        """The rows that can be prepared; the others go into `bad_rows` with the reason."""
        prepared: dict[int, PreparedRow] = {}
        for index, record in records.items():
            problem = row_problem(record, self.needs_truth)
            if problem:
                bad_rows[index] = problem
                continue
            try:
                row = self._prepare(record)
                beside = self.files.folder(index)
                # size 0: nothing is read, but a file that cannot be opened raises BadRow
                read_tool_media(row.kwargs_of_tool, self.media_root, size=0, beside=beside)
                if len(row.pictures) > self.max_images:
                    raise BadRow(
                        f"{len(row.pictures)} pictures are more than --max-images {self.max_images}"
                    )
            except BadRow as error:
                bad_rows[index] = str(error)
            except (AttributeError, LookupError, RecursionError, TypeError) as error:
                # a number for a list, a text of JSON that nests too deep, ...
                bad_rows[index] = f"malformed: {type(error).__name__}: {error}"
            else:
                prepared[index] = row
        return prepared

    def _render(self, prepared: dict[int, PreparedRow], bad_rows: dict[int, str]) -> dict[int, str]:
        """The texts of prompts; those that the template refuses go into `bad_rows`."""
        try:
            texts = render.apply_template(
                [row.messages for row in prepared.values()], self.tokenizer
            )
        except (RecursionError, TemplateError, TypeError, ValueError) as error:
            # The template refuses a row (an unknown role, a tool call without a name): render them
            # one by one to find it.
            if len(prepared) == 1:
                (index,) = prepared
                bad_rows[index] = f"cannot be rendered: {error}"
                return {}
            rendered: dict[int, str] = {}
            for index, row in prepared.items():
                rendered |= self._render({index: row}, bad_rows)
            return rendered
        return dict(zip(prepared, texts))

    def _add_to_report(
        self, report: ScanReport, index: int, record: dict, row: PreparedRow, beginning: list[int]
    ) -> None:
        """Add a row that is not bad; whether it is too long is found out later. beginning: the ids
        that its text lacks in front."""
        report.kept.append(index)
        if truth_of(record) is not None:
            report.sources.add(record["data_source"])
        if not isinstance(row.prompt, str):
            report.num_templated += 1
        elif isinstance(record["prompt"], list):
            note = "are rendered templates in one message: used without chat template"
            report.notes[note] += 1
        elif self.tokenizer.chat_template:
            report.notes[RAW_TEXT_NOTE] += 1
        if beginning:
            token = self.tokenizer.decode(beginning)
            note = (
                f"are texts without {token} in front, which the tokenizer puts there: they get it"
            )
            report.notes[note] += 1
        if is_continued(row.messages):
            report.notes["end in a message of the assistant: the model goes on with it"] += 1
        report.note_misreadings(
            render.bare_text(row.prompt), row.pictures, row.has_control_tokens, self.tokenizer
        )
        request = ignored_request(record, self.tools, self.answered_rows)
        if request:
            report.ignored_requests[request] += 1

    def _picture_tokens(self, text: str, pictures: list[Picture], beside: Path) -> int:
        """Tokens of a prompt's pictures. BadRow unless its text has one placeholder for each."""
        num_placeholders = sum(map(text.count, self.placeholders))
        if num_placeholders != len(pictures):
            names = " or ".join(self.placeholders)
            raise BadRow(
                f"{num_placeholders} placeholders of pictures ({names}) in its text, and "
                f"{len(pictures)} pictures"
            )
        return sum(
            count_tokens(picture, self.media_root, self.vision, beside=beside)
            for picture in pictures
        )

    def _check_whole(self, messages: Prompt, text: str) -> None:
        """BadRow if the template has left out a text, but for those of the assistant and those
        beside pictures."""
        if isinstance(messages, str):
            return
        flat = render.without_spaces(text)
        for message in messages:
            # some templates drop the thoughts of the assistant's earlier turns
            if message["role"] == "assistant" or not isinstance(message["content"], str):
                continue
            if render.end_of_text(message["content"], flat) < 0:
                raise BadRow(f"the chat template leaves out a message of role {message['role']!r}")

    # --- the scan and single rows ---

    def _prepare(self, record: dict) -> PreparedRow:
        """A row, ready for its chat template. BadRow for what does not go together."""
        prompt = render.clean_prompt(record["prompt"])
        pictures = picture_sources(record, render.bare_text(record["prompt"]))
        if pictures and not self.vision:
            raise BadRow(UNREAD_PICTURES)
        if self._has_environment(record):
            if isinstance(prompt, str):
                raise BadRow("is a rendered prompt, which an --environment cannot add to")
            if is_continued(prompt):
                raise BadRow(
                    "ends in a message of the assistant, which an --environment cannot add to"
                )
        if not isinstance(answer_kwargs(record, self.answered_rows) or {}, dict):
            raise BadRow("extra_info.interaction_kwargs is no object")
        kwargs_of_tool = row_tools(record, self.tools) if self.tools else {}
        tools = {name: self.tools[name] for name in kwargs_of_tool}
        spaced_prompt = prompt
        if not isinstance(prompt, str):
            spaced_prompt = render.with_control_tokens_spaced(prompt, self.space_control_tokens)
        has_control_tokens = spaced_prompt != prompt
        messages = render.to_messages(spaced_prompt, self.tokenizer, tools, pictures=bool(pictures))
        return PreparedRow(prompt, messages, pictures, kwargs_of_tool, has_control_tokens)

    @property
    def _columns(self) -> tuple[str, ...] | None:
        """Columns that a row is made of; None: all, as the `reset` of an environment gets them."""
        if self.has_environment_class:
            return None
        return (*REQUIRED, *OPTIONAL, self.prompt_column, first_part(self.prompt_column))

    def _has_environment(self, record: dict) -> bool:
        """Whether each trajectory of this row has an object of the --environment's class."""
        return self.has_environment_class and record.get("agent_name") != "single_turn_agent"

    def _with_prompt(self, record: dict | str) -> dict | str:
        """The record with the prompt of `prompt_column`."""
        if isinstance(record, str) or self.prompt_column == "prompt":
            return record
        return record | {"prompt": column_value(record, self.prompt_column)}
