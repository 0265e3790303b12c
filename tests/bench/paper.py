"""Step time and memory of large models on many H100s, on paper: nothing of it was run.

    # 7B, 32B, 72B of Qwen2.5 on 8, 64, 512 GPUs
    python tests/bench/paper.py
    python tests/bench/paper.py --models 14B --gpus 16 32
    # four tasks on eight GPUs
    python tests/bench/paper.py --tasks
    # how long a trajectory may be
    python tests/bench/paper.py --lengths

Memory is the plan of common/memory/plan.py, with the KV cache that a run chooses. Seconds of an
update are those of roofline.py, with its two fitted constants; others follow from published peaks
and the shares of them in `Args`. A step: 512 prompts of 512 tokens, 16 answers of 1,024 tokens
each, the longest 4,096; one optimizer step. Not counted: rewards, evaluations, checkpoints.

--tasks: the batches and lengths of `TASKS`, which are assumed, in place of these; each answer has a
length of its own. --lengths: the longest trajectory whose update fits, by itself in a micro-batch:
a GPU computes whole sequences.
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
from gpu import make_config
from report import table  # puts tests/ on the import path
from roofline import NVLINK, SHAPES, SMS_OF_NCCL, Model, Update

# isort: split
from model_configs import published_config

from common.flags import Machine, Rollout
from common.memory.estimate import CUDA_CONTEXT, phases_of
from common.memory.plan import GB_PER_GIB, no_rollout
from common.memory.remedies import ROOM, STEP, largest_micro_batch
from common.memory.shape import ModelShape, model_shape
from common.vision import skeleton

PROMPTS, SAMPLES, PROMPT, ANSWER, LONGEST = 512, 16, 512, 1024, 4096
# H100 SXM, published: dense bf16, HBM3, NDR InfiniBand in one direction, a PCIe 5.0 x16 slot in one
FLOPS, HBM, NIC, PCIE = 989e12, 3.35e12, 50e9, 64e9
NODE = 8  # GPUs of a machine, each with a network card of its own
FREE = 80e9 - 1e9 * CUDA_CONTEXT  # bytes of a card, when a run begins
SLOTS = 1024  # sequences that vLLM runs together
SMALLEST_CACHE = 8 * GB_PER_GIB * 1e9  # bytes
PYTHON_SECONDS = 30e-6  # of vLLM's scheduler, for each sequence and token


@dataclass
class Args:
    models: tuple[str, ...] = ("7B", "32B", "72B")
    gpus: tuple[int, ...] = (8, 64, 512)
    mfu: float = 0.4  # share of the peak of arithmetic, in rollouts
    bandwidth: float = 0.8  # share of the peak of memory, of links between machines, to the host
    hop: float = 5e-6  # seconds of a collective for each rank in its ring
    micro_batch_tokens: int = 8192
    tasks: bool = False  # four tasks on eight GPUs, in place of `models` on `gpus`
    lengths: bool = False  # the longest trajectories, in place of steps


def machine_of(tokens: int, checkpointing: bool, offload: bool) -> Machine:
    return Machine(
        micro_batch_tokens=tokens,
        gradient_checkpointing=checkpointing,
        offload="optimizer" if offload else "",
        compile=True,
    )


@cache
def shape_of(name: str) -> ModelShape:
    with tempfile.TemporaryDirectory() as folder:
        make_config(name).save_pretrained(folder)
        return model_shape(folder, Machine())


@cache
def planned(
    name: str, ranks: int, tokens: int, checkpointing: bool, offload: bool, engine: int
) -> dict[str, float]:
    """Bytes by part and phase, by the plan that a run prints; the KV cache comes on top."""
    rollout = Rollout(
        engine_memory=1e-9,
        engine_parallel=engine,
        max_prompt_tokens=PROMPT,
        max_response_tokens=LONGEST,
    )
    machine = machine_of(tokens, checkpointing, offload)
    gb = phases_of(rollout, machine, ranks, torch.bfloat16, [shape_of(name)], [], on_gpu=True)
    return {part: 1e9 * number for part, number in gb.items()}


@dataclass(frozen=True)
class Layout:
    """How a model lies on the GPUs: ranks that share a copy to train, and GPUs that share an
    engine."""

    shard: int
    engine: int
    checkpointing: bool
    offload: bool
    update: float  # bytes
    rollout: float  # bytes, without the KV cache

    @property
    def cache(self) -> float:
        """Bytes of the KV cache that a run chooses."""
        return ROOM * FREE - self.rollout

    @property
    def flags(self) -> str:
        words = ["checkpointing"] * self.checkpointing + ["offload"] * self.offload
        return ", ".join(words) or "-"


def layout(name: str, shard: int, args: Args) -> Layout | None:
    """The first that fits: all activations before checkpointing, moments on the GPU before moments
    on the host, then as few GPUs to an engine as will do."""
    for checkpointing, offload in ((False, False), (True, False), (True, True)):
        for engine in (1, 2, 4, 8):
            tokens = args.micro_batch_tokens
            bytes_of = planned(name, shard, tokens, checkpointing, offload, engine)
            found = Layout(
                shard, engine, checkpointing, offload, bytes_of["update"], bytes_of["rollout"]
            )
            if found.cache >= SMALLEST_CACHE and found.update <= ROOM * FREE:
                return found
    return None


def collective(size: float, ranks: int, calls: int, args: Args) -> float:
    """Seconds in which `ranks` gather, or reduce and scatter, `size` bytes in so many calls.

    Over machines NCCL's rings enter each by all of its cards, an eighth of the data by each, and
    NVLink spreads it.
    """
    link = NVLINK if ranks <= NODE else args.bandwidth * NODE * NIC
    return size * (1 - 1 / ranks) / link + calls * (ranks - 1) * args.hop


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
    read once, and Python schedules each of them."""
    read = 2 * model.size + running * context * model.key_bytes
    read_s = read / lay.engine / (args.bandwidth * HBM)
    computed_s = 2 * model.size * running / lay.engine / (args.mfu * FLOPS)
    # of tensor parallel, twice a layer
    reduced_s = 2 * model.layers * (lay.engine - 1) * args.hop
    return max(max(read_s, computed_s) + reduced_s, PYTHON_SECONDS * running)


def rollout_seconds(model: Model, lay: Layout, gpus: int, args: Args) -> tuple[float, float]:
    """(seconds of a rollout, of it the tail: until the longest answer is done, when the others
    are)"""
    sequences = PROMPTS * SAMPLES * lay.engine / gpus  # of an engine
    fit = lay.engine * lay.cache / ((PROMPT / SAMPLES + ANSWER) * model.key_bytes)
    running = min(sequences, fit, SLOTS)
    busy = sequences / running * ANSWER * decode_seconds(model, lay, running, args)
    tail = max(0.0, LONGEST * decode_seconds(model, lay, 1, args) - busy)
    return busy + tail, tail


def update_of(model: Model, lay: Layout, gpus: int, args: Args) -> Update:
    """Of the answers that a GPU trains on, as many to a micro-batch as fit, with their prompt."""
    answers = PROMPTS * SAMPLES / gpus
    at_once = int(min(answers, SAMPLES, (args.micro_batch_tokens - PROMPT) // ANSWER))
    return Update(
        model,
        units=((PROMPT, *[ANSWER] * at_once),),
        micro_batches=answers / at_once,
        ranks=lay.shard,
        checkpointing=lay.checkpointing,
    )


def update_seconds(update: Update, copies: int, args: Args) -> float:
    """Behind the computation, the collectives: whichever takes longer.

    In each micro-batch weights are gathered twice in 16 bits and gradients reduced in 32; copies
    reduce theirs once.
    """
    model = update.model
    gathered = collective(8 * model.size, update.ranks, 3 * model.layers, args)
    of_copies = 2 * 4 * model.size / update.ranks * (1 - 1 / copies) / (args.bandwidth * NIC)
    links = update.micro_batches * gathered + of_copies
    parts = update.seconds_by_part()
    del parts["behind the computation: NCCL's share"]  # within a machine alone
    return max(sum(parts.values()) + SMS_OF_NCCL * links, links)


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def row(name: str, gpus: int, shard: int, args: Args) -> list[str]:
    head = [name, str(gpus), "FSDP" if shard == gpus else f"HSDP {shard}"]
    lay = layout(name, shard, args)
    if lay is None:
        least = planned(name, shard, args.micro_batch_tokens, True, True, 1)["update"]
        return [*head, "-", "-", f"{least / 1e9:.0f}", *["-"] * 9]
    model = Model.named(name)
    update = update_of(model, lay, gpus, args)
    update_s = update_seconds(update, gpus // shard, args)
    sync = sync_seconds(model, lay, args)
    rollout, tail = rollout_seconds(model, lay, gpus, args)
    step = sync + rollout + update_s
    seconds = [sync, rollout, tail, update_s, step]
    per_gpu = PROMPTS * SAMPLES * ANSWER / step / gpus
    memory = [lay.update, lay.rollout, lay.cache]
    return [
        *head,
        str(lay.engine),
        lay.flags,
        *(f"{number / 1e9:.0f}" for number in memory),
        *map(format_seconds, seconds),
        f"{100 * update.flops() / update_s / FLOPS:.0f}",
        f"{per_gpu:,.0f}",
    ]


# --- the longest trajectory -----------------------------------------------------------------------


def length_row(name: str, gpus: int) -> list[str]:
    """The most tokens of a trajectory, in thousands, by flags; and seconds of its update."""
    cells = []
    for checkpointing, offload in ((False, False), (True, False), (True, True)):
        machine = machine_of(STEP, checkpointing, offload)

        def phases(rollout: Rollout, machine: Machine, ranks: int) -> dict[str, float]:
            shapes = [shape_of(name)]
            return phases_of(rollout, machine, ranks, torch.bfloat16, shapes, [], on_gpu=True)

        tokens = largest_micro_batch(phases, no_rollout(STEP), machine, gpus, ROOM * FREE / 1e9)
        if tokens < 1024:
            cells.extend(["-", "-"])
            continue
        update = Update(
            Model.named(name), ((512, tokens - 512),), ranks=gpus, checkpointing=checkpointing
        )
        cells.extend([f"{tokens / 1024:,.0f}", format_seconds(update.seconds)])
    return [name, str(gpus), *cells]


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


OF_MICRO_BATCHES = (  # parts of an update that each micro-batch has, however short it is
    "FSDP2's casts and copies",
    "behind the computation: NCCL's share",
    "gradient of embeddings",
)
TOOL_SECONDS = 1.0  # of a call of a tool, while the engine goes on with other answers
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
    ),
)


def task_phases(task: Task, shape: ModelShape, machine: Machine) -> dict[str, float]:
    """Gigabytes, by the plan that a run prints, beside CUDA's context; without a KV cache."""
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
        self.places = min(SLOTS, int(lay.cache / ((self.prompt + mean) * model.key_bytes)))
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
        return decode_seconds(self.model, self.lay, running, self.args, context)

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


def task_update_seconds(task: Task, model: Model) -> float:
    """Forward and backward, forwards again by checkpointing, of the reference, and of old log-probs
    (of all minibatches but the first); behind them the collectives are hidden."""
    lengths = task.lengths()
    units = []
    for group in range(task.prompts // task.gpus):
        answers = lengths[group * task.samples : (group + 1) * task.samples]
        units.append((task.prompt, *(length + task.calls * task.reply for length in answers)))
    update = Update(
        model,
        units=tuple(units),
        ranks=task.gpus,
        checkpointing=task.checkpointing,
        compiled=task.compile,
    )
    micro_batches = max(1.0, update.num_rows / task.machine.micro_batch_tokens)
    parts = update.seconds_by_part()
    for part in OF_MICRO_BATCHES:
        parts[part] *= micro_batches
    parts["optimizer"] *= task.minibatches
    forwards = task.kl + 1 - 1 / task.minibatches  # besides, of a pass as long as a backward's half
    return sum(parts.values()) * (1 + forwards / (3 + task.checkpointing))


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
        checkpointing=task.checkpointing,
        offload=False,
        update=1e9 * gb["update"],
        rollout=1e9 * gb["rollout"],
    )
    model = Model(
        hidden=shape.hidden,
        layers=shape.layers,
        vocabulary=shape.vocabulary,
        weights=shape.parameters - shape.root,
        root=shape.root,
        key_bytes=2 * 2 * shape.keys * shape.layers,
        tensors=tensors,
    )
    return model, lay


def task_row(task: Task, args: Args) -> list[str]:
    shape, tensors = task_shape(task)
    gb = task_phases(task, shape, task.machine)
    kept = replace(task.machine, gradient_checkpointing=False, micro_batch_tokens=task.trajectory)
    all_kept = task_phases(task, shape, kept)["update"]
    model, lay = task_layout(task, shape, tensors, gb)
    sync = sync_seconds(model, lay, args)
    rollout, full = task_rollout_seconds(task, model, lay, args)
    update = task_update_seconds(task, model)
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


def length_table(args: Args) -> None:
    head = ["model", "GPUs", "thousand tokens", "s", "checkpointing", "s", "and offload", "s"]
    table(head, *(length_row(name, gpus) for name in args.models for gpus in args.gpus))


def main(args: Args) -> None:
    if args.tasks:
        task_table(args)
        return
    if unknown := set(args.models) - set(SHAPES):
        raise SystemExit(f"--models {', '.join(unknown)}: none of {', '.join(SHAPES)}")
    if args.lengths:
        length_table(args)
        return
    head = ["model", "GPUs", "layout", "engine parallel", "flags", "update GB", "rollout GB"]
    head += ["KV cache GB", "sync s", "rollout s", "of it tail s", "update s", "step s", "MFU %"]
    rows = [[*head, "tokens/s a GPU"]]
    for name in args.models:
        for gpus in args.gpus:
            shards = [gpus, *(shard for shard in (NODE, 8 * NODE) if shard < gpus)]
            rows += [row(name, gpus, shard, args) for shard in shards]
    table(*rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
