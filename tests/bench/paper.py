"""Step time and memory of large models on many H100s, on paper: nothing of it was run.

    python tests/bench/paper.py                                # 7B, 32B, 72B of Qwen2.5 on 8, 64,
    512 GPUs
    python tests/bench/paper.py --models 14B --gpus 16 32
    python tests/bench/paper.py --tasks                        # four tasks on eight GPUs

Memory is the plan of common/memory/plan.py, with the KV cache taking what the engine leaves
of a card; times follow from published peaks and the shares of them in `Args`. A step: 512 prompts
of 512 tokens, 16 answers of 1,024 tokens each, the longest 4,096; --gradient-checkpointing, one
optimizer step. Not counted: rewards, evaluations, checkpoints.

--tasks: the batches and lengths of `TASKS`, which are assumed, in place of these; each answer has a
length of its own, and attention counts.
"""

import heapq
import math
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import torch
import tyro
from gpu import SHAPES, make_config
from model_configs import published_config
from report import table

from common.flags import Machine, Rollout
from common.memory.estimate import phases_of
from common.memory.plan import GB_PER_GIB, memory_phases
from common.memory.shape import ModelShape, model_shape
from common.vision import skeleton

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
    tasks: bool = False  # four tasks on eight GPUs, in place of `models` on `gpus`


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


def decode_seconds(
    model: Model,
    lay: Layout,
    running: float,
    args: Args,
    # tokens; the prompt is read once for the samples of a group
    context: float = PROMPT / SAMPLES + ANSWER / 2,
) -> float:
    """One token of each of the sequences that run in an engine: its weights and their cache are
    read once."""
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


# --- four tasks on eight GPUs ---------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model and its batch; all lengths in tokens. Those of answers are log-normal, and cut at the
    longest."""

    name: str
    config: str  # of CONFIGS
    median: float  # of answers
    longest: int
    prompt: int  # on average
    longest_prompt: int
    gpus: int = NODE
    prompts: int = 128  # that a step trains on
    samples: int = 8
    oversample: float = 1.0  # prompts that a step samples, for each that it trains on
    spread: float = 0.8  # of the logarithms of lengths
    calls: int = 0  # of tools, in an answer
    reply: int = 0  # that a call returns
    minibatches: int = 1
    kl: bool = False  # with a reference
    checkpointing: bool = False
    compile: bool = True
    micro_batch_tokens: int = 16_384  # or the longest trajectory, if that is more
    mfu: float = 0.0  # in place of --mfu: where it was measured
    steps: int = 200

    @property
    def trajectory(self) -> int:
        """The longest one."""
        return self.longest_prompt + self.longest

    @property
    def machine(self) -> Machine:
        return Machine(
            micro_batch_tokens=max(self.micro_batch_tokens, self.trajectory),
            gradient_checkpointing=self.checkpointing,
            compile=self.compile,
        )

    def lengths(self) -> list[int]:
        """What the policy writes in the answers of a step."""
        random = Random(0)
        count = math.ceil(self.oversample * self.prompts) * self.samples
        drawn = (random.lognormvariate(math.log(self.median), self.spread) for _ in range(count))
        return [min(self.longest - self.calls * self.reply, round(length)) for length in drawn]


TOOL_SECONDS = 1.0  # of a call of a tool, while the engine goes on with other answers
PYTHON_SECONDS = 30e-6  # of vLLM's scheduler, for each sequence and token
TASKS = (
    Task(
        "(a) 8B",
        "Qwen3-8B",
        median=6000,
        longest=16_384,
        prompt=256,
        longest_prompt=1024,
        oversample=1.8,
        checkpointing=True,
    ),
    Task(
        "(b) 4B",
        "Qwen3-4B",
        median=2000,
        longest=8192,
        prompt=512,
        longest_prompt=1024,
        calls=3,
        reply=200,
        micro_batch_tokens=8192,
    ),
    Task(
        "(c) VL-7B",
        "VL-7B",
        median=300,
        longest=2048,
        prompt=768,
        longest_prompt=2048,
        prompts=512,
        samples=5,
        minibatches=4,
        kl=True,
        checkpointing=True,
        compile=False,
    ),
    Task(
        "(d) 1.5B",
        "1.5B",
        median=300,
        longest=1024,
        prompt=128,
        longest_prompt=512,
        gpus=1,
        minibatches=4,
        mfu=0.31,
    ),
)


def task_phases(task: Task, shape: ModelShape, machine: Machine) -> dict[str, float]:
    """Gigabytes, by the plan that a run prints; without a KV cache."""
    rollout = Rollout(
        engine_memory=1e-9,
        max_prompt_tokens=task.longest_prompt,
        max_response_tokens=task.longest,
    )
    frozen = [shape] * task.kl
    return phases_of(rollout, machine, task.gpus, torch.bfloat16, [shape], frozen, on_gpu=True)


class TaskEngine:
    """An engine that writes as many answers at once as fit at their mean length, first come, first
    served."""

    def __init__(self, task: Task, model: Model, lay: Layout, args: Args):
        self.task = task
        self.model = model
        self.lay = lay
        self.args = args
        lengths = task.lengths()
        self.prompt = task.prompt / task.samples  # read once for the samples of a group
        # of an answer, for each token written
        self.growth = 1 + task.calls * task.reply * len(lengths) / sum(lengths)
        mean = self.growth * sum(lengths) / len(lengths)
        self.places = int(lay.cache / ((self.prompt + mean) * model.kv_bytes))
        self.waiting: deque[tuple[int, int]] = deque()  # (length, group)
        self.running: list[tuple[int, int, int]] = []  # (end, start, group) in tokens of its clock
        self.unfinished: Counter[int] = Counter()  # answers of each group
        self.now = 0
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, group: int, lengths: list[int]) -> None:
        self.unfinished[group] = len(lengths)
        self.waiting.extend((length, group) for length in lengths)

    def token_seconds(self, running: int, written: float) -> float:
        context = self.prompt + self.growth * written
        decode = decode_seconds(self.model, self.lay, running, self.args, context)
        return max(decode, PYTHON_SECONDS * running)

    def advance(self, until: float = math.inf) -> list[int]:
        """Write until this token of its clock, or until nothing is left; returns the groups that
        were finished."""
        finished = []
        while self.busy and self.now < until:
            while self.waiting and len(self.running) < self.places:
                length, group = self.waiting.popleft()
                heapq.heappush(self.running, (self.now + length, self.now, group))
            steps = min(self.running[0][0], until) - self.now
            starts = sum(self.now - start for _, start, _ in self.running)
            written = starts / len(self.running) + steps / 2
            self.seconds += steps * self.token_seconds(len(self.running), written)
            self.now += steps
            while self.running and self.running[0][0] == self.now:
                _, _, group = heapq.heappop(self.running)
                self.unfinished[group] -= 1
                if not self.unfinished[group]:
                    del self.unfinished[group]
                    finished.append(group)
        return finished


def task_rollout_seconds(task: Task, model: Model, lay: Layout, args: Args) -> tuple[float, float]:
    """(seconds of the slowest engine, those that engines would take which are always full)

    Prompts are dealt to the engines in turn.
    """
    lengths = task.lengths()
    engines = [TaskEngine(task, model, lay, args) for _ in range(task.gpus)]
    for group in range(len(lengths) // task.samples):
        answers = lengths[group * task.samples : (group + 1) * task.samples]
        engines[group % task.gpus].add(group, answers)
    for engine in engines:
        engine.advance()
    slowest = max(engine.seconds for engine in engines)
    places = min(engines[0].places, len(lengths) // task.gpus)
    written = sum(length**2 for length in lengths) / sum(lengths) / 2  # at a random moment
    token_seconds = engines[0].token_seconds(places, written)
    full = sum(lengths) / task.gpus / places * token_seconds
    prefilled = len(lengths) * (engines[0].prompt + task.calls * task.reply) / task.gpus
    prefill = 2 * model.size * prefilled / (args.mfu * FLOPS)
    return slowest + prefill + task.calls * TOOL_SECONDS, full + prefill


def task_update_seconds(task: Task, shape: ModelShape, args: Args) -> float:
    """Forward and backward, forwards again by checkpointing, of the reference, and of old log-probs
    (of all minibatches but the first); behind them the collectives are hidden."""
    lengths = task.lengths()
    count = task.prompts * task.samples  # answers that it trains on
    answer = sum(lengths) / len(lengths) + task.calls * task.reply
    tokens = (count * answer + task.prompts * task.prompt) / task.gpus
    passes = 3 + task.checkpointing + task.kl + (1 - 1 / task.minibatches)  # of 2 a weight
    seen = task.prompt + sum(n**2 for n in lengths) / sum(lengths) / 2  # by a token, on average
    weights = 2 * shape.parameters
    attention = 4 * shape.layers * shape.queries * seen
    return passes * (weights + attention) * tokens / ((task.mfu or args.mfu) * FLOPS)


def task_shape(task: Task) -> tuple[ModelShape, int]:
    """The task's model, and how many tensors it has."""
    with tempfile.TemporaryDirectory() as folder:
        published_config(task.config).save_pretrained(folder)
        return model_shape(folder, task.machine), len(list(skeleton(folder).parameters()))


def task_layout(
    task: Task, shape: ModelShape, tensors: int, gb: dict[str, float]
) -> tuple[Model, Layout]:
    """gb: of `task_phases`."""
    lay = Layout(
        shard=task.gpus,
        engine=1,
        offload=False,
        update=1e9 * (gb["update"] + gb["context"]),
        rollout=1e9 * (gb["rollout"] + gb["context"]),
    )
    return Model(shape.parameters, shape.layers, tensors, 2 * 2 * shape.keys * shape.layers), lay


def task_row(task: Task, args: Args) -> list[str]:
    shape, tensors = task_shape(task)
    gb = task_phases(task, shape, task.machine)
    kept = replace(task.machine, gradient_checkpointing=False, micro_batch_tokens=task.trajectory)
    all_kept = task_phases(task, shape, kept)["update"] + gb["context"]
    model, lay = task_layout(task, shape, tensors, gb)
    sync = sync_seconds(model, lay, args)
    rollout, full = task_rollout_seconds(task, model, lay, args)
    update = task_update_seconds(task, shape, args)
    step = sync + rollout + update
    gigabytes = [lay.update / 1e9, all_kept, lay.rollout / 1e9, lay.cache / 1e9]
    seconds = [rollout, max(0.0, rollout - full), update, step]
    return [
        task.name,
        f"{sum(task.lengths()) / len(task.lengths()):,.0f}",
        *(f"{number:,.0f}" for number in gigabytes + seconds),
        f"{task.steps * step / 3600:.1f}",
    ]


def task_table(args: Args) -> None:
    head = ["task", "answer", "update GB", "kept", "rollout GB", "cache", "rollout s"]
    head += ["tail s", "update s", "step s", "200 steps h"]
    table(head, *(task_row(task, args) for task in TASKS))


def main(args: Args) -> None:
    if args.tasks:
        task_table(args)
        return
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
