"""Dumps of the episodes of a step, from which `--replay` repeats the update; common/look makes
pages of them."""

import hashlib
import json
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.distributed import World, gather_objects
from common.files import full_disk_is_a_warning, refuse, replace_file, shorten
from common.pictures import Media, PixelLimits
from common.torch_repair import transformers
from common.types import Episode

# whose values differ in shape
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
    """Write folder/step_NNNNNN.parquet: all episodes of all ranks; advantage is null where none was
    trained on.

    micro_batch_tokens: of the update, whose last bits depend on them.

    Beside it, and there before it: each rank's pictures, .media_RANK.parquet: {hash, bytes}.
    Returns its path.
    """
    path = folder / f"step_{step:06d}.parquet"
    advantage_of = {id(episode): advantage for episode, advantage in zip(trained, advantages)}
    files: dict[str, bytes] = {}
    # equal ones that tools cut for two episodes are two: that decides how sums round
    numbers: dict[Media, int] = {}
    rows = []
    for e in sampled:
        row = {f.name: getattr(e, f.name) for f in fields(e)}
        row["media"] = []
        for m in e.media:
            names = [hashlib.blake2b(frame, digest_size=16).hexdigest() for frame in m.frames]
            files |= zip(names, m.frames)
            number = numbers.setdefault(m, len(numbers))
            row["media"].append(
                {"kind": m.kind, "frames": names, "is_frame": m.is_frame, "number": number}
            )
        row |= {name: json.dumps(row[name]) for name in AS_JSON}
        row |= {
            "step": step,
            "ranks": world.size,
            "rank": world.rank,
            "advantage": advantage_of.get(id(e)),
        }
        row |= {"micro_batch_tokens": micro_batch_tokens}
        row |= {
            "prompt": tokenizer.decode(e.prompt_ids),
            "completion": tokenizer.decode(e.response_ids),
        }
        rows.append(
            row
            | {
                "shown": [list(m.pixels.shape[2:0:-1]) for m in e.media],
            }
        )
    with full_disk_is_a_warning(path):
        folder.mkdir(parents=True, exist_ok=True)
        if files:
            table = pa.table({"hash": list(files), "bytes": list(files.values())})
            own = path.with_suffix(f".media_{world.rank}.parquet")
            replace_file(own, lambda temporary: pq.write_table(table, temporary))
    rows = [row for part in gather_objects(rows) for row in part]
    with full_disk_is_a_warning(path):
        if world.is_main:
            replace_file(
                path, lambda temporary: pq.write_table(pa.Table.from_pylist(rows), temporary)
            )
    return path


def read_dump(path: Path, columns: list[str] | None = None) -> list[dict]:
    """Its rows, at least one; of `columns` those that it has, or all. SystemExit for what is no
    dump."""
    refuse(not path.is_file(), f"--replay {path}: no such file")
    try:
        rows = pq.ParquetFile(path).read(columns).to_pylist()
        for name in ("step", "ranks"):  # which other tables do not have
            rows[0][name]
    except (LookupError, OSError, pa.ArrowInvalid) as error:
        raise SystemExit(
            f"--replay {path}: holds no episodes of --dump-rollouts-every ({error!s:.200})"
        ) from error
    return rows


def replayed_micro_batch_tokens(path: Path | None) -> int | None:
    """Those that the update of a dump was made with; None without a dump, or if it does not say."""
    if path is None:
        return None
    tokens = read_dump(path, ["step", "ranks", "micro_batch_tokens"])[0].get("micro_batch_tokens")
    wrong = f"--replay {path}: its micro_batch_tokens are {shorten(repr(tokens), 60)}"
    refuse(tokens is not None and (type(tokens) is not int or tokens < 1), wrong)
    return tokens


def load_rollouts(
    path: Path, step: int, world: World, limits: PixelLimits, reward_model: str | None = None
) -> tuple[list[Episode], list[Episode]]:
    """(all episodes of this rank, those that were trained on) of a dump of `step` by as many
    ranks."""
    rows = read_dump(path)
    made = rows[0]["step"], rows[0]["ranks"]
    wrong = (
        f"--replay {path}: is of step {made[0]} on {made[1]} ranks, this is step {step} "
        f"on {world.size}: "
    )
    refuse(
        made != (step, world.size),
        f"{wrong}--resume the checkpoint of the step before it, with as many ranks",
    )
    wrong = f"--replay {path}: give the --reward-model of that run, and none if it had none"
    refuse(any(row["model_reward"] is not None for row in rows) != bool(reward_model), wrong)
    own = path.with_suffix(f".media_{world.rank}.parquet")
    table = pq.read_table(own).to_pydict() if own.is_file() else {"hash": [], "bytes": []}
    files = dict(zip(table["hash"], table["bytes"]))
    opened: dict[str, Media] = {}  # those that were shared are again
    sampled, trained = [], []
    for row in rows:
        if row["rank"] != world.rank:
            continue
        row |= {name: json.loads(row[name]) for name in AS_JSON}
        for i, m in enumerate(row["media"]):
            key = json.dumps(m)
            if key not in opened:
                refuse(
                    not files.keys() >= {*m["frames"]},
                    f"--replay {path}: needs its pictures beside it, {own}",
                )
                frames = [files[name] for name in m["frames"]]
                opened[key] = Media.open(m["kind"], frames, limits, m["is_frame"])
            row["media"][i] = opened[key]
            wrong = (
                f"--replay {path}: give --min-pixels, --max-pixels, --max-frame-pixels of that run"
            )
            refuse(list(opened[key].pixels.shape[2:0:-1]) != row["shown"][i], wrong)
        sampled.append(Episode(**{f.name: row[f.name] for f in fields(Episode)}))
        if row["advantage"] is not None:
            trained.append(sampled[-1])
    return sampled, trained
