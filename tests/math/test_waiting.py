"""An update asks its device nothing: the host never waits, and is micro-batches ahead of a GPU.

Most tests compute on torch's device "meta", whose tensors have no values: there it is an error to
ask for one.
"""

import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from episodes import random_episodes
from helpers import make_args, random_policy, split_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vl import trajectories, write_tiny_vl

import common.attention
import common.logprobs
import curiosity_rl
import distill
import grpo
import ppo
import sft
from common.attention import block_mask
from common.distributed import World, make_mesh, wrap_model
from common.models import attention_implementation, load_model
from common.optimizer import GuardedAdamW
from common.packing import Packer, TokenIndex, pack
from common.pictures import PixelLimits
from common.teacher import Predictor
from common.vision import load_vision

META = World(rank=0, size=1, local_rank=0, device=torch.device("meta"))
# updates by name, and the script of each
SCRIPTS = {
    "plain": grpo,
    "grpo": grpo,
    "gspo": grpo,
    "ppo": ppo,
    "critic": ppo,
    "curiosity_rl": curiosity_rl,
    "sft": sft,
    "distill": distill,
    "sampled": distill,
}
FLAGS = {
    "grpo": {"correction": "sequence", "kl_loss_coef": 0.1, "entropy_coef": 0.1},
    "gspo": {"objective": "gspo", "reduction": "grpo"},
    "ppo": {"correction": "mask", "kl_loss_coef": 0.1},
    "distill": {"divergence": "jsd"},
    "sampled": {"estimator": "sampled"},
}


class Waits(TorchDispatchMode):
    """What makes a host wait: values that it reads, and copies to a device that block."""

    def __init__(self):
        super().__init__()
        self.num_reads = 0
        self.num_operations = 0  # on "meta"
        self.num_copies = 0  # to "meta"
        self.blocking: list[str] = []  # of these
        self.pinned: list[Tensor] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten._local_scalar_dense.default:
            self.num_reads += 1
        if function is torch.ops.aten._to_copy.default:
            self.record_copy(arguments[0], result, options)
        elif isinstance(result, Tensor) and result.device.type == "meta":
            self.num_operations += 1
        return result

    def record_copy(self, source: Tensor, result: Tensor, options: dict) -> None:
        if source.device.type == "meta" or result.device.type != "meta":
            return
        self.num_copies += 1
        is_pinned = source.data_ptr() in [tensor.data_ptr() for tensor in self.pinned]
        if not is_pinned or not options.get("non_blocking"):
            self.blocking.append(f"{list(source.shape)} {source.dtype}")


@pytest.fixture
def waits(monkeypatch):
    """On "meta" memory cannot be pinned, and there is no autocast."""
    waits = Waits()

    def pin_memory(tensor: Tensor) -> Tensor:
        waits.pinned.append(tensor)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setitem(common.logprobs.CHUNK_ELEMENTS, "meta", 2**12)
    return waits


def update_of(name: str, config, attention: str, world: World):
    """(a model, its `backward` over a minibatch of several micro-batches)."""
    episodes = random_episodes(7, prompts=8, samples=6)
    index = TokenIndex(episodes)
    packer = Packer(attention, 128, Path("nowhere"), world)
    (minibatch,) = packer.minibatches(episodes, index, split_of(episodes, 1, seed=0, step=0))
    assert len(minibatch.micro_batches) > 2
    model = policy_of(config, attention)
    script = SCRIPTS[name]
    arguments = {"minibatch": minibatch, "world": world}
    if script is sft:
        return model, partial(sft.backward, **arguments)
    arguments["tokens"] = script.Tokens.of(episodes, index, world.device)
    arguments["args"] = make_args(script, **FLAGS.get(name, {}))
    if name == "critic":
        model = ppo.Critic(model.model.base_model, attention)
        return model, partial(ppo.critic_backward, **arguments)
    if script is distill:
        policies = [model, policy_of(config, attention, seed=1)]
        student, teacher = (Predictor(policy.model, attention) for policy in policies)
        models = nn.ModuleList([student, teacher.requires_grad_(False)])
        arguments |= {"first_epoch": True, "store_old_logprobs": True}
        return models, partial(distill.backward, **arguments)
    return model, partial(script.backward, **arguments, store_old_logprobs=True)


def policy_of(config, attention: str, seed: int = 0):
    policy = random_policy(config, torch.float32, seed)
    policy.attention = attention
    config = policy.model.config
    config._attn_implementation = attention_implementation(config, attention, vision=None)
    return policy


@pytest.mark.parametrize(
    "name, attention", [*((name, "flex") for name in SCRIPTS), ("plain", "flash")]
)
def test_a_micro_batch_asks_its_device_nothing(name, attention, tiny_config, waits, monkeypatch):
    """No value is read in forward, loss and backward, and no copy to the device blocks."""
    monkeypatch.setattr(common.attention, "compiled_flex_attention", lambda: without_kernel)
    flash = SimpleNamespace(flash_attn_varlen_func=without_kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    model, backward = update_of(name, tiny_config, attention, META)
    model.to("meta")
    with waits:
        backward(model)
    assert waits.num_copies > 0
    assert not waits.blocking


def without_kernel(query: Tensor, key: Tensor, value: Tensor, *_, **__) -> Tensor:
    """In place of kernels that "meta" does not have; here values have the shape of queries."""
    return query + 0 * (key.sum() + value.sum())


def test_a_forward_pass_asks_its_device_nothing(tiny_config, waits):
    """As scripts compute old log-probs, whose places in the result are on the device, too."""
    episodes = random_episodes(7, prompts=8, samples=6)
    index = TokenIndex(episodes)
    packer = Packer("flex", 128, Path("nowhere"), META)
    minibatches = packer.minibatches(episodes, index, split_of(episodes, 1, seed=0, step=0))
    model = nn.Module()
    model.forward = lambda batch: batch.token_index.float()
    with waits:
        packer.fill(torch.empty(len(index), device="meta"), model, minibatches)
    assert waits.num_copies > 0
    assert not waits.blocking


@pytest.mark.parametrize("window", [None, 100])
def test_masks_are_made_on_the_host(window, waits):
    """torch's constructor makes one side of the tables on the device, in some sixty kernels."""
    units = [[130, 200, 90], [60, 20], [12]]
    with waits:
        mask = block_mask(units, META.device, window)
    tables = [x for x in mask.as_tuple(flatten=True) if isinstance(x, Tensor) and x.dim() > 2]
    assert [table.device.type for table in tables] == ["meta"] * 8
    assert not waits.blocking
    assert waits.num_operations == 0


@pytest.mark.parametrize("name", ["grpo", "critic", "sft"])
def test_an_optimizer_step_reads_two_values_at_most(name, tiny_config, world):
    """Under FSDP2, as the scripts run."""
    model, backward = update_of(name, tiny_config, "sdpa", world)
    model = wrap_model(model, make_mesh(world, "fsdp"), torch.bfloat16)
    optimizer = GuardedAdamW(model, torch.bfloat16, weight_decay=0.0, max_grad_norm=1.0)
    with Waits() as waits:
        backward(model)
        assert waits.num_reads == 0
        optimizer.step(1e-3)
    assert waits.num_reads <= 2


@pytest.mark.parametrize(
    "kind, num_bounds",
    [("qwen2_5_vl", 2), pytest.param("qwen3_vl", 1, marks=pytest.mark.slow)],
)
def test_a_vision_tower_reads_the_bounds_of_pictures_once(kind, num_bounds, tmp_path, monkeypatch):
    """For all of its layers; Qwen2.5-VL's have the bounds of windows or those of frames."""
    folder = str(write_tiny_vl(tmp_path, kind=kind))
    vision = load_vision(folder, PixelLimits(784, 64 * 784, 16 * 784))
    policy = load_model(folder, "sdpa", vision=vision)
    blocks = policy.model.base_model.visual.blocks
    blocks.extend(list(blocks))  # each twice: more layers than bounds
    episodes = trajectories(vision)
    index = TokenIndex(episodes)
    batch = pack(episodes, range(len(episodes)), index, budget=4096, vision=vision)[0]
    assert batch.media
    readers = Counter()
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> list:
        readers[Path(sys._getframe(1).f_code.co_filename).name] += 1
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    with torch.no_grad():
        policy(batch)
    assert readers.pop("vision.py") == num_bounds
    assert set(readers) == {"vision_utils.py"}, "what all layers share"
