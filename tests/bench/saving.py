"""What a rank needs of the host's memory while it saves its shards of a 7B: growth of its peak, and
seconds.

    python tests/bench/saving.py  # an eighth of 7 of Qwen2.5-7B's 28 layers: 4 GB, and as much disk
    python tests/bench/saving.py --layers 1 --ways "one file"   # three times as much memory

Interleaved, each in a process of its own: `pickled` is torch's default format, which checkpoints
had before; `ours` is `save_shards`; `one file` the same without a bound on the size of a file.
Tensors are parts of larger storages: the writer copies what it saves, as it does from a GPU.
"""

import resource
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
import tyro
from report import header, table

from common import shards

Way = Literal["pickled", "ours", "one file"]
HIDDEN, INTERMEDIATE, KV, VOCABULARY = 3584, 18944, 512, 152064  # of Qwen2.5-7B


@dataclass
class Args:
    layers: int = 7  # of 28
    ranks: int = 8  # whose first one this is
    repeats: int = 3
    ways: tuple[Way, ...] = ("pickled", "ours")
    only: Way | None = None  # one measurement: what the benchmark itself calls
    folder: Path = Path(tempfile.gettempdir())  # where a checkpoint is written, and removed


def tensors_of(args: Args) -> dict[str, torch.Tensor]:
    """Weights and both moments of a rank, parameter by parameter."""
    shapes = {"embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    for layer in range(args.layers):
        shapes[f"{layer}.q_proj"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.k_proj"] = (KV, HIDDEN)
        shapes[f"{layer}.v_proj"] = (KV, HIDDEN)
        shapes[f"{layer}.o_proj"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.gate_proj"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{layer}.up_proj"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{layer}.down_proj"] = (HIDDEN, INTERMEDIATE)
    tensors = {}
    for part in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        for name, (rows, columns) in shapes.items():
            storage = torch.ones(1 + rows // args.ranks, columns)
            tensors[f"policy.{part}.{name}"] = storage[1:]
    return tensors


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(args: Args) -> None:
    tensors = tensors_of(args)
    before = peak_bytes()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.only == "pickled":
            dcp.save(tensors, checkpoint_id=folder, no_dist=True)
        else:
            if args.only == "one file":
                shards.FILE_BYTES = 2**60
            shards.save_shards(tensors, Path(folder))
        seconds = time.perf_counter() - begin
        files = [file.stat().st_size for file in Path(folder).iterdir()]
    print(before / 1e9, (peak_bytes() - before) / 1e9, seconds, len(files), max(files) / 1e9)


def main(args: Args) -> None:
    if args.only:
        warnings.simplefilter("ignore")
        measure(args)
        return
    header("saving a rank's shards", threads=torch.get_num_threads())
    columns = [
        "way, round",
        "GB before",
        "GB more at the peak",
        "seconds",
        "files",
        "GB of the largest",
    ]
    rows = [columns]
    for repeat in range(args.repeats):
        for way in args.ways:
            command = [sys.executable, __file__, "--only", way, "--layers", args.layers]
            command += ["--ranks", args.ranks, "--folder", args.folder]
            done = subprocess.run(
                [str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True
            )
            before, growth, seconds, files, largest = map(float, done.stdout.split())
            numbers = [
                f"{before:.2f}",
                f"{growth:.2f}",
                f"{seconds:.1f}",
                f"{files:.0f}",
                f"{largest:.2f}",
            ]
            rows.append([f"{way}, {repeat + 1}", *numbers])
            print(*rows[-1], flush=True)
    table(*rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
