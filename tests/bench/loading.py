"""Memory of a host while a model is loaded: growth of each rank's anonymous memory up to its peak,
against its shard.

    # all kinds of models on 2 and 4 ranks, minutes on a CPU
    python tests/bench/loading.py
    python tests/bench/loading.py --kinds tied ddp --ranks 2

A rank that read more than its own shard would show: the bound is 1.2 times the shard, and the
largest layer (the embedding counts as one), which FSDP2 may have to hold whole. Models are
SmolLM2's, and random weights for the vision model. RssAnon is read by a process of its own every 2
ms; what the file system caches of files is not in it.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
import tyro
from report import header, table
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from common.distributed import gather_objects, init_world, make_mesh, wrap_model
from common.exactness import checked_skeleton
from common.flags import Machine
from common.hub import resolve_model
from common.models import Policy, load_model
from common.progress import say
from common.script import run
from ppo import Critic

Kind = Literal["tied", "untied", "critic", "sharded files", "vision", "ddp", "LoRA"]
SLACK = 1.2  # times the shard
SAMPLER = """
import sys, threading, time
path, peak = f"/proc/{sys.argv[1]}/status", 0
ended = threading.Thread(target=sys.stdin.read)
ended.start()
while ended.is_alive():
    with open(path) as file:
        kilobytes = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
    if not peak:
        print(kilobytes, flush=True)
    peak = max(peak, kilobytes)
    time.sleep(0.002)
print(peak)
"""


@dataclass
class Args:
    kinds: tuple[Kind, ...] = get_args(Kind)
    ranks: tuple[int, ...] = (2, 4)
    # one measurement by the ranks of a torchrun: what the benchmark itself calls
    only: Kind | None = None
    folder: str = ""  # of its model


def write_model(kind: Kind, folder: Path) -> str:
    """A folder with a model of this kind: SmolLM2's own, or one that is written."""
    smollm2 = resolve_model("smollm2")
    if kind == "vision":
        sizes = {
            "hidden_size": 640,
            "intermediate_size": 1728,
            "num_hidden_layers": 12,
            "num_attention_heads": 10,
        }
        rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
        text = sizes | {"num_key_value_heads": 2, "vocab_size": 60_000, "rope_parameters": rope}
        tower = {
            "depth": 12,
            "hidden_size": 640,
            "intermediate_size": 1728,
            "num_heads": 10,
            "out_hidden_size": 640,
        }
        ids = {"bos_token_id": 0, "eos_token_id": 1}
        config = Qwen2_5_VLConfig(text_config=text | ids, vision_config=tower)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    elif kind in ("untied", "sharded files"):
        model = AutoModelForCausalLM.from_pretrained(smollm2)
        if kind == "untied":
            model.config.tie_word_embeddings = False
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
        model.save_pretrained(folder, max_shard_size="100MB" if kind == "sharded files" else "50GB")
    else:
        return smollm2
    return str(folder)


@contextmanager
def anonymous_memory() -> Iterator[dict[str, int]]:
    """Bytes of this process that are of no file: {"before", "peak"}, when the block has ended."""
    found: dict[str, int] = {}
    pid = Path("/proc/self").resolve().name
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SAMPLER, pid], **pipes) as sampler:
        found["before"] = int(sampler.stdout.readline()) * 1024
        yield found
        found["peak"] = int(sampler.communicate()[0]) * 1024


def largest_layer(model: nn.Module) -> int:
    """Bytes of the largest unit that FSDP2 gathers at a time: a layer, the embeddings, the head."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule) and unit is not model]
    layers = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in units]
    return max(*layers, *(p.numel() * p.element_size() for p in model.parameters()))


def measure(args: Args) -> None:
    """Load the model as the scripts do, and print {growth, shard, layer} of each rank, as JSON, on
    rank 0."""
    world, kind = init_world(), args.only
    mesh = make_mesh(world, "ddp" if kind == "ddp" else "fsdp")
    wrap = partial(
        wrap_model, mesh=mesh, compute_dtype=torch.bfloat16, shards_own_parameters=kind != "LoRA"
    )
    options: dict = {"wrap": wrap, "model_class": Critic if kind == "critic" else Policy}
    if kind == "LoRA":
        options |= {"lora_flags": Machine(lora_rank=16), "dtype": torch.bfloat16}
    # which imports what the model needs, here as in the scripts
    checked_skeleton(args.folder, "sdpa", False, "--model")
    with anonymous_memory() as memory:
        model = load_model(args.folder, "sdpa", **options)
        with torch.no_grad():
            for parameter in model.parameters():
                # float32 files are mapped: their pages become ours when they are written to
                parameter.mul_(1)
        time.sleep(0.1)
    own = {p: p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()}
    shard = sum(part.numel() * part.element_size() for part in own.values())
    growth = memory["peak"] - memory["before"]
    results = gather_objects({"growth": growth, "shard": shard, "layer": largest_layer(model)})
    say(json.dumps(results))


def ranks_of(kind: Kind, ranks: int, folder: str) -> list[dict[str, int]]:
    """What `measure` says of each rank."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(ranks),
    ]
    command = [*torchrun, __file__, "--only", kind, "--folder", folder]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def bound(result: dict[str, int]) -> float:
    return SLACK * result["shard"] + result["layer"]


def main(args: Args) -> None:
    if args.only:
        measure(args)
        return
    header("Growth of anonymous memory while loading", threads=1)
    above = []
    rows = [
        ["model", "ranks", "shard (MB)", "layer (MB)", "bound (MB)", "growth (MB)", "of the bound"]
    ]
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(kind, Path(folder))
            for ranks in args.ranks:
                worst = max(
                    ranks_of(kind, ranks, path), key=lambda result: result["growth"] / bound(result)
                )
                share = worst["growth"] / bound(worst)
                numbers = (worst["shard"], worst["layer"], bound(worst), worst["growth"])
                rows.append(
                    [
                        kind,
                        str(ranks),
                        *(f"{number / 1e6:.0f}" for number in numbers),
                        f"{share:.0%}",
                    ]
                )
                above += [f"{kind} on {ranks} ranks"] if share > 1 else []
                print(*rows[-1], flush=True)
    print()
    table(*rows)
    if above:
        raise SystemExit(f"above the bound: {', '.join(above)}")


if __name__ == "__main__":
    run(main, tyro.cli(Args, description=__doc__))
