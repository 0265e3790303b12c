"""Real engines of tiny random models, one after the other in one process, and what transformers
itself says in single forwards of what they have sampled.

    python tests/workers/engine_families.py FOLDER FAMILY...

Prints a JSON object for each family: the largest |log-prob gap| (with --dtype bf16 the mean one) of
the engine as loaded from disk (fresh), after the weights have moved by a tenth without a sync
(stale), after the sync (synced), and after one that takes them back (restored); or with what the
family was refused.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from family_models import write_family
from helpers import generate
from torch import nn

from common.distributed import World, barrier, init_world
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import Engine, EngineConfig
from common.engine.vllm import VllmEngine
from common.models import Policy, sync_engine
from common.precision import DTYPES
from common.progress import say
from common.script import run
from common.types import Sampling
from common.vision import auto_class, skeleton
from common.weights import saved_buffers

END_IDS = list(range(0, 250, 50))  # so many that samples of a batch end at different times
SAMPLING = Sampling(n=4, max_tokens=24, temperature=0.9)


def make_prompts() -> list[list[int]]:
    """Two that share all but their ends, and cached blocks with it; two that are shorter."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, 250, (140,), generator=generator).tolist()
    return [text, [*text[:135], 9, 8, 7], text[:40], text[:7]]


@torch.no_grad()
def gaps_of_tokens(engine: Engine, model: nn.Module, step: int, reasons: Counter) -> torch.Tensor:
    """|log-prob gap| of all sampled tokens [T]."""
    prompts = make_prompts()
    completions = generate(engine, prompts, SAMPLING, [11, 12, 13, 14], step)
    gaps = []
    for prompt, samples in zip(prompts, completions):
        for sample in samples:
            reasons[sample.finish_reason] += 1
            ids = torch.tensor([prompt + sample.token_ids])
            logits = model(ids, use_cache=False).logits[0].float() / SAMPLING.temperature
            predictions = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            expected = predictions.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            gaps.append((expected - torch.tensor(sample.logprobs)).abs())
    return torch.cat(gaps)


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Stands for optimizer steps: what a checkpoint has of the model changes by a tenth."""
    generator = torch.Generator().manual_seed(1)
    for _, tensor in (*model.named_parameters(), *saved_buffers(model)):
        spread = tensor.std(correction=0) or 0.5
        tensor.add_(0.1 * spread * torch.randn(tensor.shape, generator=generator))


def gaps_of(
    folder: Path, family: str, engine_name: str, ranks: int, dtype: torch.dtype, world: World
) -> dict[str, object]:
    if world.is_main:
        write_family(folder, family)
    barrier()
    config = skeleton(str(folder)).config
    model = auto_class(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    policy = Policy(model.eval(), "sdpa")
    decoder = type(model.get_decoder())
    initializer = decoder.__init__
    engine_class = VllmEngine if engine_name == "vllm" else HuggingFaceEngine
    options = {"end_ids": END_IDS, "max_model_len": 512, "sleep_level": 0, "memory_gib": 0.25}
    options["ranks"] = ranks
    engine = engine_class(EngineConfig(str(folder), dtype, world, **options))
    engine.books.step = 0
    result: dict[str, object] = {"decoder unchanged": decoder.__init__ is initializer}
    reasons: Counter = Counter()  # why samples have ended

    def gap(step: int) -> float:
        gaps = gaps_of_tokens(engine, model, step, reasons)
        return (gaps.max() if dtype == torch.float32 else gaps.mean()).item()

    result["fresh"] = gap(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    move(model)
    result["stale"] = gap(0)
    sync_engine(engine, policy, 1)
    result["synced"] = gap(1)
    model.load_state_dict(before)
    sync_engine(engine, policy, 2)
    result["restored"] = gap(2)
    result["reasons"] = reasons
    if engine_name == "vllm":
        (result["class"],) = engine.llm.apply_model(lambda model: type(model).__name__)
    return result


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = init_world()
    for family in args.families:
        start = time.process_time()
        folder = args.folder / family
        try:
            dtype = DTYPES[args.dtype]
            result = gaps_of(folder, family, args.engine, args.ranks, dtype, world)
        except SystemExit as refusal:
            result = {"refused": str(refusal).replace(str(folder), "FOLDER")}
        if args.engine == "vllm":  # groups of a mixture are made with the first model alone
            from vllm.distributed.parallel_state import destroy_model_parallel

            destroy_model_parallel()
        result["cpu_s"] = round(time.process_time() - start, 1)
        say(json.dumps({"family": family} | result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="+")
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="the engine's")
    parser.add_argument("--ranks", type=int, default=1, help="that share an engine, by torchrun")
    run(main, parser.parse_args())
