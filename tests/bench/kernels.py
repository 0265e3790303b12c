"""The kernels of an update one by one, on one GPU: what roofline.py assumes, measured.

    python tests/bench/kernels.py                           # all, about two minutes on an H100
    python tests/bench/kernels.py --parts copy products
    python tests/bench/kernels.py --toy                     # that it works, on a CPU too

copy: the rates of pointwise kernels, bytes read and written. products: those of a layer, forward
and both gradients, for 12,800 tokens. head: `token_logprobs`, as it is and with what is compiled
switched off. host: a block mask, which the GPU may wait for. flex: attention of two prompts with
eight responses, as transformers calls it and in other ways. The last line is JSON.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch
import tyro
from report import header
from roofline import LENGTHS, PACK, SHAPES, attending_pairs
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from common.attention import BLOCK, block_mask
from common.logprobs import token_logprobs

Part = Literal["copy", "products", "head", "host", "flex"]
TOY_UNITS = ((16, 24, 24, 24), (16, 24, 24, 24))
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@dataclass
class Args:
    parts: tuple[Part, ...] = ("copy", "products", "head", "host", "flex")
    models: tuple[str, ...] = ("1.5B", "3B", "7B")
    toy: bool = False  # sizes at which numbers mean nothing


def seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """Of a call on the device, on average, behind three that do not count."""
    if not GPU:
        function()
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    for _ in range(3):
        function()
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def random(*shape: int, grad: bool = False) -> Tensor:
    tensor = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    return tensor.mul_(0.02).requires_grad_(grad)


def copy(args: Args) -> Iterator[tuple[str, float]]:
    size = 2**16 if args.toy else 2**28
    source = torch.ones(size, device=DEVICE)
    half = torch.empty_like(source, dtype=torch.bfloat16)
    whole = torch.empty_like(source)
    yield "cast GB/s", 6 * size / seconds(lambda: half.copy_(source)) / 1e9
    yield "copy GB/s", 8 * size / seconds(lambda: whole.copy_(source)) / 1e9


def products(args: Args) -> Iterator[tuple[str, float]]:
    for name in args.models:
        hidden, mlp, _, heads, key_heads = SHAPES[name][:5]
        keys = hidden // heads * key_heads
        tokens = sum(map(sum, PACK))
        sizes = [(hidden, hidden)] * 2 + [(hidden, keys)] * 2  # q, o, k, v
        sizes += [(hidden, mlp)] * 2 + [(mlp, hidden)]  # gate, up, down
        if args.toy:
            tokens = 64
            sizes = [(inputs // 32, outputs // 32) for inputs, outputs in sizes]
        flops = 0
        total_s = 0.0
        for inputs, outputs in sizes:
            x = random(tokens, inputs)
            weight = random(outputs, inputs)
            gradient = random(tokens, outputs)
            for left, right in ((x, weight.T), (gradient, weight), (gradient.T, x)):
                total_s += seconds(partial(torch.mm, left, right))
            flops += 3 * 2 * tokens * inputs * outputs
        yield f"products {name} TFLOP/s", flops / total_s / 1e12


def head(args: Args) -> Iterator[tuple[str, float]]:
    tokens, hidden, vocabulary = 16_384, SHAPES["7B"][0], SHAPES["7B"][5]
    if args.toy:
        tokens, hidden, vocabulary = 64, 32, 512
    states = random(tokens, hidden, grad=True)
    weight = random(vocabulary, hidden, grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    upstream = torch.randn(tokens, device=DEVICE)

    def forward_and_backward() -> None:
        states.grad = weight.grad = None
        logprobs, _ = token_logprobs(states, weight, targets)
        (logprobs * upstream).sum().backward()

    yield "head 7B ms", 1e3 * seconds(forward_and_backward, repeats=5)
    with torch.compiler.set_stance("force_eager"):
        yield "head 7B eager ms", 1e3 * seconds(forward_and_backward, repeats=5)


def host(args: Args) -> Iterator[tuple[str, float]]:
    units = [list(unit) for unit in (TOY_UNITS if args.toy else PACK)]
    if args.toy:
        units.append([BLOCK - sum(map(sum, units)) % BLOCK])
    times = []
    for _ in range(3 if args.toy else 20):
        start = time.perf_counter()
        block_mask(units, DEVICE)
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    yield "block mask ms", 1e3 * median(times)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: object, repeated: bool, told: bool) -> Tensor:
    """repeated: keys for each head, as transformers does for 12 and 28 heads; told: that the length
    is a multiple of 128, where it is dynamic."""
    if told:
        torch._check(q.shape[2] % BLOCK == 0)
    if repeated:
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=not repeated)


def flex(args: Args) -> Iterator[tuple[str, float]]:
    units = [list(unit) for unit in (TOY_UNITS if args.toy else PACK)]
    length = sum(map(sum, units))
    if length % BLOCK:
        units.append([BLOCK - length % BLOCK])
        length = sum(map(sum, units))
    mask = block_mask(units, DEVICE)
    heads, key_heads = SHAPES["7B"][3:5]
    flops = 4 * heads * 128 * attending_pairs(units)
    query = random(1, heads, length, 128, grad=GPU)
    key = random(1, key_heads, length, 128, grad=GPU)
    value = random(1, key_heads, length, 128, grad=GPU)
    upstream = torch.randn_like(query)
    for name, repeated, dynamic, told in (
        ("keys repeated", True, False, False),
        ("native", False, False, False),
        ("dynamic", False, True, False),
        ("dynamic, told", False, True, True),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(partial(attend, repeated=repeated, told=told), dynamic=dynamic)
        call = partial(compiled, query, key, value, mask)
        with torch.no_grad():
            yield f"flex {name}, forward TFLOP/s", flops / seconds(call) / 1e12
        if GPU:  # flex has no backward on CPUs
            gradients = partial(
                torch.autograd.grad, call(), (query, key, value), upstream, retain_graph=True
            )
            yield f"flex {name}, backward TFLOP/s", 2.5 * flops / seconds(gradients) / 1e12


PARTS: dict[str, Callable[[Args], Iterator[tuple[str, float]]]] = {
    "copy": copy,
    "products": products,
    "head": head,
    "host": host,
    "flex": flex,
}


def measure(args: Args) -> dict[str, float]:
    """All figures; one that fails does not stop the next part."""
    figures: dict[str, float] = {}
    for part in args.parts:
        try:
            for name, figure in PARTS[part](args):
                figures[name] = figure
                print(f"{name}: {figure:.3g}", flush=True)
        except Exception as error:  # of a kernel that this torch or card does not have
            print(f"{part}: failed: {error!r:.300}", flush=True)
    return figures


def main(args: Args) -> None:
    header(f"kernels of an update: prompts of {LENGTHS[0]} tokens with 8 responses", 1)
    if not GPU:
        torch.compiler.set_stance("force_eager")  # a C++ compiler takes a minute
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
