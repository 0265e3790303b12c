"""Shared pieces: random small models, episodes, and running the scripts as their users do."""

import ast
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import is_dataclass
from functools import cache, partial, partialmethod
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two processes of tests share the cores

import torch
import zygote
from torch.distributed.fsdp import FSDPModule

import common.torch_repair  # noqa: F401  (before anything of transformers is imported)
from common.attention import register_attention
from common.distributed import World, init_world
from common.engine.books import Sampling
from common.episodes import Episode
from common.flags import parse

ROOT = Path(__file__).resolve().parent.parent
register_attention()  # for models that are built without `load_policy`
# A test that joins a process group of one leaves these behind; a script must not think it is part of it.
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
ZYGOTE = "TESTS_ZYGOTE"  # where to find it: in the environment, for pytest's workers
WARM = not torch.cuda.is_available()  # CUDA does not survive a fork


def pytest_configure(config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have the most tests
    if WARM and ZYGOTE not in os.environ:
        config.zygote = zygote.Zygote(script_environment())
        os.environ[ZYGOTE] = config.zygote.address


# The files that take longest come first, so that the workers are done at the same time.
LONGEST = ["test_kill_series", "test_curiosity_runs", "test_grpo_runs", "test_ppo_runs", "test_sft_runs"]
LONGEST += ["test_failing", "test_tiny_vl", "test_grpo_engines", "test_grpo_faults", "test_vision_runs"]
LONGEST += ["test_ppo_math", "test_invariance"]
LONGEST += ["test_math_rewards", "test_reward_workers", "test_house", "test_zygote"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_terminal_summary(terminalreporter) -> None:
    """The table of attacks, if any were run: what `record_property("attack", (attack, outcomes))` has noted."""
    table: dict[str, Counter] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "attack":
                table.setdefault(value[0], Counter()).update(value[1])
    if table:
        terminalreporter.section(f"{sum(map(Counter.total, table.values()))} attacks: attack, n, outcome")
    for attack, outcomes in table.items():
        words = "; ".join(f"{n} x {what}" if len(outcomes) > 1 else what for what, n in outcomes.items())
        terminalreporter.write_line(f"{attack:66} {outcomes.total():4}  {words}")


def pytest_unconfigure(config) -> None:
    if hasattr(config, "zygote"):
        config.zygote.close()
        del os.environ[ZYGOTE]


@pytest.fixture(scope="session")
def world() -> World:
    """A process group of this process alone; its watchdog would wait longer than any test session takes."""
    return init_world(stall_minutes=1e5)


@pytest.fixture(scope="session")
def tiny_config():
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )


@pytest.fixture
def eager_compiler(monkeypatch):
    """Compiled layers run as they were traced: flex attention has no backward to compile on a CPU."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):  # an engine in this process may have set it
        yield


def random_policy(config, dtype=torch.float64, seed: int = 0):
    from transformers import AutoModelForCausalLM

    from common.models import Policy

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="shared_prompts")
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
    return torch.nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def trained(seed: int = 1) -> dict:
    """A model of 15 parameters with its AdamW, a step behind them, as `save_checkpoint` takes them."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"policy": (model, optimizer)}


def random_episodes(seed: int, prompts: int = 3, samples: int = 4, vocab: int = 97) -> list[Episode]:
    """Groups of ragged episodes; some tokens in the middle are observations, and one episode trains nothing."""
    rng = random.Random(seed)
    episodes = []
    for p in range(prompts):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.randint(2, 9))]
        for s in range(samples):
            length = rng.randint(1, 14)
            mask = [int(rng.random() > 0.25) for _ in range(length)]
            if p == s == 1:
                mask = [0] * length
            ids = [rng.randrange(3, vocab) for _ in range(length)]
            logprobs = [-rng.random() * m for m in mask]
            episodes.append(Episode(p, s, prompt, ids, mask, logprobs, "stop", {"score": float(rng.random() < 0.4)}))
    return episodes


@cache
def parsed(text: str) -> ast.Module:
    """The syntax of a file, which many tests read; not to be changed."""
    return ast.parse(text)


def make_args(script, **flags):
    """Args of a script (the module), each flag in the group that has it."""
    args = script.Args()
    for name, value in flags.items():
        groups = [part for part in (args, *vars(args).values()) if is_dataclass(part) and name in vars(part)]
        assert len(groups) == 1, f"{script.__name__}.py has no flag {name}"
        setattr(groups[0], name, value)
    return args


def checked_args(script, monkeypatch, *arguments: str):
    """Args of a script (the module) that is called with these arguments, after it has checked them."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *arguments])
    args, _ = parse(script.Args, script.DEMO, script.__doc__)
    script.check_args(args)
    return args


def generate(engine, prompts: list[list[int]], sampling: Sampling, seeds: list[int], weights_step: int):
    """Completions of each prompt, all requests submitted at once."""
    for key, (ids, seed) in enumerate(zip(prompts, seeds)):
        engine.submit(key, ids, sampling, seed, weights_step)
    done: dict = {}
    while engine.busy:
        done |= dict(engine.step())
    return [done[key] for key in range(len(prompts))]


@contextlib.contextmanager
def deadline(seconds: float):
    """Against what would take hours, or never end."""

    def late(*_):
        raise TimeoutError(f"not done after {seconds} s")

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


def relative_l2(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """||a - b|| / ||b|| over lists of tensors."""
    difference = sum(((x - y).double() ** 2).sum() for x, y in zip(a, b, strict=True)).sqrt()
    return float(difference / sum((y.double() ** 2).sum() for y in b).sqrt())


def torchrun(*arguments: object, ranks: int = 0) -> list[str]:
    """The command `python SCRIPT ...`, or torchrun with `ranks` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks] if ranks else []
    return [str(part) for part in (sys.executable, *launcher, *arguments)]


def script_environment(**extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **extra}


def run_script(
    *arguments: object,
    ranks: int = 0,
    timeout: float = 600,
    check: bool = True,
    env: dict[str, str] | None = None,
    fresh: bool = not WARM,
):
    """Run a script to its end, forked from the warm process or, `fresh`, by torchrun; fails with the output's end."""
    command, environment = torchrun(*arguments, ranks=ranks), script_environment(**(env or {}))
    if fresh:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment)
    else:
        done = zygote.run(os.environ[ZYGOTE], [str(part) for part in arguments], environment, ROOT, ranks, timeout)
    if check and done.returncode:
        pytest.fail(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


LITTLE_CACHE = ["--engine-memory", 0.25]  # for runs with vLLM: filling the default's gigabyte takes a second a rank
UNEQUAL = ("time/", "memory/", "rollout/tokens_per_s")  # what an interruption may change


def steps_of(run_dir: Path) -> dict[int, dict]:
    """The last record of each step, without timings."""
    records = {r["step"]: r for r in metrics_of(run_dir) if "step" in r and "event" not in r}
    return {s: {k: v for k, v in r.items() if not k.startswith(UNEQUAL)} for s, r in records.items()}


def kill_all(process: subprocess.Popen) -> None:
    """torchrun gives its workers sessions of their own: killing its group would miss them."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family)
    process.wait()


def skip_where_no_step_is_repeated(strategy: str) -> None:
    if strategy == "fsdp" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("torch before 2.13 cannot abandon a backward")


def kill_once(*arguments: object, ranks: int, after_step: int, fresh: bool = not WARM) -> None:
    """Start a script, and kill all its processes when the metrics of a step are written; the output goes to a file."""
    run_dir = Path(arguments[arguments.index("--output-dir") + 1])
    metrics, log = run_dir / "metrics.jsonl", run_dir.with_suffix(".log")
    with log.open("w") as file:
        if fresh:
            command = torchrun(*arguments, ranks=ranks)
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=script_environment())
        else:
            command, address = [str(part) for part in arguments], os.environ[ZYGOTE]
            process = zygote.Forked(address, command, script_environment(), ROOT, ranks, file, file)
        deadline = time.time() + 300
        while not (metrics.is_file() and f'"step": {after_step}' in metrics.read_text()):
            assert process.poll() is None and time.time() < deadline, log.read_text()[-3000:]
            time.sleep(0.02)
        if fresh:
            kill_all(process)
        else:
            process.kill()
