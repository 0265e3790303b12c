"""What an update takes on paper: peaks of cards, the arithmetic of a model, seconds by part.

    python tests/bench/roofline.py                # two updates that were measured, and goals

Seconds follow from counted operations and bytes, and from two fitted constants: the rates of the
layers' matrix products at the widths of 1.5B and 3B, such that the two updates measured on an H100
come out (results/h100). Rates of wider layers are assumed. One measurement was not used for a fit:
the head of 7B, 16,384 tokens, takes 0.233 s; the model says 0.207, 11 % too optimistic.

MFU is against the peak of dense bf16, in three conventions. ours: 6 operations a weight and token
of the layers, of the head for trained tokens alone; 12 x layers x width a pair of tokens that
attend. torchtitan (and nanochat, PaLM): the head for every token, attention as if tokens saw those
behind them. verl: embeddings, too, and attention of each response with its own copy of the prompt.
None counts what is computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import tyro
from report import table  # puts tests/ on the import path

# isort: split
from model_configs import QWEN2

Unit = Sequence[int]  # the length of a prompt, and those of its responses (`MicroBatch.units`)
Convention = Literal["ours", "torchtitan", "verl"]

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "smoke": (128, 256, 2, 2, 1, 512, True),
    "0.1B": (576, 1536, 30, 9, 3, 49_152, True),
    "7Bx8": (3584, 18_944, 8, 28, 4, 152_064, False),  # as wide as 7B, 8 of its 28 layers
    **QWEN2,
}
# FLOP/s of dense bf16 products without sparsity, by the words of torch.cuda.get_device_name
PEAKS = [
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),  # SXM: "NVIDIA H100 80GB HBM3"
    ("H800 PCIe", 756e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("GB200", 2500e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("RTX 4090", 165e12),
]


def peak_flops(card: str) -> float | None:
    """FLOP/s of a card by its name; None for one that PEAKS does not have."""
    words = set(card.replace("-", " ").split())
    for name, flops in PEAKS:
        if words.issuperset(name.split()):
            return flops
    return None


# --- the arithmetic of a model --------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Numbers of parameters and widths of a Qwen2."""

    hidden: int
    layers: int
    vocabulary: int
    weights: int  # of all layers
    root: int  # of embeddings and head
    key_bytes: int  # of a token in the KV cache
    tensors: int  # that a sync gathers one by one

    @classmethod
    def named(cls, name: str) -> "Model":
        hidden, intermediate, layers, heads, key_heads, vocabulary, tied = SHAPES[name]
        keys = hidden // heads * key_heads
        attention = 2 * hidden * (hidden + keys) + hidden + 2 * keys
        layer = attention + 3 * hidden * intermediate + 2 * hidden
        return cls(
            hidden=hidden,
            layers=layers,
            vocabulary=vocabulary,
            weights=layers * layer + hidden,
            root=(2 - tied) * vocabulary * hidden,
            key_bytes=2 * 2 * keys * layers,
            tensors=12 * layers + 3 - tied,
        )

    @property
    def size(self) -> int:
        return self.weights + self.root


def attending_pairs(units: Sequence[Unit], convention: Convention = "ours") -> float:
    """Pairs of tokens in attention."""
    pairs = 0.0
    for prompt, *responses in units:
        if convention == "verl":
            pairs += sum((prompt + length) ** 2 / 2 for length in responses)
        elif convention == "torchtitan":
            pairs += prompt**2 + sum(length * prompt + length**2 for length in responses)
        else:
            pairs += prompt * (prompt + 1) / 2
            pairs += sum(length * prompt + length * (length + 1) / 2 for length in responses)
    return pairs


def model_flops(
    model: Model,
    units: Sequence[Unit],
    num_rows: int,
    num_trained: int,
    convention: Convention = "ours",
) -> float:
    """Of forward and backward, nothing computed again. num_rows: tokens with those of padding."""
    head = 6 * model.vocabulary * model.hidden
    layers = 6 * model.weights * num_rows
    attention = 12 * model.layers * model.hidden * attending_pairs(units, convention)
    if convention == "verl":
        return layers + 2 * head * num_rows + attention
    if convention == "torchtitan":
        return layers + head * num_rows + attention
    return layers + head * num_trained + attention


# --- seconds on an H100 SXM -----------------------------------------------------------------------

# FLOP/s of the layers' matrix products, by the width of the model
FITTED_RATES = {1536: 510e12, 2048: 570e12}
ASSUMED_RATES = {3584: 630e12, 5120: 650e12}  # those beyond are as fast as the last
HEAD_RATE = 650e12
FLEX_RATES = (350e12, 200e12)  # forward and backward of segments of about 1,000 tokens
HALF_EMPTY = 1.09  # blocks of flex attention that compute more than the pairs that attend
HBM = 2.7e12  # bytes a second of pointwise kernels, read and written: a copy was measured at 2.98
NVLINK = 330e9  # bytes a second of NCCL's collectives within a machine
SMS_OF_NCCL = 0.15  # share of the time of collectives that is lost to what hides them
# bytes of pointwise kernels, counted: a token and hidden unit of a layer, forward and backward
POINTWISE = {"compiled": (69, 109), "eager": (171, 365)}
HEAD_COMPILED = 14  # bytes a logit, forward and backward
HEAD_EAGER = 46 + 37
CHUNK = 2**25  # logits of a slice of the eager head
IDLE = 6.5e-3  # seconds in which the GPU waits for masks and copies, in each micro-batch
OPTIMIZER_BYTES = 40  # a parameter: norm, clipping, AdamW
OPTIMIZER_HOST = 10e-3  # seconds


def product_rate(hidden: int) -> float:
    """FLOP/s of the products of layers this wide, by interpolation."""
    points = sorted((FITTED_RATES | ASSUMED_RATES).items())
    if hidden <= points[0][0]:
        return points[0][1] * hidden / points[0][0]  # tiles fill the fewer multiprocessors
    for (narrow, low), (wide, high) in pairwise(points):
        if hidden <= wide:
            return low + (high - low) * (hidden - narrow) / (wide - narrow)
    return points[-1][1]


@dataclass(frozen=True)
class Update:
    """A forward, backward and optimizer step on each of `ranks` GPUs that share a copy."""

    model: Model
    units: tuple[Unit, ...]  # of a micro-batch
    micro_batches: float = 1
    ranks: int = 1
    checkpointing: bool = False
    compiled: bool = True
    compiled_head: bool = True
    gathered: bool = True  # on one GPU weights stay so over a step; on several they cannot
    accumulated: bool = False  # gradients over a step, without FSDP2's copies: on one GPU alone
    ahead: bool = True  # masks and copies are made while the GPU computes

    @property
    def num_rows(self) -> int:
        """Tokens of a micro-batch, without padding."""
        return sum(map(sum, self.units))

    @property
    def num_trained(self) -> int:
        return sum(sum(unit[1:]) for unit in self.units)

    def flops(self, convention: Convention = "ours") -> float:
        """Of the model, on one of the GPUs."""
        one = model_flops(self.model, self.units, self.num_rows, self.num_trained, convention)
        return self.micro_batches * one

    def seconds_by_part(self) -> dict[str, float]:
        parts = {
            "products of layers": self._products(),
            "pointwise kernels of layers": self._pointwise(),
            "attention": self._attention(),
            "products of the head": self._head_products(),
            "pointwise kernels of the head": self._head_pointwise(),
            "FSDP2's casts and copies": self._fsdp(),
            "behind the computation: NCCL's share": SMS_OF_NCCL * self._links(),
            "gradient of embeddings": self._embeddings(),
            "idle at the start of a micro-batch": 0.0 if self.ahead else IDLE,
        }
        parts = {name: self.micro_batches * seconds for name, seconds in parts.items()}
        parts["optimizer"] = self._optimizer()
        return parts

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_part().values())

    def mfu(self, peak: float, convention: Convention = "ours") -> float:
        """A share of the peak."""
        return self.flops(convention) / self.seconds / peak

    def _products(self) -> float:
        passes = 8 if self.checkpointing else 6
        return passes * self.model.weights * self.num_rows / product_rate(self.model.hidden)

    def _pointwise(self) -> float:
        forward, backward = POINTWISE["compiled" if self.compiled else "eager"]
        moved = forward * (1 + self.checkpointing) + backward
        return moved * self.num_rows * self.model.hidden * self.model.layers / HBM

    def _attention(self) -> float:
        forward_rate, backward_rate = FLEX_RATES
        width = self.model.layers * self.model.hidden
        forward = 4 * width * attending_pairs(self.units) * HALF_EMPTY
        return forward * (1 + self.checkpointing) / forward_rate + 2.5 * forward / backward_rate

    def _head_products(self) -> float:
        one = 2 * self.model.vocabulary * self.model.hidden * self.num_trained
        if self.compiled_head:
            return 4 * one / HEAD_RATE
        # the eager forward is memory bound: each slice of rows reads the whole head
        rows = CHUNK // self.model.vocabulary
        of_slice = one / self.num_trained * max(rows, 256) / HEAD_RATE
        head_bytes = 2 * self.model.vocabulary * (self.model.hidden + rows)
        slices = self.num_trained / rows
        return slices * max(of_slice, head_bytes / HBM) + 3 * one / HEAD_RATE

    def _head_pointwise(self) -> float:
        logits = self.num_trained * self.model.vocabulary
        if self.compiled_head:
            return HEAD_COMPILED * logits / HBM
        # the gradient of hidden states is added to once for each slice of words
        accumulated = 10 * self.model.hidden * self.num_trained / CHUNK
        return (HEAD_EAGER + accumulated) * logits / HBM

    def _fsdp(self) -> float:
        if self.ranks > 1:
            return (8 * self.model.weights + 4 * self.model.root + 6 * self.model.size) / HBM
        gathers = 0 if self.gathered else 10 * (2 * self.model.weights + self.model.root)
        gradients = (10 if self.accumulated else 26) * self.model.size
        return (gathers + gradients) / HBM

    def _links(self) -> float:
        """Weights are gathered twice in 16 bits, those of embeddings and head once; gradients are
        reduced in 32."""
        moved = 4 * self.model.weights + 2 * self.model.root + 4 * self.model.size
        return moved * (1 - 1 / self.ranks) / NVLINK

    def _embeddings(self) -> float:
        table_size = self.model.vocabulary * self.model.hidden
        is_tied = self.model.root == table_size
        return (8 if is_tied else 2) * table_size / HBM + 0.5e-3

    def _optimizer(self) -> float:
        once = OPTIMIZER_BYTES * self.model.size / self.ranks
        if self.ranks == 1:  # what is left to do once a step
            once += (10 * self.gathered + 16 * self.accumulated) * self.model.size
        return once / HBM + OPTIMIZER_HOST


# --- named configurations -------------------------------------------------------------------------

# a prompt and its responses, as tests/bench/gpu.py has them
LENGTHS = (256, *[768] * 8)
PACK = (LENGTHS, LENGTHS)  # 12,800 tokens, of which 12,288 are trained
MEASURED = {  # on one H100, results/h100: seconds
    "1.5B, compiled": 1.587,
    "3B, compiled, checkpointing": 3.255,
}
UPDATES = {  # 8 prompts with 8 responses each, in packs of 12,800 tokens
    "1.5B, compiled": Update(Model.named("1.5B"), PACK, 4, accumulated=True),
    "7Bx8, compiled": Update(Model.named("7Bx8"), PACK, 4, accumulated=True),
    "7B, compiled, 8 GPUs": Update(Model.named("7B"), PACK, 4, ranks=8),
}
NOT_OF_LAYERS = (  # parts of an update beside those that each layer has, and the head
    "FSDP2's casts and copies",
    "behind the computation: NCCL's share",
    "gradient of embeddings",
    "optimizer",
)
GOALS = {  # MFU of an H100 SXM (%) that an update must reach
    "1.5B, compiled": 37.0,
    "7Bx8, compiled": 44.0,
    "7B, compiled, 8 GPUs": 48.0,  # computed, see `seconds_on_eight`
}


def as_measured(update: Update) -> Update:
    """With the code of the two measurements."""
    return replace(update, compiled_head=False, gathered=False, accumulated=False, ahead=False)


def seconds_on_eight(seconds_7bx8: float, head_seconds: float, trained: float) -> float:
    """An update of 7B on each of eight GPUs, from one of 7Bx8 on a single GPU with as many trained
    tokens, and the part of its seconds that the head takes.

    What grows with the layers was measured: it takes 28 / 8 of the time. What differs between one
    GPU and eight (FSDP2's copies, NCCL, the optimizer) is that on paper.
    """
    alone = UPDATES["7Bx8, compiled"]
    on_eight = UPDATES["7B, compiled, 8 GPUs"]
    times = trained / (alone.micro_batches * alone.num_trained)
    alone_s = sum(alone.seconds_by_part()[part] for part in NOT_OF_LAYERS)
    on_eight_s = sum(on_eight.seconds_by_part()[part] for part in NOT_OF_LAYERS)
    of_layers = seconds_7bx8 - head_seconds - times * alone_s
    return head_seconds + of_layers * 28 / 8 + times * on_eight_s


def main() -> None:
    peak = peak_flops("NVIDIA H100")
    rows = [["update", "on paper (s)", "seen (s)", "MFU %", "torchtitan's", "verl's", "goal"]]
    cases = {
        "1.5B, compiled": as_measured(UPDATES["1.5B, compiled"]),
        "3B, compiled, checkpointing": as_measured(
            Update(Model.named("3B"), PACK, 4, checkpointing=True)
        ),
    }
    for name, update in cases.items():
        rows.append([f"{name}, as measured", *cells_of(update, peak, MEASURED[name], None)])
    for name, update in UPDATES.items():
        rows.append([name, *cells_of(update, peak, None, GOALS[name])])
    table(*rows)
    for name, update in (cases | UPDATES).items():
        parts = update.seconds_by_part()
        print(f"{name}: " + ", ".join(f"{part} {s:.3f} s" for part, s in parts.items() if s))


def cells_of(update: Update, peak: float, seen: float | None, goal: float | None) -> list[str]:
    return [
        f"{update.seconds:.3f}",
        f"{seen:.3f}" if seen else "-",
        *(f"{100 * update.mfu(peak, name):.1f}" for name in ("ours", "torchtitan", "verl")),
        f"{goal:.0f}" if goal else "-",
    ]


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
