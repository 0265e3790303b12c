"""What waits on the host: its bytes in each phase of a step, and that nothing else changes.

Without a GPU the device's memory is the host's, too: counted are the tensors that are alive beside
the copies for the host.
"""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from family_models import write_family
from helpers import generate
from torch import Tensor, nn

from common.distributed import gathered, make_mesh, wrap_model
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.flags import Machine
from common.lora import adapters
from common.models import full_parameters, load_model, sleep_engine, sync_engine
from common.offload import HostBase
from common.optimizer import GuardedAdamW, HostMoments, move_states
from common.packing import TokenIndex, pack
from common.types import Episode, Sampling

CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def freeze_older_objects():
    """A session has millions, which `live_bytes` leaves out then."""
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes() -> int:
    """Of all tensors of this test that something refers to, views counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        is_local = issubclass(type(thing), Tensor) and not hasattr(thing, "full_tensor")
        if is_local and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.fixture(params=["llama", "llama-tied"])
def folder(request, tmp_path) -> Path:
    return write_family(tmp_path, request.param)


@pytest.fixture
def policy(folder, world):
    """Sharded, with adapters that have moved."""
    shard = partial(wrap_model, mesh=make_mesh(world, "fsdp"), compute_dtype=torch.float32)
    policy = load_model(str(folder), "sdpa", wrap=shard, lora_flags=Machine(lora_rank=4))
    generator = torch.Generator().manual_seed(3)
    for _, layer in adapters(policy.model):
        layer.lora_B.data.normal_(std=0.1, generator=generator)
    return policy


def policy_logprobs(policy: nn.Module, response: list[int]) -> Tensor:
    episode = Episode(0, 0, PROMPT, response, [1] * len(response), [0.0] * len(response))
    (batch,) = pack([episode], range(1), TokenIndex([episode]), budget=128)
    logprobs, _ = policy(batch)
    return logprobs


class CountingEngine(HuggingFaceEngine):
    """Notes the bytes that are alive when it is called, and at each weight that it is sent."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.counts: dict[str, list[int]] = {}

    def note(self, phase: str) -> None:
        self.counts.setdefault(phase, []).append(live_bytes())

    def wake(self, part: str) -> None:
        self.note(f"wake {part}")
        super().wake(part)

    def sync_weights(self, weights, step: int) -> None:
        def counted():
            for name, tensor in weights:
                self.note("sync")
                yield name, tensor

        super().sync_weights(counted(), step)

    def sleep(self) -> None:
        self.note("sleep")
        super().sleep()


def test_the_base_is_on_the_device_only_while_the_engine_sleeps(policy, folder, world):
    frozen = [p for p in policy.parameters() if not p.requires_grad]
    base_bytes = sum(p.untyped_storage().nbytes() for p in map(gathered, frozen))
    adapted = [layer.weight for _, layer in adapters(policy.model)]
    largest_bytes = max(gathered(weight).nbytes for weight in adapted)
    options = {"end_ids": [], "max_model_len": 64, "sleep_level": 0}
    engine = CountingEngine(EngineConfig(str(folder), torch.float32, world, **options))
    before = live_bytes()
    policy.host_bases.append(HostBase(policy, CPU))
    with_copy = live_bytes()
    assert with_copy - before == base_bytes, "the host's copy, made once"
    expected = {name: tensor.clone() for name, tensor in full_parameters(policy)}
    count = live_bytes()
    for step in (1, 2):
        engine.counts.clear()
        sync_engine(engine, policy, step)
        ((completion,),) = generate(engine, [PROMPT], Sampling(1, 12), [step], step)
        sleep_engine(engine, policy)
        assert engine.counts["wake weights"] == [count - base_bytes]
        assert engine.counts["wake kv_cache"] == [count - base_bytes]
        assert engine.counts["sleep"] == [count - base_bytes]
        # a merged weight, and the one before it
        assert max(engine.counts["sync"]) <= count - base_bytes + 2 * largest_bytes
        assert live_bytes() == count, "the device's copy is back"
        logprobs = policy_logprobs(policy, completion.token_ids)
        gap = (logprobs - torch.tensor(completion.logprobs)).abs().max()
        assert gap < 1e-5
        logprobs.sum().backward()
        del logprobs, gap
        policy.zero_grad()
    for name, tensor in full_parameters(policy):
        assert torch.equal(tensor, expected[name]), name


def test_the_parameters_stay_the_same_objects(policy):
    """An optimizer and FSDP2 hold on to them; tied ones stay tied."""
    parameters = dict(policy.named_parameters(remove_duplicate=False))
    base = HostBase(policy, CPU)
    base.to_host()
    base.to_device()
    base.to_device()  # again: it is there
    now = dict(policy.named_parameters(remove_duplicate=False))
    assert now.keys() == parameters.keys()
    assert all(now[name] is parameter for name, parameter in parameters.items())
    trained = {p for p in policy.parameters() if p.requires_grad}
    assert not trained & base.copies.keys()


def test_a_base_on_the_host_is_exported(policy):
    """A run may end between a sync and an update."""
    expected = {name: tensor.clone() for name, tensor in full_parameters(policy)}
    policy.host_bases.append(HostBase(policy, CPU))
    policy.host_bases[0].to_host()
    found = dict(full_parameters(policy))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Elsewhere(Tensor):
    """A tensor on the host that says it is on another device."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


def test_moments_have_one_place_on_the_host():
    """It is filled anew after each step."""
    adamw = GuardedAdamW(nn.Linear(4, 3), torch.float32, weight_decay=0.0, max_grad_norm=0.0)
    state = adamw.optimizer.state[adamw.model.weight]
    places: HostMoments = {}
    pointers = set()
    for step in range(3):
        for parameter in adamw.model.parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        adamw.step(0.1)
        moment = state["exp_avg"].clone()
        state["exp_avg"] = state["exp_avg"].clone().as_subclass(Elsewhere)
        move_states(adamw.optimizer, CPU, places)
        assert state["exp_avg"] is places[adamw.model.weight, "exp_avg"]
        assert torch.equal(state["exp_avg"].as_subclass(Tensor), moment)
        pointers.add(state["exp_avg"].data_ptr())
    assert len(pointers) == len(places) == 1, "the others were on the host"
