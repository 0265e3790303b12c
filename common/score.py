"""python -m common.score FILE: score the responses in a file; print a table, and write a verdict on
each."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Literal

import common.packages  # noqa: F401, one line if a package is missing

import pyarrow as pa
import pyarrow.parquet as pq
from tyro.conf import Positional

from common.command_line import check_range
from common.data.rows import JSON_LINE, RowFiles
from common.data.table_files import is_hub_id, stem_of
from common.files import modified_at, replace_file, user_errors
from common.flags import Files, Positive, call_program, check_reward_timeout
from common.printing import guard_output
from common.processes import cpus_of_rank
from common.rewards import RewardWorkers, print_errors, reward_function, score_response, with_score
from common.rollout.evaluation import report, summarize_with_bounds, verdict


@dataclass
class Scoring:
    """A file of responses, and what scores them."""

    file: Positional[Files]  # of rows with data_source and reward_model.ground_truth, or truth
    # column of a row's response, or list of responses; of --eval-only: completion
    response_column: str = "responses"
    # .parquet or .jsonl, a row for each response; default: FILE_scored.*, as FILE is
    output: Path | None = None
    # FILE.py:NAME, verl's signature or TRL's; default: by the row's data_source
    reward_function: str | None = None
    # seconds for one response; one that takes longer, or crashes, counts as wrong
    reward_timeout: Positive = 10.0
    # rows without a response, a truth or a scorer: stop, or drop them
    bad_rows: Literal["error", "drop"] = "error"
    # LOW HIGH: write to ROWS_kept.* the rows whose share of right responses is from LOW to HIGH
    keep: tuple[float, float] | None = None
    # the rows that --keep chooses from: the --eval-data of the evaluation that wrote FILE; default:
    # FILE
    rows: Files | None = None


@dataclass
class Response:
    """A response, and what it is scored by."""

    row: int  # number of its row in FILE
    text: str
    data_source: str
    ground_truth: object
    truth: str  # ground_truth as a text: the response that `try_out` scores
    extra_info: dict
    prompt: object  # of the row, if it has one
    columns: dict  # of the row that is written


def score_file(flags: Scoring) -> None:
    """Print the table, and write a row for each response; with --keep also the rows that are kept.

    ValueError, OSError or SystemExit if something is wrong with the files or the flags.
    """
    check_range("--reward-timeout", flags.reward_timeout, Positive)
    check_keep(flags)
    files = RowFiles(flags.file, "FILE")
    candidates = RowFiles(flags.rows, "--rows") if flags.rows else files
    paths = [*files.paths, *candidates.paths]
    output = output_path(flags, files)
    refuse_overwriting(output, f"--output {output}", paths)
    responses = read_responses(files, flags)
    kept: KeptRows | None = None
    if flags.keep:  # before the scoring: what is wrong with it ends this now
        kept = open_kept_rows(candidates, responses, flags)
        refuse_overwriting(kept.path, f"--keep writes {kept.path}, which", [*paths, output])
    rewards = score_responses(responses, flags)
    num_failed = sum(isnan(reward["score"]) for reward in rewards)
    if num_failed == len(responses):
        raise SystemExit(
            f"none of the {num_failed} responses could be scored; {output} is not written"
        )
    samples = []
    for response, reward in zip(responses, rewards, strict=True):
        samples.append(response.columns | verdict(reward))
    modified_before = modified_at(output)
    print(report(samples, output))
    # FILE may hold evaluations of several sources, each of which numbers its groups from 0
    regrouped = [sample | {"group": (sample["data_source"], sample["group"])} for sample in samples]
    summarize_with_bounds(regrouped)  # it prints the bounds, if some were not scored
    if modified_at(output) == modified_before:  # of a full disk `report` only warns
        raise SystemExit(f"{output} is not written")
    num_prompts = len({sample["group"] for sample in regrouped})
    failures = ""
    if num_failed:
        failures = f", {num_failed} of them not scored, which count as wrong"
    print(f"{len(samples)} responses to {num_prompts} prompts{failures}: {output}")
    if kept:
        verdicts: dict[int, list[bool]] = {}
        for number, sample in zip(kept.numbers, samples, strict=True):
            verdicts.setdefault(number, []).append(sample["correct"])
        write_kept_rows(kept, verdicts, flags.keep)


def check_keep(flags: Scoring) -> None:
    """SystemExit for --keep and --rows that cannot work."""
    if flags.rows and not flags.keep:
        raise SystemExit("--rows is for --keep LOW HIGH")
    if flags.keep and not 0 <= flags.keep[0] <= flags.keep[1] <= 1:
        low, high = flags.keep
        raise SystemExit(
            f"--keep {low:g} {high:g}: expected two shares from 0 to 1, the lower first"
        )


@dataclass
class KeptRows:
    """The rows that --keep chooses from, and where those that it keeps are written."""

    table: pa.Table  # of all files
    path: Path
    numbers: list[int]  # of each response: the row that it answers


def open_kept_rows(candidates: RowFiles, responses: list[Response], flags: Scoring) -> KeptRows:
    """SystemExit if the files are not of one kind, or a response answers none of their rows."""
    kinds = {JSON_LINE in table.column_names for table in candidates.tables}
    if len(kinds) > 1:
        raise SystemExit(f"--keep: {candidates.flag} has lines of JSON and parquet: give one kind")
    try:
        table = pa.concat_tables(candidates.tables, promote_options="default")
    except pa.ArrowException as error:
        raise SystemExit(
            f"--keep: the files of {candidates.flag} do not fit together: {error}"
        ) from error
    first = candidates.paths[0]
    folder = Path.cwd() if is_hub_id(first) else first.parent
    path = folder / f"{stem_of(first)}_kept{candidates.suffix}"
    return KeptRows(table, path, [row_number(r, len(table), flags) for r in responses])


def row_number(response: Response, num_rows: int, flags: Scoring) -> int:
    """The number of the row, among those to choose from, that a response answers."""
    if not flags.rows:
        return response.row
    number = response.columns.get("row")
    if type(number) is not int or not 0 <= number < num_rows:
        raise SystemExit(
            f"--rows {flags.rows}: FILE has the row {number!r:.40}, expected a number below "
            f"{num_rows} in a column `row`, as --eval-only writes it for its --eval-data"
        )
    return number


def write_kept_rows(
    rows: KeptRows, verdicts: dict[int, list[bool]], bounds: tuple[float, float]
) -> None:
    """Write those whose share of right responses is within the bounds, as they are in their file.

    verdicts: number of a row -> whether each response to it is right.
    """
    low, high = bounds
    shares = {number: sum(right) / len(right) for number, right in verdicts.items()}
    kept = sorted(number for number, share in shares.items() if low <= share <= high)
    num_hard = sum(share < low for share in shares.values())
    num_easy = sum(share > high for share in shares.values())
    num_rows = len(rows.table)
    counts = (
        f"{len(kept)} of {num_rows} rows are right in {low:.0%} to {high:.0%} of their responses; "
        f"{num_hard} in fewer, {num_easy} in more, {num_rows - len(shares)} have none"
    )
    if not kept:
        raise SystemExit(f"{counts}; nothing is kept")
    table = rows.table.take(kept)

    def write(temporary: Path) -> None:
        if rows.path.suffix == ".jsonl":
            lines = table.column(JSON_LINE).to_pylist()
            temporary.write_bytes(b"".join(line.strip() + b"\n" for line in lines))
        else:
            pq.write_table(table, temporary)

    replace_file(rows.path, write)
    print(f"{counts}: {rows.path}")


def output_path(flags: Scoring, files: RowFiles) -> Path:
    """--output, or its default. SystemExit if it is not a name for rows."""
    output = flags.output
    if output is None:
        first = files.paths[0]
        if is_hub_id(first):
            raise SystemExit(f"{first} is a data set of the hub: give --output for the verdicts")
        output = first.with_name(f"{stem_of(first)}_scored{files.suffix}")
    if output.suffix not in (".jsonl", ".parquet"):
        raise SystemExit(f"--output {output}: neither .parquet nor .jsonl")
    return output


def refuse_overwriting(output: Path, name: str, paths: list[Path]) -> None:
    """SystemExit if `output`, called `name`, is one of the files at `paths`."""
    for path in paths:
        are_files = output.exists() and path.exists()
        is_same = output.samefile(path) if are_files else output.resolve() == path.resolve()
        if is_same:
            raise SystemExit(f"{name} is FILE itself, or a file of --rows or --output")


def read_responses(files: RowFiles, flags: Scoring) -> list[Response]:
    """The responses of all rows. ValueError for unusable rows, unless they are dropped; SystemExit
    if none is left."""
    responses: list[Response] = []
    bad_rows: dict[int, str] = {}
    for index, record in enumerate(files.records()):
        try:
            responses += read_row(record, index, flags)
        except ValueError as error:
            bad_rows[index] = str(error)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
            bad_rows[index] = f"its truth cannot be read: {error!r}"
    files.refuse(bad_rows, "unusable rows", flags.bad_rows == "drop")
    if not responses:
        raise SystemExit(f"FILE: no usable row in {flags.file}")
    have_groups = all(isinstance(r.columns["group"], int | str) for r in responses)
    if not have_groups:  # then the responses of a row are a group
        for response in responses:
            response.columns["group"] = response.row
    return responses


def score_responses(responses: list[Response], flags: Scoring) -> list[Mapping]:
    """The rewards of each response. ValueError if a user's function cannot score the first."""
    sources: set[str] = set()
    if not flags.reward_function:
        sources = {response.data_source for response in responses}
    num_workers = max(1, cpus_of_rank() - 1)
    workers = RewardWorkers(
        flags.reward_function, num_workers, flags.reward_timeout, sources=sources
    )
    check_reward_timeout(flags, workers.timeout_s)
    if flags.reward_function:
        workers.try_out(flags.reward_function, responses[0])
    jobs = []
    for response in responses:
        extra_info = response.extra_info
        if workers.is_trl:
            extra_info = extra_info | {"prompt": response.prompt}
        jobs.append((response.data_source, response.text, response.ground_truth, extra_info))
    rewards = [with_score(result) for result in workers.score(jobs)]
    print_errors(rewards)
    return rewards


def read_row(record: dict | str, index: int, flags: Scoring) -> list[Response]:
    """The responses of a row. ValueError if they cannot be scored. record: the row, or a text that
    says why it could not be read."""
    if isinstance(record, str):
        raise ValueError(record)
    column = flags.response_column
    value = record.get(column)
    is_single = isinstance(value, str)
    texts = [value] if is_single else value
    if not is_list_of_texts(texts) or not texts:
        raise ValueError(
            f"{column} is {value!r:.80}, expected a text or a list of texts; "
            f"--response-column names one of {', '.join(record)}"
        )
    ground_truth = read_ground_truth(record)
    source = record.get("data_source")
    extra_info = unpacked(record.get("extra_info")) or {}
    if not isinstance(source, str) or not isinstance(extra_info, dict):
        raise ValueError(
            f"data_source is {source!r:.80}, extra_info {extra_info!r:.80}, expected a string and "
            "an object"
        )
    if not flags.reward_function:
        # can it read the truth?
        score_response(reward_function(source), source, "", ground_truth, extra_info)
    group = record.get("group") if is_single else None
    if isinstance(group, float) and group.is_integer():
        group = int(group)  # pandas makes floats of integers beside a null
    truth = ground_truth
    if not isinstance(truth, str):
        truth = json.dumps(truth, ensure_ascii=False, default=str)
    prompt = record.get("prompt", "")
    messages = unpacked(prompt)
    if isinstance(messages, list) and all(isinstance(item, dict) for item in messages):
        prompt = messages  # anything else that looks like JSON is a text
    responses = []
    for text in texts:
        response = Response(
            row=index,
            text=text,
            data_source=source,
            ground_truth=ground_truth,
            truth=truth,
            extra_info=extra_info | {"last_turn": text, "trajectory": text},  # as in training
            prompt=prompt,
            columns=record | {column: text, "group": group},
        )
        responses.append(response)
    return responses


def read_ground_truth(record: dict) -> object:
    """reward_model.ground_truth, or else `truth`, as evaluations write it. ValueError without
    either."""
    ground_truth = None
    reward_model = unpacked(record.get("reward_model"))
    if isinstance(reward_model, dict):
        ground_truth = reward_model.get("ground_truth")
    if ground_truth is None:
        ground_truth = record.get("truth")
        value = unpacked(ground_truth)
        # anything else that looks like JSON is a text: "5", "[1,2]"
        if isinstance(value, dict) or is_list_of_texts(value):
            ground_truth = value
    if ground_truth is None or ground_truth != ground_truth:  # NaN
        raise ValueError("neither reward_model.ground_truth nor truth")
    return ground_truth


def is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def unpacked(value: object) -> object:
    """The value of a text of JSON, which `write_samples` writes where parquet lacks a type; any
    other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (RecursionError, ValueError):
        return value


if __name__ == "__main__":
    flags = call_program(Scoring, "common.score", __doc__)
    guard_output()
    try:
        with user_errors():
            score_file(flags)
    except KeyboardInterrupt:
        print("interrupted: no verdict is written", file=sys.stderr)
        sys.exit(130)
