"""What a GPU makes of this trainer: update, log-probs, weight sync, sleep and wake, and a whole
step by phase.

    # three sizes of Qwen2.5, everything
    python tests/bench/gpu.py
    # some of it
    python tests/bench/gpu.py --models 7B --parts update sync
    # one measurement
    python tests/bench/gpu.py --only "update:7B, checkpointing"
    # and where the time goes
    python tests/bench/gpu.py --models 1.5B --parts update --profile
    # the goals
    python tests/bench/gpu.py --models 1.5B 7Bx8 --prompts 8 --parts update
    # that it works, on a CPU too
    python tests/bench/gpu.py --models smoke --threads 2

Weights are random, in the shapes of Qwen2.5 (0.1B: of SmolLM2), since their values play no part in
speed. Every measurement is a process of its own, so that none inherits the memory of another.

update: backward of grpo.py and AdamW's step, no engine beside it; groups of 8 responses of 768
tokens, prompts of 256. MFU in three conventions (roofline.py), which has the goals, too, and what
they are on paper; 7Bx8 has 8 of the 28 layers of 7B. lengths: how often layers are compiled for
micro-batches of ten lengths. sync: all weights, float32 to engine. step: `grpo.py` as it is run,
generating up to 512 tokens, medians without the first step.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import logprobs
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro
from report import ROOT, gpu_bytes, header, table
from roofline import (
    GOALS,
    LENGTHS,
    SHAPES,
    UPDATES,
    Model,
    model_flops,
    peak_flops,
    seconds_on_eight,
)
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import grpo
from common.attention import choose_attention
from common.distributed import World, init_world, make_mesh, wrap_model
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine
from common.flags import Rollout
from common.hub import FOLDERS
from common.look.curves import read_metrics
from common.models import engine_weights, load_model
from common.optimizer import GuardedAdamW
from common.packing import Minibatch, Packer, TokenIndex
from common.script import run
from common.types import Episode

LARGE = ("7B", "14B", "32B", "72B")  # whose activations do not fit beside Adam
GROUP = len(LENGTHS) - 1  # samples of a prompt
STEPS = 4  # of grpo.py
Part = Literal["update", "lengths", "logprob", "sync", "step"]


@dataclass
class Args:
    models: tuple[str, ...] = ("0.1B", "1.5B", "7B")
    parts: tuple[Part, ...] = ("update", "lengths", "logprob", "sync", "step")
    micro_batch_tokens: int = 16384  # tokens of one forward and backward
    prompts: int = 16  # groups of an update, and of a step
    prompt_tokens: int = LENGTHS[0]
    response_tokens: int = LENGTHS[1]  # of an update
    repeats: int = 5  # timed repetitions, after two that are not
    threads: int = 16  # of a CPU
    profile: bool = False  # which kernels an update spends its time in
    activation_memory: float = 1.0  # of compiled layers: the share of activations that they keep
    flags: str = ""  # step: further flags of grpo.py, such as "--engine-memory 32"
    # one measurement in this process, as JSON: what the benchmark itself calls
    only: str | None = None


def make_config(name: str):
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    kind = LlamaConfig if name == "0.1B" else Qwen2Config
    return kind(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        architectures=["LlamaForCausalLM" if kind is LlamaConfig else "Qwen2ForCausalLM"],
    )


def save_model(name: str, folder: Path, device: torch.device) -> None:
    """Random bf16 weights that vLLM and the scripts load, with the bytes of `tiny` as a
    tokenizer."""
    with device:
        model = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    for file in FOLDERS["tiny"].glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())


def seconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median; the first two calls do not count."""
    return median([seconds_of(function, device) for _ in range(repeats + 2)][2:])


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_episodes(args: Args, vocabulary: int) -> list[Episode]:
    generator = torch.Generator().manual_seed(0)
    length = args.response_tokens
    episodes = []
    for p in range(args.prompts):
        prompt = torch.randint(1, vocabulary, (args.prompt_tokens,), generator=generator).tolist()
        for s in range(GROUP):
            ids = torch.randint(1, vocabulary, (length,), generator=generator).tolist()
            episodes.append(
                Episode(p, s, prompt, ids, [1] * length, [-1.0] * length, "stop", {"score": s % 2})
            )
    return episodes


def random_policy(name: str, args: Args, world: World, compiled: bool, checkpointing: bool):
    """A policy with random weights, and the attention that it has."""
    attention = choose_attention("auto", world.device)
    with tempfile.TemporaryDirectory() as folder:
        make_config(name).save_pretrained(folder)
        with world.device:
            policy = load_model(
                folder,
                attention,
                gradient_checkpointing=checkpointing,
                compile_layers=compiled,
                activation_memory=args.activation_memory,
                from_scratch=True,
            )
    return policy, attention


def tokens_of(episodes: list[Episode], index: TokenIndex, device: torch.device) -> grpo.Tokens:
    length = len(episodes[0].response_ids)
    flat = [
        torch.full((len(index),), value, device=device)
        for value in (float(length), -1.0, -1.0, -1.0, 0.0)
    ]
    tokens = grpo.Tokens(index.episode_of_token.to(device), *flat)
    tokens.advantages = (index.episode_of_token % 2).to(device) - 0.5
    return tokens


def measure_update(
    name: str, args: Args, compiled: bool, shared: bool, checkpointing: bool
) -> dict[str, float]:
    world = init_world()
    device = world.device
    policy, attention = random_policy(name, args, world, compiled, checkpointing)
    config = policy.model.config
    embeddings = policy.model.get_input_embeddings().weight.numel() * (
        1 if config.tie_word_embeddings else 2
    )
    num_parameters = sum(p.numel() for p in policy.parameters()) - embeddings
    policy = wrap_model(policy, make_mesh(world, "fsdp"), torch.bfloat16)
    optimizer = GuardedAdamW(policy, torch.bfloat16, weight_decay=0.01, max_grad_norm=1.0)
    episodes = make_episodes(args, config.vocab_size)
    index = TokenIndex(episodes)
    packer = Packer(attention, args.micro_batch_tokens, Path("nowhere"), world)
    if not shared:
        packer.layout = replace(packer.layout, share_prompts=False)
    (minibatch,) = packer.minibatches(episodes, index, [list(range(len(episodes)))])
    tokens = tokens_of(episodes, index, device)
    script_args = grpo.Args(rollout=Rollout(max_response_tokens=args.response_tokens))

    def update() -> None:
        grpo.backward(policy, minibatch, tokens, script_args, world, store_old_logprobs=True)
        metrics = optimizer.step(1e-6).reduce()
        assert not metrics["optim/skipped_steps"] and metrics["optim/grad_norm"] > 0, (
            "zeros are faster"
        )

    took = seconds(update, args.repeats, device)
    if args.profile:
        with torch.profiler.profile() as profile:
            update()
            synchronize(device)
        order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(
            profile.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=70),
            file=sys.stderr,
        )
    result = {"s": took, "trained tokens/s": len(index) / took, "peak GB": 0.0}
    if device.type == "cuda":
        result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    counted = count_flops(replace(Model.named(name), weights=num_parameters), minibatch)
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    if peak:
        result["MFU %"] = 100 * counted["ours"] / took / peak
        for convention in ("torchtitan", "verl"):
            result[f"{convention}'s %"] = 100 * counted[convention] / took / peak
    return result | {"TFLOP/s": counted["ours"] / took / 1e12}


def count_flops(model: Model, minibatch: Minibatch) -> dict[str, float]:
    """Of an update, by convention."""
    batches = minibatch.micro_batches
    units = [unit for batch in batches for unit in batch.units]
    num_rows = sum(batch.input_ids.numel() for batch in batches)
    num_trained = sum(len(batch.targets) for batch in batches)
    return {
        convention: model_flops(model, units, num_rows, num_trained, convention)
        for convention in ("ours", "torchtitan", "verl")
    }


def measure_lengths(name: str, args: Args, compiled: bool) -> dict[str, float]:
    """How often layers are compiled for ten micro-batches of as many lengths: number of graphs, and
    of breaks in them."""
    world = init_world()
    policy, attention = random_policy(name, args, world, compiled, checkpointing=False)
    policy = wrap_model(policy, make_mesh(world, "fsdp"), torch.bfloat16)
    packer = Packer(attention, args.micro_batch_tokens, Path("nowhere"), world)
    script_args = grpo.Args(rollout=Rollout(max_response_tokens=args.response_tokens))
    counters = torch._dynamo.utils.counters
    counters.clear()
    for i in range(10):
        shorter = replace(args, prompts=1, response_tokens=max(1, args.response_tokens - 16 * i))
        episodes = make_episodes(shorter, SHAPES[name][5])
        index = TokenIndex(episodes)
        (minibatch,) = packer.minibatches(episodes, index, [list(range(len(episodes)))])
        tokens = tokens_of(episodes, index, world.device)
        grpo.backward(policy, minibatch, tokens, script_args, world, store_old_logprobs=True)
    num_layers = SHAPES[name][2]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "layers": num_layers,
        "graph breaks": sum(counters["graph_break"].values()),
    }


def measure_logprob(name: str, args: Args) -> dict[str, float]:
    hidden, vocabulary = SHAPES[name][0], SHAPES[name][5]
    options = {
        "tokens": (args.micro_batch_tokens,),
        "vocab": vocabulary,
        "hidden": hidden,
        "threads": args.threads,
    }
    got = logprobs.measure(logprobs.Args(dtypes=("bf16",), only="chunked", **options))
    extra = got["both MB"] - got["gradients MB"]
    tokens = args.micro_batch_tokens
    return {"s": got["both s"], "s a token": got["both s"] / tokens, "MB a token": extra / tokens}


def measure_sync(name: str, args: Args) -> dict[str, float]:
    world = init_world()
    device = world.device
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(name, folder, device)
        before = held_gb()
        options = {
            "end_ids": [0],
            "max_model_len": 512,
            "memory_gib": 8.0 if device.type == "cuda" else 0.5,
        }
        engine = VllmEngine(EngineConfig(str(folder), torch.bfloat16, world, **options))
        policy = load_model(str(folder), choose_attention("auto", device))
    policy = wrap_model(policy, make_mesh(world, "fsdp"), torch.bfloat16)
    result = {"copy GB/s": copy_bandwidth(device)}

    def sync_engine() -> None:
        engine.sync_weights(engine_weights(engine, policy), 0)

    sync = seconds(sync_engine, args.repeats, device)
    result |= {"sync s": sync, "sync GB/s": 2 * sum(engine.books.expected.values()) / 1e9 / sync}
    for level in (1, 2) if device.type == "cuda" else ():
        engine.sleep_level, times = level, {"sleep": [], "wake": []}
        for _ in range(args.repeats + 1):
            awake = gpu_bytes() / 1e9
            times["sleep"].append(seconds_of(engine.sleep, device))
            asleep = gpu_bytes() / 1e9
            times["wake"].append(
                seconds_of(lambda: (engine.wake("weights"), engine.wake("kv_cache")), device)
            )
            sync_engine()
        result |= {f"{what} {level} s": median(x[1:]) for what, x in times.items()}
        result |= {f"freed by {level} GB": awake - asleep}
    held = 4 * sum(p.numel() for p in policy.parameters()) / 1e9
    return result | {"engine awake GB": held_gb() - before - held}


def held_gb() -> float:
    """Memory of the device in use, but for what torch only keeps."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return gpu_bytes() / 1e9


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a copy from device memory to device memory, counted once as a sync's bytes are."""
    source = torch.ones(
        2**30 if device.type == "cuda" else 2**26, device=device, dtype=torch.bfloat16
    )
    target = torch.empty_like(source)
    return source.nbytes / 1e9 / seconds(lambda: target.copy_(source), 10, device)


def measure_step(name: str, args: Args, compiled: bool) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(name, folder / "model", device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        truth = {"style": "rule", "ground_truth": "1"}
        rows = [
            {"data_source": "openai/gsm8k", "prompt": f"{i:>5} " + 240 * "x", "reward_model": truth}
            for i in range(4 * args.prompts)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
        command = [
            sys.executable,
            "grpo.py",
            "--model",
            folder / "model",
            "--train-data",
            folder / "train.parquet",
        ]
        command += [
            "--output-dir",
            folder / "run",
            "--total-steps",
            STEPS + 1,
            "--prompts-per-step",
            args.prompts,
        ]
        command += [
            "--samples-per-prompt",
            GROUP,
            "--max-prompt-tokens",
            args.prompt_tokens,
            "--max-response-tokens",
            512,
        ]
        tokens = args.micro_batch_tokens // 2 if name in LARGE else args.micro_batch_tokens
        command += ["--micro-batch-tokens", tokens, "--dtype", "bf16", "--max-logprob-gap", 1.0]
        command += ["--gradient-checkpointing"] if name in LARGE else []
        command += ["--compile" if compiled else "--no-compile"]
        command += args.flags.split()
        steps = first_steps(list(map(str, command)), folder)[1:]
    names = {
        "rollout_s": "rollout",
        "sync_s": "sync",
        "logprob_s": "logprob",
        "update_s": "update",
        "step_s": "step",
    }
    result = {
        f"{label} s": median(step[f"time/{key}"] for step in steps) for key, label in names.items()
    }
    result["rollout tokens/s"] = median(step["rollout/tokens_per_s"] for step in steps)
    return result | {"gap": median(step["policy/rollout_logprob_gap"] for step in steps)}


def first_steps(command: list[str], folder: Path) -> list[dict[str, float]]:
    """Metrics of the first STEPS steps of a run into folder/run, which is then killed: no
    checkpoint, no export."""
    metrics, steps = folder / "run" / "metrics.jsonl", []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run must not outlive this process
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while len(steps) < STEPS:
            if process.poll() is not None:
                raise SystemExit((folder / "log").read_text()[-6000:])
            time.sleep(0.2)
            steps = (
                [record for record in read_metrics(metrics) if record.get("step")]
                if metrics.is_file()
                else []
            )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return steps[:STEPS]


def cases(args: Args) -> dict[str, dict[str, Callable[[], dict[str, float]]]]:
    """{part: {label: measurement}}; what is compiled is measured on GPUs alone."""
    found: dict[str, dict] = {part: {} for part in get_args(Part)}
    for name in args.models:
        for compiled in (False, True) if torch.cuda.is_available() else (False,):
            how = f"{name}, compiled" if compiled else name
            found["step"][how] = partial(measure_step, name, args, compiled)
            ways = ((True, False), (False, False), (True, True))  # shared prompts, checkpointing
            for shared, checkpointing in ways[2:] if name in LARGE else ways:
                label = (
                    how + ", prompts repeated" * (not shared) + ", checkpointing" * checkpointing
                )
                found["update"][label] = partial(
                    measure_update, name, args, compiled, shared, checkpointing
                )
            found["lengths"][how] = partial(measure_lengths, name, args, compiled)
        found["logprob"][name] = partial(measure_logprob, name, args)
        found["sync"][name] = partial(measure_sync, name, args)
    return {part: found[part] for part in args.parts}


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    if unknown := set(args.models) - set(SHAPES):
        raise SystemExit(f"--models {', '.join(unknown)}: none of {', '.join(SHAPES)}")
    found = cases(args)
    if args.only:
        part, label = args.only.split(":")
        print("\n" + json.dumps(found[part][label]()))
        return
    header(f"on a GPU: {', '.join(args.models)}; {args.prompts} x {GROUP} responses", args.threads)
    results_of: dict[str, dict[str, dict[str, float]]] = {}
    for part, measurements in found.items():
        results = results_of[part] = {}
        for label in measurements:
            command = [sys.executable, *sys.argv, "--only", f"{part}:{label}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(
                    f"{part}, {label}: failed\n{done.stdout[-500:]}{done.stderr[-1500:]}",
                    flush=True,
                )
                continue
            results[label] = json.loads(done.stdout.strip().splitlines()[-1])
            if args.profile:
                print(done.stderr, flush=True)
            # the tables come last
            print(f"{part}, {label}: {json.dumps(results[label])}", flush=True)
        columns = list(dict.fromkeys(key for result in results.values() for key in result))
        if results:
            cells = [[f"{r[c]:.4g}" if c in r else "-" for c in columns] for r in results.values()]
            table([part, *columns], *([label, *row] for label, row in zip(results, cells)))
    if torch.cuda.is_available():
        print_goals(results_of)


def print_goals(results_of: dict[str, dict[str, dict[str, float]]]) -> None:
    """MFU of the configurations that have a goal, as seen and on paper."""
    card = torch.cuda.get_device_name()
    peak = peak_flops(card)
    if not peak:
        print(f"{card}: no peak in tests/bench/roofline.py, so no MFU")
        return
    updates = results_of.get("update", {})
    seen = {label: updates[label]["MFU %"] for label in GOALS if label in updates}
    on_eight = "7B, compiled, 8 GPUs"
    head = results_of.get("logprob", {}).get("7B")
    if head and "7Bx8, compiled" in updates:
        seen[on_eight] = mfu_on_eight(updates["7Bx8, compiled"], head["s a token"], peak)
    for label, percent in seen.items():
        computed = (
            ", computed from 7Bx8, the head and the rest on paper" if label == on_eight else ""
        )
        paper = 100 * UPDATES[label].mfu(peak_flops("H100"))
        print(
            f"{label}: MFU {percent:.1f} %{computed}; the goal on an H100 is {GOALS[label]:.0f}, "
            f"on paper {paper:.1f}"
        )


def mfu_on_eight(update: dict[str, float], head_seconds: float, peak: float) -> float:
    """Percent, of 7B on eight GPUs with the tokens of an update of 7Bx8 on each of them.

    head_seconds: of a trained token, forward and backward.
    """
    trained = update["s"] * update["trained tokens/s"]
    paper = UPDATES["7B, compiled, 8 GPUs"]
    flops = paper.flops() * trained / (paper.micro_batches * paper.num_trained)
    seconds = seconds_on_eight(update["s"], head_seconds * trained, trained)
    return 100 * flops / seconds / peak


if __name__ == "__main__":
    run(main, tyro.cli(Args, description=__doc__))
