"""What waits on the host: its bytes in each phase of a step, and that nothing else changes.

Tensors without values can be on a GPU that is not there. For those with values the device's memory
is the host's, too: counted is what is alive beside the copies for the host.
"""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from family_models import write_family
from helpers import generate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from common.distributed import gathered, make_mesh, wrap_model
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.flags import Machine
from common.lora import adapted_layers
from common.models import Policy, full_parameters, load_model, sleep_engine, sync_engine
from common.offload import HostBase
from common.optimizer import HostMoments, move_states
from common.packing import TokenIndex, pack
from common.torch_repair import transformers
from common.types import Episode, Sampling

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def freeze_objects_of_earlier_tests():
    """`live_bytes` leaves them out."""
    gc.freeze()


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
    for _, layer in adapted_layers(policy.model):
        layer.lora_B.data.normal_(std=0.1, generator=generator)
    return policy


def bytes_by_device(model: nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        kind = parameter.device.type
        counts[kind] = counts.get(kind, 0) + parameter.nbytes
    return counts


def put_on_gpu(model: nn.Module, mesh: DeviceMesh) -> None:
    """In DTensors, as FSDP2 does, and frozen."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shard = DTensor.from_local(parameter.detach(), mesh, [Replicate()]).to(GPU)
            setattr(module, name, nn.Parameter(shard, requires_grad=False))


def test_what_a_gpu_holds_in_each_phase(tiny_config, world):
    mesh = make_mesh(world, "fsdp")
    with FakeTensorMode():
        policy = Policy(transformers.AutoModelForCausalLM.from_config(tiny_config), "sdpa")
        put_on_gpu(policy, mesh)
        on_gpu = bytes_by_device(policy)
        assert on_gpu.keys() == {"cuda"}
        base = HostBase(policy, GPU)
        policy.host_bases.append(base)
        for _ in range(2):
            base.to_host()
            assert bytes_by_device(policy) == {"cpu": on_gpu["cuda"]}
            weights = dict(full_parameters(policy))
            assert {tensor.device.type for tensor in weights.values()} == {"cuda"}
            del weights
            assert bytes_by_device(policy) == {"cpu": on_gpu["cuda"]}
            base.to_device()
            assert bytes_by_device(policy) == on_gpu


def test_moments_on_a_gpu_have_one_place_on_the_host():
    """It is filled anew after each step."""
    with FakeTensorMode():
        parameters = [torch.zeros(3, 4).to(GPU), torch.zeros(3).to(GPU)]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            optimizer.state[parameter] = {"step": torch.zeros(())}
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][name] = torch.zeros_like(parameter)
        places: HostMoments = {}
        seen = []
        for _ in range(2):
            move_states(optimizer, CPU, places)
            state = optimizer.state[parameters[0]]
            assert state["exp_avg"].device == CPU
            seen.append(state["exp_avg"])
            move_states(optimizer, GPU, places)
            assert state["exp_avg"].device.type == "cuda"
        assert seen[0] is seen[1]
        assert len(places) == 4


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
    adapted = [layer.weight for _, layer in adapted_layers(policy.model)]
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
