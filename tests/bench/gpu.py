"""What a GPU makes of this trainer: update, log-probs, weight sync, sleep and wake, and a whole
step by phase.

    python tests/bench/gpu.py                                       # three sizes of Qwen2.5,
    everything
    python tests/bench/gpu.py --models 7B --parts update sync       # some of it
    python tests/bench/gpu.py --only "update:7B, checkpointing"     # one measurement
    python tests/bench/gpu.py --models 1.5B --parts update --profile        # and where the time
    goes
    python tests/bench/gpu.py --models smoke --threads 2            # that it works, on a CPU too

Weights are random, in the shapes of Qwen2.5 (0.1B: of SmolLM2), since their values play no part in
speed. Every measurement is a process of its own, so that none inherits the memory of another.

update: backward of grpo.py and AdamW's step, no engine beside it; groups of 8 responses of 768
tokens, prompts of 256. MFU counts the model's arithmetic (6 per weight and token, 12 x layers x
width per pair of tokens that attend; the head
for trained tokens), not what is recomputed, against the peak of dense bf16. sync: all weights,
float32 to engine. step: `grpo.py` as it is run, generating up to 512 tokens, medians without the
first step.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import logprobs
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro
from model_configs import QWEN2
from report import ROOT, gpu_bytes, header, table
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

import grpo
from common.attention import choose_attention
from common.distributed import init_world, make_mesh, wrap_model
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine
from common.flags import Rollout
from common.hub import FOLDERS
from common.look.curves import read_metrics
from common.models import engine_weights, load_model
from common.optimizer import GuardedAdamW
from common.packing import MicroBatch, Packer, TokenIndex
from common.script import run
from common.types import Episode

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "smoke": (128, 256, 2, 2, 1, 512, True),
    "0.1B": (576, 1536, 30, 9, 3, 49_152, True),
    **QWEN2,
}
# dense bf16, without sparsity, of the SXM boards
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
LARGE = ("7B", "14B", "32B", "72B")  # whose activations do not fit beside Adam
PROMPT, RESPONSE, GROUP = 256, 768, 8  # tokens, tokens, samples of a prompt
STEPS = 4  # of grpo.py
Part = Literal["update", "logprob", "sync", "step"]


@dataclass
class Args:
    models: tuple[str, ...] = ("0.1B", "1.5B", "7B")
    parts: tuple[Part, ...] = ("update", "logprob", "sync", "step")
    micro_batch_tokens: int = 16384  # tokens of one forward and backward
    prompts: int = 16  # groups of an update, and of a step
    repeats: int = 5  # timed repetitions, after two that are not
    threads: int = 16  # of a CPU
    profile: bool = False  # which kernels an update spends its time in
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


def make_episodes(prompts: int, vocabulary: int) -> list[Episode]:
    generator = torch.Generator().manual_seed(0)
    episodes = []
    for p in range(prompts):
        prompt = torch.randint(1, vocabulary, (PROMPT,), generator=generator).tolist()
        for s in range(GROUP):
            ids = torch.randint(1, vocabulary, (RESPONSE,), generator=generator).tolist()
            episodes.append(
                Episode(
                    p, s, prompt, ids, [1] * RESPONSE, [-1.0] * RESPONSE, "stop", {"score": s % 2}
                )
            )
    return episodes


def model_flops(config, batches: list[MicroBatch], num_parameters: int) -> float:
    """Of forward and backward, nothing recomputed. num_parameters: without the embeddings."""
    rows = sum(batch.input_ids.numel() for batch in batches)
    trained = sum(len(batch.targets) for batch in batches)
    pairs = 0
    for prompt, *responses in (unit for batch in batches for unit in batch.units):
        pairs += prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in responses)
    attention = 12 * config.num_hidden_layers * config.hidden_size * pairs
    return (
        6 * num_parameters * rows + 6 * config.vocab_size * config.hidden_size * trained + attention
    )


def measure_update(
    name: str, args: Args, compiled: bool, shared: bool, checkpointing: bool
) -> dict[str, float]:
    world = init_world()
    device = world.device
    attention = choose_attention("auto", device)
    with tempfile.TemporaryDirectory() as folder:
        make_config(name).save_pretrained(folder)
        with device:
            options = {
                "gradient_checkpointing": checkpointing,
                "compile_layers": compiled,
                "from_scratch": True,
            }
            policy = load_model(folder, attention, **options)
        config = AutoConfig.from_pretrained(folder)
    embeddings = policy.model.get_input_embeddings().weight.numel() * (
        1 if config.tie_word_embeddings else 2
    )
    num_parameters = sum(p.numel() for p in policy.parameters()) - embeddings
    policy = wrap_model(policy, make_mesh(world, "fsdp"), torch.bfloat16)
    optimizer = GuardedAdamW(policy, torch.bfloat16, weight_decay=0.01, max_grad_norm=1.0)
    episodes = make_episodes(args.prompts, config.vocab_size)
    index = TokenIndex(episodes)
    packer = Packer(attention, args.micro_batch_tokens, Path("nowhere"), world)
    if not shared:
        packer.layout["share_prompts"] = False
    (minibatch,) = packer.minibatches(episodes, index, [list(range(len(episodes)))])
    flat = [
        torch.full((len(index),), value, device=device)
        for value in (float(RESPONSE), -1.0, -1.0, -1.0, 0.0)
    ]
    tokens = grpo.Tokens(index.episode_of_token.to(device), *flat)
    tokens.advantages = (index.episode_of_token % 2).to(device) - 0.5
    script_args = grpo.Args(rollout=Rollout(max_response_tokens=RESPONSE))

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
    flops = model_flops(config, minibatch.micro_batches, num_parameters) / took
    if device.type == "cuda":
        result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        peak = next(
            (x for board, x in PEAK_FLOPS.items() if board in torch.cuda.get_device_name()), None
        )
        result |= {"MFU %": 100 * flops / peak} if peak else {}
    return result | {"TFLOP/s": flops / 1e12}


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
    return {"s": got["both s"], "MB a token": extra / args.micro_batch_tokens}


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
            PROMPT,
            "--max-response-tokens",
            512,
        ]
        tokens = args.micro_batch_tokens // 2 if name in LARGE else args.micro_batch_tokens
        command += ["--micro-batch-tokens", tokens, "--dtype", "bf16", "--max-logprob-gap", 1.0]
        command += ["--gradient-checkpointing"] if name in LARGE else []
        command += ["--compile" if compiled else "--no-compile"]
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
    found: dict[str, dict] = {part: {} for part in ("update", "logprob", "sync", "step")}
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
    for part, measurements in found.items():
        results = {}
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


if __name__ == "__main__":
    run(main, tyro.cli(Args, description=__doc__))
