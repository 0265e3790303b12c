"""Dumps of the episodes of a step, from which `--replay` repeats the update; common/look makes
pages of them."""

import hashlib
import json
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.distributed import World, gather_objects
from common.files import full_disk_is_a_warning, replace_file, shorten
from common.pictures import Media, PixelLimits
from common.torch_repair import transformers
from common.types import Episode

# columns that are stored as JSON, since their values differ in shape from row to row
AS_JSON = ("rewards", "terms", "calls", "media", "messages", "turn_rewards")


def dump_rollouts(
    folder: Path,
    step: int,
    sampled: list[Episode],
    trained: list[Episode],
    advantages: list[float],
    tokenizer: "transformers.PreTrainedTokenizerBase",
    world: World,
    micro_batch_tokens: int | None = None,
) -> Path:
    """Write folder/step_NNNNNN.parquet: all episodes of all ranks. Returns its path.

    advantages: one for each of `trained`; for other episodes the file has null. The loss_mask is
    that of `sampled`, even where --mask-truncated trains on a copy with another mask.
    micro_batch_tokens: those of the update, whose last bits depend on them. Before this file each
    rank writes its pictures to step_NNNNNN.media_RANK.parquet: {hash, bytes}.
    """
    path = folder / f"step_{step:06d}.parquet"
    advantage_of = {e.sample: advantage for e, advantage in zip(trained, advantages)}
    pictures = DumpedMedia()
    rows = []
    for episode in sampled:
        row = {field.name: getattr(episode, field.name) for field in fields(episode)}
        row["media"] = [pictures.add(media) for media in episode.media]
        for name in AS_JSON:
            row[name] = json.dumps(row[name])
        row["step"] = step
        row["ranks"] = world.size
        row["rank"] = world.rank
        row["advantage"] = advantage_of.get(episode.sample)
        row["micro_batch_tokens"] = micro_batch_tokens
        row["prompt"] = tokenizer.decode(episode.prompt_ids)
        row["completion"] = tokenizer.decode(episode.response_ids)
        row["shown"] = [shown_size(media) for media in episode.media]
        rows.append(row)
    with full_disk_is_a_warning(path):
        folder.mkdir(parents=True, exist_ok=True)
        if pictures.files:
            columns = {"hash": list(pictures.files), "bytes": list(pictures.files.values())}
            write_table(media_path(path, world.rank), pa.table(columns))
    rows_of_ranks = gather_objects(rows)
    with full_disk_is_a_warning(path):
        if world.is_main:
            all_rows = [row for rows_of_rank in rows_of_ranks for row in rows_of_rank]
            write_table(path, pa.Table.from_pylist(all_rows))
    return path


class DumpedMedia:
    """The pictures of a dump: each encoded frame once, by its hash."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        # equal pictures that tools cut for two episodes stay two: that decides how sums round
        self.numbers: dict[Media, int] = {}

    def add(self, media: Media) -> dict:
        """The record of an image or a video."""
        names = []
        for frame in media.frames:
            name = hashlib.blake2b(frame, digest_size=16).hexdigest()
            self.files[name] = frame
            names.append(name)
        number = self.numbers.setdefault(media, len(self.numbers))
        return {"kind": media.kind, "frames": names, "is_frame": media.is_frame, "number": number}


def shown_size(media: Media) -> list[int]:
    """[width, height] of what the policy sees, in pixels."""
    _, height, width, _ = media.pixels.shape
    return [width, height]


def media_path(dump: Path, rank: int) -> Path:
    return dump.with_suffix(f".media_{rank}.parquet")


def write_table(path: Path, table: pa.Table) -> None:
    replace_file(path, lambda temporary: pq.write_table(table, temporary))


def read_dump(path: Path, columns: list[str] | None = None) -> list[dict]:
    """The rows of a dump, at least one, with those of `columns` that it has (None: with all); step
    and ranks must be among them.

    SystemExit for a file that is no dump.
    """
    if not path.is_file():
        raise SystemExit(f"--replay {path}: no such file")
    try:
        rows = pq.ParquetFile(path).read(columns).to_pylist()
        _ = rows[0]["step"], rows[0]["ranks"]  # LookupError: no rows, or another program's table
    except (LookupError, OSError, pa.ArrowInvalid) as error:
        raise SystemExit(
            f"--replay {path}: holds no episodes of --dump-rollouts-every ({error!s:.200})"
        ) from error
    return rows


def replayed_micro_batch_tokens(path: Path | None) -> int | None:
    """The micro_batch_tokens of the update whose dump is at `path`; None if there is no path, or if
    the dump does not have them. SystemExit if they are no positive integer."""
    if path is None:
        return None
    first_row = read_dump(path, ["step", "ranks", "micro_batch_tokens"])[0]
    value = first_row.get("micro_batch_tokens")
    if value is not None and (type(value) is not int or value < 1):
        raise SystemExit(f"--replay {path}: its micro_batch_tokens are {shorten(repr(value), 60)}")
    return value


def load_rollouts(
    path: Path, step: int, world: World, limits: PixelLimits, reward_model: str | None = None
) -> tuple[list[Episode], list[Episode]]:
    """(all episodes of this rank, those of them that were trained on), read from a dump.

    limits: of this run's pictures. reward_model: the value of --reward-model. SystemExit unless the
    dump is of `step`, of as many ranks as there are now, and of a run with a reward model if and
    only if this one has one.
    """
    rows = read_dump(path)
    missing = {field.name for field in fields(Episode)} - rows[0].keys()
    if missing:
        raise SystemExit(
            f"--replay {path}: lacks {', '.join(sorted(missing))}: another version has written it"
        )
    dump_step = rows[0]["step"]
    dump_ranks = rows[0]["ranks"]
    if (dump_step, dump_ranks) != (step, world.size):
        raise SystemExit(
            f"--replay {path}: is of step {dump_step} on {dump_ranks} ranks, this is step {step} "
            f"on {world.size}: --resume the checkpoint of the step before it, with as many ranks"
        )
    has_model_rewards = any(row["model_reward"] is not None for row in rows)
    if has_model_rewards != bool(reward_model):
        raise SystemExit(
            f"--replay {path}: give the --reward-model of that run, and none if it had none"
        )
    pictures = ReplayedMedia(path, world.rank, limits)
    sampled = []
    trained = []
    for row in rows:
        if row["rank"] != world.rank:
            continue
        for name in AS_JSON:
            row[name] = json.loads(row[name])
        row["media"] = [
            pictures.open(record, size) for record, size in zip(row["media"], row["shown"])
        ]
        episode = Episode(**{field.name: row[field.name] for field in fields(Episode)})
        sampled.append(episode)
        if row["advantage"] is not None:
            trained.append(episode)
    return sampled, trained


class ReplayedMedia:
    """The pictures of a dump, opened again: those that episodes shared are shared again."""

    def __init__(self, dump: Path, rank: int, limits: PixelLimits):
        self.dump = dump
        self.path = media_path(dump, rank)
        self.limits = limits
        self.files: dict[str, bytes] = {}
        if self.path.is_file():
            columns = pq.read_table(self.path).to_pydict()
            self.files = dict(zip(columns["hash"], columns["bytes"]))
        self.opened: dict[str, Media] = {}

    def open(self, record: dict, size: list[int]) -> Media:
        """SystemExit if a frame is missing, or if it is shown in another size than in that run."""
        key = json.dumps(record)
        if key not in self.opened:
            if not self.files.keys() >= set(record["frames"]):
                raise SystemExit(f"--replay {self.dump}: needs its pictures beside it, {self.path}")
            frames = [self.files[name] for name in record["frames"]]
            self.opened[key] = Media.open(record["kind"], frames, self.limits, record["is_frame"])
        media = self.opened[key]
        if shown_size(media) != size:
            raise SystemExit(
                f"--replay {self.dump}: give --min-pixels, --max-pixels, --max-frame-pixels of "
                "that run"
            )
        return media
