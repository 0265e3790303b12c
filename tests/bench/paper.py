"""Step time and memory of large models on many H100s, on paper: nothing of it was run.

    python tests/bench/paper.py                                # 7B, 32B, 72B of Qwen2.5 on 8, 64,
    512 GPUs
    python tests/bench/paper.py --models 14B --gpus 16 32

Memory is the plan of common/memory/plan.py, with the KV cache taking what the engine leaves
of a card; times follow from published peaks and the shares of them in `Args`. A step: 512 prompts
of 512 tokens, 16 answers of 1,024 tokens each, the longest 4,096; --gradient-checkpointing, one
optimizer step. Not counted: rewards, evaluations, checkpoints.
"""

import tempfile
from dataclasses import dataclass
from functools import cache

import torch
import tyro
from gpu import SHAPES, make_config
from report import table

from common.flags import Machine, Rollout
from common.memory.plan import GB_PER_GIB, memory_phases

PROMPTS, SAMPLES, PROMPT, ANSWER, LONGEST = 512, 16, 512, 1024, 4096
# H100 SXM, published: dense bf16, HBM3, NVLink 4 and NDR InfiniBand in one direction, a PCIe 5.0
# x16 slot in one
FLOPS, HBM, NVLINK, NIC, PCIE = 989e12, 3.35e12, 450e9, 50e9, 64e9
NODE = 8  # GPUs of a machine, each with a network card of its own
CARD, ROOM = 80e9, 0.92  # bytes, and the share of them that may be planned with
SMALLEST_CACHE = 8 * GB_PER_GIB * 1e9  # bytes


@dataclass
class Args:
    models: tuple[str, ...] = ("7B", "32B", "72B")
    gpus: tuple[int, ...] = (8, 64, 512)
    mfu: float = 0.4  # share of the peak of arithmetic, what is recomputed included
    bandwidth: float = 0.8  # share of the peak of memory and of links
    hop: float = 5e-6  # seconds of a collective for each rank in its ring
    micro_batch_tokens: int = 8192


@dataclass(frozen=True)
class Model:
    """What the times need to know of a model."""

    size: float  # parameters
    layers: int
    tensors: int  # that a sync gathers one by one
    kv_bytes: int  # of a token in the cache

    @classmethod
    def named(cls, name: str) -> "Model":
        hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
        keys = hidden // heads * kv_heads
        layer = (
            2 * hidden * (hidden + keys)
            + hidden
            + 2 * keys
            + 3 * hidden * intermediate
            + 2 * hidden
        )
        size = layers * layer + (2 - tied) * vocabulary * hidden + hidden
        return cls(size, layers, 12 * layers + 3 - tied, 4 * keys * layers)


@cache
def planned(name: str, ranks: int, tokens: int, offload: bool, engine: int) -> dict[str, float]:
    """Bytes by part and phase, by the plan that a run prints, with CUDA's context; the KV cache
    comes on top."""
    machine = Machine(
        micro_batch_tokens=tokens,
        gradient_checkpointing=True,
        offload="optimizer" if offload else "",
    )
    with tempfile.TemporaryDirectory() as folder:
        make_config(name).save_pretrained(folder)
        rollout = Rollout(
            engine_memory=1e-9,
            engine_parallel=engine,
            max_prompt_tokens=PROMPT,
            max_response_tokens=LONGEST,
        )
        gb = memory_phases(rollout, machine, ranks, torch.bfloat16, [folder], [], on_gpu=True)
    for phase in ("rollout", "update"):
        gb[phase] += gb["context"]
    return {part: 1e9 * number for part, number in gb.items()}


@dataclass(frozen=True)
class Layout:
    """How a model lies on the GPUs: ranks that share a copy to train, and GPUs that share an
    engine."""

    shard: int
    engine: int
    offload: bool
    update: float  # bytes
    rollout: float  # bytes, without the KV cache

    @property
    def cache(self) -> float:
        """Bytes that are left for it on a GPU."""
        return ROOM * CARD - self.rollout


def layout(name: str, shard: int, args: Args) -> Layout | None:
    """The first that fits: moments on the GPU before moments on the host, then as few GPUs to an
    engine as will do."""
    for offload in (False, True):
        for engine in (1, 2, 4, 8):
            bytes_of = planned(name, shard, args.micro_batch_tokens, offload, engine)
            found = Layout(shard, engine, offload, bytes_of["update"], bytes_of["rollout"])
            if found.cache >= SMALLEST_CACHE and found.update <= ROOM * CARD:
                return found
    return None


def collective(size: float, ranks: int, calls: int, args: Args) -> float:
    """Seconds in which `ranks` gather, or reduce and scatter, `size` bytes in so many calls.

    Over machines NCCL's rings enter each by all of its cards, an eighth of the data by each, and
    NVLink spreads it.
    """
    link = NVLINK if ranks <= NODE else NODE * NIC
    return size * (1 - 1 / ranks) / (args.bandwidth * link) + calls * (ranks - 1) * args.hop


def sync_seconds(model: Model, lay: Layout, args: Args) -> float:
    """Every rank gathers the whole model in 16 bits, tensor by tensor; the engine comes from the
    host, and returns."""
    moved = 2 * 2 * model.size / lay.engine / (args.bandwidth * PCIE)
    return collective(2 * model.size, lay.shard, model.tensors, args) + moved


def decode_seconds(model: Model, lay: Layout, running: float, args: Args) -> float:
    """One token of each of the sequences that run in an engine: its weights and their cache are
    read once."""
    context = PROMPT / SAMPLES + ANSWER / 2  # the prompt is read once for the samples of a group
    read = (
        (2 * model.size + running * context * model.kv_bytes) / lay.engine / (args.bandwidth * HBM)
    )
    computed = 2 * model.size * running / lay.engine / (args.mfu * FLOPS)
    reduced = 2 * model.layers * (lay.engine - 1) * args.hop  # of tensor parallel, twice a layer
    return max(read, computed) + reduced


def rollout_seconds(model: Model, lay: Layout, gpus: int, args: Args) -> tuple[float, float]:
    """(seconds of a rollout, of it the tail: until the longest answer is done, when the others
    are)"""
    sequences = PROMPTS * SAMPLES * lay.engine / gpus  # of an engine
    fit = lay.engine * lay.cache / ((PROMPT / SAMPLES + ANSWER) * model.kv_bytes)
    running = min(sequences, fit)
    busy = sequences / running * ANSWER * decode_seconds(model, lay, running, args)
    tail = max(0.0, LONGEST * decode_seconds(model, lay, 1, args) - busy)
    return busy + tail, tail


def update_seconds(model: Model, lay: Layout, gpus: int, args: Args) -> float:
    """Forward, again, and backward, and behind them the collectives: whichever takes longer.

    In each micro-batch weights are gathered twice in 16 bits and gradients reduced in 32; copies
    reduce theirs once.
    """
    tokens = (PROMPTS * SAMPLES * ANSWER + PROMPTS * PROMPT) / gpus
    micro_batches = max(1.0, tokens / args.micro_batch_tokens)
    computed = 8 * model.size * tokens / (args.mfu * FLOPS)
    gathered = micro_batches * collective(8 * model.size, lay.shard, 3 * model.layers, args)
    copies = gpus // lay.shard
    reduced = 2 * 4 * model.size / lay.shard * (1 - 1 / copies) / (args.bandwidth * NIC)
    return max(computed, gathered + reduced)


def row(name: str, gpus: int, shard: int, args: Args) -> list[str]:
    head = [name, str(gpus), "FSDP" if shard == gpus else f"HSDP {shard}"]
    if (lay := layout(name, shard, args)) is None:
        least = planned(name, shard, args.micro_batch_tokens, True, 1)["update"]
        return [*head, "-", f"{least / 1e9:.0f}", *["-"] * 8]
    model = Model.named(name)
    sync, update = sync_seconds(model, lay, args), update_seconds(model, lay, gpus, args)
    rollout, tail = rollout_seconds(model, lay, gpus, args)
    step = sync + rollout + update
    seconds = [sync, rollout, tail, update, step]
    per_gpu = PROMPTS * SAMPLES * ANSWER / step / gpus
    memory = [
        f"{lay.update / 1e9:.0f}{' offload' * lay.offload}",
        f"{lay.rollout / 1e9:.0f}",
        f"{lay.cache / 1e9:.0f}",
    ]
    return [
        *head,
        str(lay.engine),
        *memory,
        *(f"{s:.1f}" if s < 10 else f"{s:.0f}" for s in seconds),
        f"{per_gpu:,.0f}",
    ]


def main(args: Args) -> None:
    if unknown := set(args.models) - set(SHAPES):
        raise SystemExit(f"--models {', '.join(unknown)}: none of {', '.join(SHAPES)}")
    head = ["model", "GPUs", "layout", "engine parallel", "update GB", "rollout GB", "KV cache GB"]
    head += ["sync s", "rollout s", "of it tail s", "update s", "step s", "tokens/s a GPU"]
    rows = [head]
    for name in args.models:
        for gpus in args.gpus:
            shards = [gpus, *(shard for shard in (NODE, 8 * NODE) if shard < gpus)]
            rows += [row(name, gpus, shard, args) for shard in shards]
    table(*rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
