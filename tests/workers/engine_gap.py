"""A real engine beside a real policy; what the trainer says of what the engine sampled. By torchrun
with --ranks.

Prints a JSON object for each rank: mean |log-prob gap| right after a sync, after the policy has
moved without one, after the next sync, with --orders after each order of sleep, wake and sync, with
the memory of the device in use; which injected faults were refused; and what is mapped of the
machine's shared memory.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from common import models
from common.data.render import end_token_ids
from common.distributed import World, gather_objects, init_world, make_mesh, reshard, wrap_model
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine
from common.flags import Machine
from common.hub import load_tokenizer, resolve_model
from common.models import engine_weights, load_model
from common.packing import TokenIndex, pack
from common.precision import DTYPES, GAP_LIMITS, checked_gap
from common.progress import say
from common.rollout.sampling import sample_episodes
from common.script import run
from common.types import Row, Sampling

# What the engine does after the policy has moved. On CPUs it never sleeps, and these are syncs
# alone.
ORDERS = {
    "as in a step": "sleep weights sync kv_cache",
    "told twice to sleep": "sleep sleep weights sync kv_cache",
    "all awake before the sync": "sleep weights kv_cache sync",
    "synced without sleep": "sync",
    "synced twice": "sleep weights sync sync kv_cache",
    # at level 2 the weights are gone: see `refused`
    "slept after the sync": "sync sleep weights kv_cache",
    "once more as in a step": "sleep weights sync kv_cache",
}


def prompt(ids: list[int]) -> Row:
    return Row(0, "", "", None, {}, ids)


def device_gb(world: World) -> float:
    """In use by whatever process (GB); 0 on CPUs."""
    if world.device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(world.device)
    return (total - free) / 1e9


def main(args: argparse.Namespace) -> None:
    world = init_world()
    dtype = DTYPES[args.dtype]
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    make = VllmEngine if args.engine == "vllm" else HuggingFaceEngine
    options = {
        "end_ids": end_token_ids(path, tokenizer),
        "max_model_len": 512,
        "sleep_level": args.sleep_level,
    }
    options["ranks"] = args.ranks
    engine = make(
        EngineConfig(
            path, dtype, world, **options, memory_gib=2.0 if world.device.type == "cuda" else 1.0
        )
    )
    lora = Machine(lora_rank=args.lora_rank) if args.lora_rank else None
    wrap = partial(wrap_model, mesh=make_mesh(world, "fsdp"), compute_dtype=dtype)
    policy = load_model(
        path, "sdpa", dtype=dtype if lora else torch.float32, wrap=wrap, lora_flags=lora
    )
    sampling = Sampling(n=2, max_tokens=args.tokens, temperature=args.temperature)
    # long enough for several blocks of KV cache: a prefix cache that outlives a sync would show
    text = (
        "12 34 56 = 78 " * 20
        if args.model == "tiny"
        else "The quick brown fox jumps over the lazy dog. " * 30
    )
    prompts = {
        p: prompt(tokenizer.encode(f"{p} {text}", add_special_tokens=False)[:280]) for p in range(2)
    }

    def gap(step: int) -> float:
        episodes = sample_episodes(
            engine, prompts, sampling, seed=0, step=step, weights_step=engine.books.step
        )
        index = TokenIndex(episodes)
        rollout = torch.tensor([lp for e in episodes for lp in e.logprobs])
        total = 0.0
        with torch.no_grad():
            for batch in pack(episodes, range(len(episodes)), index, budget=4096):
                logprobs = policy(batch.to(world.device), sampling.temperature)[0].cpu()
                total += (logprobs - rollout[batch.token_index]).abs().sum().item()
        return total / len(index)

    own = [
        p.to_local() if isinstance(p, DTensor) else p.data
        for p in policy.parameters()
        if p.requires_grad
    ]
    initial, moves = [parameter.clone() for parameter in own], count(1)

    def move_policy() -> None:
        """Stands for optimizer steps that are large enough to see. Always as far from the first
        weights: bf16 is coarser where log-probs are wild."""
        reshard(policy)
        generator = torch.Generator().manual_seed(next(moves))
        with torch.no_grad():
            for parameter, start in zip(own, initial):
                noise = torch.randn(parameter.shape, generator=generator).to(start.device)
                # lora_B begins as 0
                parameter.copy_(start + 0.05 * (start.std(correction=0) or 1.0) * noise)

    def sync(step: int, weights=None) -> None:
        engine.sync_weights(engine_weights(engine, policy) if weights is None else weights, step)

    result: dict = {"preload": os.environ.get("LD_PRELOAD")}
    sync(0)
    result["synced"] = gap(0)
    if args.synced_only:
        return say(json.dumps(result))
    move_policy()
    result["stale"] = gap(1)
    sync(1)
    result["resynced"] = gap(2)
    result["repeated"] = gap(2)  # the same requests again, now out of the prefix cache
    result |= {"orders": {}, "memory": {}}
    if args.engine == "vllm":
        result["cuda_graphs"] = str(
            engine.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        )
    for name, actions in ORDERS.items() if args.orders else ():
        if engine.sleep_level == 2 and actions.endswith("sleep weights kv_cache"):
            continue
        move_policy()
        used = {"awake": device_gb(world)}
        for action in actions.split():
            if action == "sync":
                sync(1)
            elif action == "sleep":
                engine.sleep()
                used["asleep"] = device_gb(world)
            else:
                engine.wake(action)
        result["orders"][name] = gap(3)
        result["memory"][name] = used | {"awake again": device_gb(world)}

    def damaged(change) -> Iterator[tuple[str, torch.Tensor]]:
        return (
            (name, changed)
            for name, t in engine_weights(engine, policy)
            if (changed := change(name, t)) is not None
        )

    # What the books cannot know shows in the log-probs: the gap is the second line.
    result["refused"] = {}

    def check() -> None:
        """With the requests of `stale`: their prompts have been cached."""
        checked_gap(torch.tensor([gap(1)]), torch.zeros(1), GAP_LIMITS[dtype], step=1)

    def caught_by_the_gap(name: str, fault: Callable, repair: Callable) -> None:
        move_policy()
        fault()
        try:
            check()
            result["refused"][name] = None
        except RuntimeError as error:
            result["refused"][name] = str(error)[:200]
        repair()
        check()

    def reload_from_disk() -> None:
        sync(1)
        engine.llm.collective_rpc("reload_weights")

    def keep_prefix_cache() -> None:
        with patch.object(engine.llm, "reset_prefix_cache", lambda: True):
            sync(1)

    def scale_rotary(factor: float) -> None:
        sync(1)

        def change(model: torch.nn.Module) -> None:
            for name, buffer in model.named_buffers():
                if "cos_sin_cache" in name:
                    buffer.mul_(factor)

        engine.llm.apply_model(change)

    def send_the_base() -> None:
        with patch.object(models, "merged", lambda weight, *_: weight):
            sync(1)

    if lora:
        caught_by_the_gap("adapters left out", send_the_base, lambda: sync(1))
    if args.engine == "vllm":
        caught_by_the_gap("weights reloaded from disk", reload_from_disk, lambda: sync(1))
        caught_by_the_gap("prefix cache kept in silence", keep_prefix_cache, lambda: sync(1))
        caught_by_the_gap(
            "rotary buffer perturbed", lambda: scale_rotary(1.1), lambda: scale_rotary(1 / 1.1)
        )

    def is_skipped(name: str) -> bool:
        return "layers.1.mlp" in name and "up_proj" in name

    faults = {
        "stale step": lambda: sample_episodes(
            engine, prompts, sampling, seed=0, step=3, weights_step=2
        ),
        "a tensor skipped": lambda: sync(
            2, damaged(lambda name, t: None if is_skipped(name) else t)
        ),
        "half a fused module": lambda: sync(
            2, damaged(lambda name, t: None if "k_proj" in name else t)
        ),
        "head not sent": lambda: sync(2, damaged(lambda name, t: None if "lm_head" in name else t)),
    }
    for name, fault in faults.items():
        try:
            fault()
            result["refused"][name] = None
        except (RuntimeError, AssertionError, ValueError) as error:
            result["refused"][name] = str(error)[:200]
    try:
        sample_episodes(engine, prompts, sampling, seed=0, step=4, weights_step=1)
    except RuntimeError as error:
        result["refused"]["generate after a failed sync"] = str(error)[:200]
    if engine.sleep_level == 2:
        sync(5)
        engine.sleep()
        engine.wake("weights")
        engine.wake("kv_cache")
        try:
            sample_episodes(engine, prompts, sampling, seed=0, step=5, weights_step=5)
            result["refused"]["generate without what sleep has dropped"] = None
        except RuntimeError as error:
            result["refused"]["generate without what sleep has dropped"] = str(error)[:200]
    if args.ranks > 1:
        result["heads"] = engine.llm.apply_model(
            lambda model: model.model.layers[0].self_attn.num_heads
        )
    result["shared memory"] = re.findall(
        "/dev/shm/.*(?<!deleted\\))$", Path("/proc/self/maps").read_text(), re.M
    )
    for part in gather_objects(result):
        say(json.dumps(part))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--sleep-level", type=int, default=1)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--orders", action="store_true")
    parser.add_argument("--synced-only", action="store_true")
    run(main, parser.parse_args())
