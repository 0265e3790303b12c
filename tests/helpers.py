"""Shared pieces: random small models, checkpoints, and running the scripts as their users do."""

import ast
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import zygote
from torch.distributed.fsdp import FSDPModule
from zygote import ROOT, WARM, ZYGOTE, script_environment

import common.torch_repair  # noqa: F401  (before anything of transformers is imported)
from common.attention import register_attention
from common.checkpoint import Checkpoints
from common.flags import Data, Machine, Rollout, parse
from common.packing import prompts_of_all_ranks
from common.precision import LossScale, choose_dtype
from common.types import Episode, Request, Sampling

register_attention()  # for models that are built without `load_model`


def largest_difference(tensors, references) -> float:
    """The largest of all elements."""
    pairs = zip(tensors, references, strict=True)
    return max((tensor - reference).abs().max().item() for tensor, reference in pairs)


def random_policy(config, dtype=torch.float64, seed: int = 0):
    from transformers import AutoModelForCausalLM

    from common.models import Policy

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="shared_prompts"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # spread the logits: near-uniform ones would hide mistakes
    if dtype == torch.float64:  # transformers' RMSNorm computes in float32 whatever it is given
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(rms_norm, module)
    return Policy(model, "sdpa")


def rms_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(
        x, module.weight.shape, module.weight, module.variance_epsilon
    )


def trained(seed: int = 1) -> dict:
    """A model of 15 parameters with its AdamW, a step behind them, as `checkpoints_of` takes
    them."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return {"policy": (model, optimizer)}


def checkpoints_of(
    folder: Path, trained: dict, world, *, state=None, keep=1, identity=None
) -> Checkpoints:
    """The checkpoints of a run with these (model, optimizer) by name."""
    state = dict(state or {})
    best, scales = state.pop("best", -math.inf), state.pop("loss_scale", {})
    optimizers = {
        name: SimpleNamespace(
            model=model, optimizer=optimizer, loss_scale=LossScale(**scales.get(name, {}))
        )
        for name, (model, optimizer) in trained.items()
    }
    loader = None
    if "loader" in state:
        loader = SimpleNamespace(state_dict=lambda: state["loader"])
    options = {"save_every": 20, "micro_batch_tokens": 1024}
    checkpoints = Checkpoints(
        folder, world, optimizers, loader, keep=keep, identity=identity or {}, **options
    )
    checkpoints.best = best
    return checkpoints


def save_checkpoint(
    folder: Path, step: int, trained: dict, world, *, best: bool = False, **options
) -> bool:
    """Of a run folder; options as for `checkpoints_of`."""
    return checkpoints_of(folder, trained, world, **options).save(step, math.inf if best else None)


def load_checkpoint(checkpoint: Path, trained: dict, world, weights_only: bool = False) -> dict:
    """Its trainer.json."""
    checkpoints_of(checkpoint.parents[1], trained, world).resume(checkpoint, weights_only)
    return json.loads((checkpoint / "trainer.json").read_text())


def split_of(episodes: list[Episode], count: int, *, seed: int, step: int) -> list[list[int]]:
    """Numbers of the episodes of each minibatch, as the scripts split them."""
    import grpo

    prompts = prompts_of_all_ranks(episodes)
    return grpo.split_minibatches(episodes, prompts, count, seed, step)


@cache
def parsed(text: str) -> ast.Module:
    """The syntax of a file, which many tests read; not to be changed."""
    return ast.parse(text)


def make_args(script, **flags):
    """Args of a script (the module), each flag in the group that has it."""
    args = script.Args()
    for name, value in flags.items():
        groups = [
            part
            for part in (args, *vars(args).values())
            if is_dataclass(part) and name in vars(part)
        ]
        assert len(groups) == 1, f"{script.__name__}.py has no flag {name}"
        setattr(groups[0], name, value)
    return args


def prompts_of(files, **options):
    """Rows of files as prompts; options: flags of the groups Data and Rollout, and what PromptData
    itself takes."""
    from common.data.prompts import PromptData
    from common.tools.environments import is_class

    own = {"tokenizer", "flag", "max_rows", "vision", "tools", "world", "num_embeddings"}
    own |= {"has_environment_class", "needs_truth", "prompt_column"}
    groups = [Data(), Rollout()]
    for name in options.keys() - own:
        (group,) = [group for group in groups if name in vars(group)]
        setattr(group, name, options[name])
    environment = options.get("environment")
    is_environment_class = environment is not None and is_class(environment)
    options.setdefault("has_environment_class", is_environment_class)
    return PromptData(files, *groups, **{name: options[name] for name in options.keys() & own})


def checked_args(script, monkeypatch, *arguments: str):
    """Args of a script (the module) that is called with these arguments, after it has checked
    them."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *arguments])
    args, _ = parse(script.Args, script.DEMO, script.__doc__)
    script.check_args(args)
    return args


def generate(
    engine, prompts: list[list[int]], sampling: Sampling, seeds: list[int], weights_step: int
):
    """Completions of each prompt, all requests submitted at once."""
    for key, (ids, seed) in enumerate(zip(prompts, seeds)):
        engine.submit(Request(key, ids, sampling, seed, weights_step))
    done: dict = {}
    while engine.busy:
        done |= dict(engine.step())
    return [done[key] for key in range(len(prompts))]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def deadline(seconds: float):
    """Against what would take hours, or never end. Not by TimeoutError, which code that catches
    OSError would hide."""

    def late(*_):
        raise AssertionError(f"not done after {seconds} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gathering(rank: Callable[[], int], size: int) -> Callable[[object], list]:
    """What `gather_objects` is for ranks that a test runs one after the other: a rank sees what
    came before it."""
    gathered, calls = defaultdict(lambda: [None] * size), Counter()

    def gather(value: object) -> list:
        values = gathered[calls[rank()]]
        calls[rank()] += 1
        values[rank()] = value
        return values

    return gather


def relative_l2(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """||a - b|| / ||b|| over lists of tensors."""
    difference = sum(((x - y).double() ** 2).sum() for x, y in zip(a, b, strict=True)).sqrt()
    return float(difference / sum((y.double() ** 2).sum() for y in b).sqrt())


def torchrun(*arguments: object, ranks: int = 0) -> list[str]:
    """The command `python SCRIPT ...`, or torchrun with `ranks` processes."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks] if ranks else []
    )
    return [str(part) for part in (sys.executable, *launcher, *arguments)]


def run_script(
    *arguments: object,
    ranks: int = 0,
    timeout: float = 600,
    check: bool = True,
    env: dict[str, str] | None = None,
    fresh: bool = not WARM,
):
    """Run a script to its end, forked from the warm process or, `fresh`, by torchrun; fails with
    the output's end."""
    command, environment = torchrun(*arguments, ranks=ranks), script_environment(**(env or {}))
    if fresh:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment
        )
    else:
        done = zygote.run(
            os.environ[ZYGOTE], [str(part) for part in arguments], environment, ROOT, ranks, timeout
        )
    if check and done.returncode:
        first, last = done.stderr[:4000], done.stderr[4000:][-6000:]  # the cause, and who followed
        pytest.fail(
            f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout[-3000:]}\n"
            f"{first}\n...\n{last}"
        )
    return done


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


SCRIPTS = [
    "curiosity_rl.py",
    "distill.py",
    "grpo.py",
    "ppo.py",
    "sft.py",
]  # not what users put beside them
# for runs with vLLM: filling the default's gigabyte takes a second a rank
LITTLE_CACHE = ["--engine-memory", 0.25]
UNEQUAL = ("time/", "memory/", "rollout/tokens_per_s")  # what an interruption may change


def steps_of(run_dir: Path) -> dict[int, dict]:
    """The last record of each step, without timings."""
    records = {r["step"]: r for r in metrics_of(run_dir) if "step" in r and "event" not in r}
    return {
        s: {k: v for k, v in r.items() if not k.startswith(UNEQUAL)} for s, r in records.items()
    }


def kill_all(process: subprocess.Popen) -> None:
    """torchrun gives its workers sessions of their own: killing its group would miss them."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # what dies with its parent
            member.kill()
    psutil.wait_procs(family)
    process.wait()


def is_emulated(dtype: str) -> bool:
    """Has this CPU no instructions for it?"""
    return dtype == "bf16" and choose_dtype("auto", torch.device("cpu"))[0] != torch.bfloat16


def skip_where_no_step_is_repeated(strategy: str) -> None:
    if strategy != "plain" and not hasattr(FSDPModule, "reset_iter_state"):  # "ddp" is FSDP2's, too
        pytest.skip("torch before 2.13 cannot abandon a backward")


def kill_once(*arguments: object, ranks: int, after_step: int, fresh: bool = not WARM) -> None:
    """Start a script, and kill all its processes when the metrics of a step are written, and a
    checkpoint; the output goes to a file."""
    run_dir = Path(arguments[arguments.index("--output-dir") + 1])
    metrics, log = run_dir / "metrics.jsonl", run_dir.with_suffix(".log")
    latest = run_dir / "checkpoints" / "latest"  # written after the metrics of its step
    with log.open("w") as file:
        if fresh:
            command = torchrun(*arguments, ranks=ranks)
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, env=script_environment()
            )
        else:
            command, address = [str(part) for part in arguments], os.environ[ZYGOTE]
            process = zygote.Forked(address, command, script_environment(), ROOT, ranks, file, file)
        deadline = time.time() + 300
        while not (latest.is_file() and f'"step": {after_step}' in metrics.read_text()):
            assert process.poll() is None and time.time() < deadline, log.read_text()[-3000:]
            time.sleep(0.02)
        if fresh:
            kill_all(process)
        else:
            process.kill()


def memory_phases(
    rollout: Rollout,
    machine: Machine,
    ranks: int,
    dtype: torch.dtype,
    trained: list[str],
    frozen: list[str],
    on_gpu: bool,
    reward_parameters: int = 0,
) -> dict[str, float]:
    """`phases_of` of the memory plan for the models in these folders, the policy first, then
    critics. No weights are read."""
    from common.memory.estimate import phases_of
    from common.memory.shape import model_shape

    shapes = {path: model_shape(path, machine) for path in {*trained, *frozen}}
    models = [shapes[path] for path in trained]
    references = [shapes[path] for path in frozen]
    return phases_of(rollout, machine, ranks, dtype, models, references, on_gpu, reward_parameters)
