"""What the benchmarks share: the repository and tests/ on the import path, on which machine they
ran, and tables."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# of processes
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

import torch  # noqa: E402

import common.torch_repair  # noqa: E402, F401  (before a benchmark imports transformers)
from common.config import git_commit  # noqa: E402
from common.limits import total_memory, usable_cpus  # noqa: E402


def header(title: str, threads: int) -> None:
    """Print the title, the commit and the hardware: without them a number means nothing."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = total_memory() / 2**30
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    hardware = [
        *names[:1],
        f"{usable_cpus()} cores",
        f"{threads} threads",
        f"{memory:.0f} GiB",
        *gpus,
    ]
    print(title)
    print(f"commit {git_commit()}; torch {torch.__version__}; {', '.join(hardware)}\n")


def gpu_bytes() -> int:
    """In use on the present GPU, by whatever process; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def table(*rows: list[str]) -> None:
    """Print rows of cells as a markdown table; the first row is its head, the first column is set
    to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    for row in [rows[0], rule, *rows[1:]]:
        print(
            "| "
            + " | ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]
            )
            + " |"
        )
    print(flush=True)
