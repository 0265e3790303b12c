"""python -m common.score FILE: scores responses that stand in a file; prints a table, writes a
verdict on each."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from common.data.rows import RowFiles
from common.data.table_files import is_hub_id, stem_of
from common.files import modified, refuse, user_errors
from common.flags import Files, Positive, Rollout, call_program, check_ranges, check_reward_timeout
from common.printing import guard_output
from common.processes import cpus_of_rank
from common.rewards import RewardWorkers, reward_function, score_response, tell_errors, with_score
from common.rollout.evaluation import bounded, report, verdict


@dataclass
class Scoring:
    """A file of responses, and what scores them."""

    file: Positional[Files]  # of rows with data_source and reward_model.ground_truth, or truth
    # of a row: its response, or a list of them; of --eval-only: completion
    response_column: str = "responses"
    # .parquet or .jsonl, a row for each response; default: FILE_scored.*, as FILE is
    output: Path | None = None
    # FILE.py:NAME, verl's signature; default: by the row's data_source
    reward_function: str | None = None
    # seconds for one response; one that takes longer, or crashes, scores 0
    reward_timeout: Positive = 10.0
    # rows without a response, a truth or a scorer: stop, or drop them
    bad_rows: Literal["error", "drop"] = "error"


@dataclass
class Response:
    """A response, and what scores it."""

    row: int
    text: str
    data_source: str
    ground_truth: object
    truth: str  # the same as a text
    extra_info: dict
    columns: dict  # of the row that is written


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends it in a line."""
    try:
        yield
    except KeyboardInterrupt as error:
        print("interrupted: no verdict is written", file=sys.stderr)
        raise SystemExit(130) from error


@interruptible()
def score_file(flags: Scoring) -> None:
    """Print the table, write a row for each response. ValueError, SystemExit for what is wrong with
    file or flags."""
    rollout = Rollout(
        **{name: value for name, value in vars(flags).items() if name in vars(Rollout())}
    )
    check_ranges(rollout)
    files = RowFiles(flags.file, "FILE")
    responses: list[Response] = []
    bad: dict[int, str] = {}
    output = flags.output
    if output is None:
        first = files.paths[0]
        refuse(
            is_hub_id(first), f"{first} is a data set of the hub: give --output for the verdicts"
        )
        output = first.with_name(f"{stem_of(first)}_scored{files.suffix}")
    refuse(
        output.suffix not in (".jsonl", ".parquet"),
        f"--output {output}: neither .parquet nor .jsonl",
    )
    for path in files.paths:
        refuse(
            output.exists() and path.exists() and output.samefile(path),
            f"--output {output} is FILE itself",
        )
    for index, record in enumerate(files.records()):
        try:
            responses += read_row(record, index, flags)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            bad[index] = (
                str(error)
                if isinstance(error, ValueError)
                else f"its truth cannot be read: {error!r}"
            )
    files.refuse(bad, "unusable rows", flags.bad_rows == "drop")
    refuse(not responses, f"FILE: no usable row in {flags.file}")
    sources = set() if flags.reward_function else {response.data_source for response in responses}
    workers = RewardWorkers(
        flags.reward_function, max(1, cpus_of_rank() - 1), flags.reward_timeout, sources=sources
    )
    check_reward_timeout(flags, workers.timeout_s)
    if flags.reward_function:
        workers.try_out(flags.reward_function, responses[0])
    # a row is a group
    if not all(isinstance(response.columns["group"], int | str) for response in responses):
        for response in responses:
            response.columns["group"] = response.row
    jobs = [(item.data_source, item.text, item.ground_truth, item.extra_info) for item in responses]
    rewards = [with_score(result) for result in workers.score(jobs)]
    tell_errors(rewards)
    failed = sum(isnan(item["score"]) for item in rewards)
    refuse(
        failed == len(responses),
        f"none of the {failed} responses could be scored; {output} is not written",
    )
    samples = [
        response.columns | verdict(item) for response, item in zip(responses, rewards, strict=True)
    ]
    before = modified(output)
    print(report(samples, output))
    prompts = [sample | {"group": (sample["data_source"], sample["group"])} for sample in samples]
    bounded(prompts)
    refuse(modified(output) == before, f"{output} is not written")
    told = f", {failed} of them not scored, which count as wrong" if failed else ""
    print(
        f"{len(samples)} responses to {len({s['group'] for s in prompts})} prompts{told}: {output}"
    )


def read_row(record: dict | str, index: int, flags: Scoring) -> list[Response]:
    """The responses of a row. ValueError if they cannot be scored."""
    if isinstance(record, str):
        raise ValueError(record)
    column = flags.response_column
    source = record.get("data_source")
    extra = unpacked(record.get("extra_info")) or {}
    said = record.get(column)
    texts = [said] if isinstance(said, str) else said
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        expected = (
            "expected a text or a list of texts; --response-column names one of "
            f"{', '.join(record)}"
        )
        raise ValueError(f"{column} is {said!r:.80}, {expected}")
    known = unpacked(record.get("reward_model"))
    known = known.get("ground_truth") if isinstance(known, dict) else None
    truth = record.get("truth") if known is None else known
    kept = unpacked(truth) if known is None else None  # a sample's, as JSON if it is no text
    if isinstance(kept, dict) or (
        isinstance(kept, list) and all(isinstance(item, str) for item in kept)
    ):
        truth = kept
    if truth is None or truth != truth:  # NaN
        raise ValueError("neither reward_model.ground_truth nor truth")
    if not isinstance(source, str) or not isinstance(extra, dict):
        raise ValueError(
            f"data_source is {source!r:.80}, extra_info {extra!r:.80}, expected a string and "
            "an object"
        )
    if not flags.reward_function:
        score_response(reward_function(source), source, "", truth, extra)  # can it read the truth?
    group = record.get("group") if isinstance(said, str) else None
    # pandas: beside a null
    group = int(group) if isinstance(group, float) and group.is_integer() else group
    truth_text = (
        truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)
    )
    responses = []
    for text in texts:
        response = Response(
            row=index,
            text=text,
            data_source=source,
            ground_truth=truth,
            truth=truth_text,
            extra_info=extra | {"last_turn": text, "trajectory": text},  # as in training
            columns=record | {column: text, "group": group},
        )
        responses.append(response)
    return responses


def unpacked(value: object) -> object:
    """What `write_samples` has written as JSON, since parquet could not hold it, as it was."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


if __name__ == "__main__":
    flags = call_program(Scoring, "common.score", __doc__)
    guard_output()
    with user_errors():
        score_file(flags)
