"""LoRA: exact gradients, one set of merged weights for trainer, engine and export, a base that is
never changed."""

import json

import peft
import pytest
import torch
from episodes import random_episodes
from helpers import random_policy
from torch import nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig
from vl import write_tied_llama

from common.distributed import repeated_blocks
from common.export import export_hugging_face, save_adapter
from common.flags import Machine
from common.hub import load_tokenizer, resolve_model
from common.lora import WithoutAdapters, adapted_layers, add_adapters, merged
from common.models import full_parameters, load_model
from common.packing import TokenIndex, pack
from common.shards import saved_weights
from ppo import Critic

CONFIG = Qwen2Config(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    vocab_size=97,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TINY = resolve_model("tiny")


def lora(targets: str = "all") -> Machine:
    return Machine(lora_rank=3, lora_alpha=6.0, lora_targets=targets)


def move_adapters(model: nn.Module, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(5)
    for _, layer in adapted_layers(model):
        layer.lora_B.data.normal_(std=size, generator=generator)


def random_adapted(dtype=torch.float64):
    policy = random_policy(CONFIG, dtype)
    add_adapters(policy.model, repeated_blocks(policy), lora(), seed=1)
    move_adapters(policy)
    return policy


def packed(vocab: int = 97):
    episodes = random_episodes(0, vocab=vocab)
    (batch,) = pack(episodes, range(len(episodes)), TokenIndex(episodes), budget=10_000)
    return batch


def test_gradients_are_those_of_explicit_adapters():
    """And nothing else has any: what is merged in a backward is the weight of the forward."""
    policy = random_adapted()
    plain = random_policy(CONFIG)
    batch = packed()
    pull = torch.linspace(-1, 1, len(batch.targets), dtype=torch.float64)
    loss = (policy(batch)[0] * pull).sum() + policy(batch)[1].sum()
    loss.backward()
    leaves = {}
    weights = {}
    for name, layer in adapted_layers(policy):
        a = layer.lora_A.detach().clone().requires_grad_()
        b = layer.lora_B.detach().clone().requires_grad_()
        leaves[name] = (a, b)
        weights[f"{name}.weight"] = layer.weight + 2.0 * b @ a
    logprobs, entropy = functional_call(plain, weights, (batch,))
    expected = (logprobs * pull).sum() + entropy.sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert len(leaves) == 2 * 7
    for name, layer in adapted_layers(policy):
        a, b = leaves[name]
        assert a.grad.abs().max() > 1e-3
        assert b.grad.abs().max() > 1e-3
        torch.testing.assert_close(layer.lora_A.grad, a.grad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.lora_B.grad, b.grad, rtol=1e-9, atol=1e-9)
    with_gradient = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, p in policy.named_parameters() if "lora_" in name}


def test_a_fresh_adapter_changes_nothing_and_the_base_stays_what_it_was():
    policy = load_model(TINY, "sdpa", lora_flags=lora())
    before = dict(load_model(TINY, "sdpa").model.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_parameters(policy))
    batch = packed()
    with torch.no_grad():
        original = policy(batch)[0]
        for count in range(100):
            move_adapters(policy, size=0.1 * count)
            sent = dict(full_parameters(policy))
        moved = policy(batch)[0]
        assert (moved - original).abs().mean() > 0.1
        assert torch.equal(WithoutAdapters(policy)(batch)[0], original)
        assert torch.equal(policy(batch)[0], moved)
    now = policy.model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert any(not torch.equal(sent[name], before[name]) for name in sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_sent_has_the_bits_of_the_forward(dtype):
    """A plain model with the weights that an engine gets has the log-probs of the adapted one."""
    policy = load_model(TINY, "sdpa", dtype=dtype, lora_flags=lora())
    batch = packed()
    move_adapters(policy)
    plain = load_model(TINY, "sdpa", dtype=dtype)
    plain.model.load_state_dict(dict(full_parameters(policy, dtype)))
    with torch.no_grad():
        assert torch.equal(policy(batch)[0], plain(batch)[0])


def test_merging_rounds_once():
    weight = torch.randn(64, 32).bfloat16()
    a = torch.randn(4, 32)
    b = 1e-3 * torch.randn(64, 4)
    exact = weight.double() + 2 * b.double() @ a.double()
    assert torch.equal(merged(weight, a, b, 2.0), exact.float().bfloat16())


def test_an_adapted_critic_trains_its_head_too():
    backbone = load_model(TINY, "sdpa", dtype=torch.bfloat16, lora_flags=lora()).model.base_model
    critic = Critic(backbone, "sdpa")
    critic(packed()).sum().backward()
    assert critic.head.dtype == torch.float32
    assert critic.head.grad.abs().sum() > 0
    trained = [name for name, p in critic.named_parameters() if p.requires_grad]
    assert {name.rpartition(".")[2] for name in trained} == {"head", "lora_A", "lora_B"}


@pytest.mark.parametrize(
    "targets, message",
    [
        (
            "q_proj,nonsense",
            "--lora-targets nonsense: its layers have down_proj, gate_proj, k_proj",
        ),
        ("lm_head", "head and embeddings are not adapted"),
        ("embed_tokens", "head and embeddings are not adapted"),
    ],
)
def test_targets_that_match_nothing_are_refused(targets, message):
    with pytest.raises(SystemExit, match=message):
        load_model(TINY, "sdpa", lora_flags=lora(targets=targets))


def test_targets_are_layers_by_name():
    policy = load_model(TINY, "sdpa", lora_flags=lora(targets="q_proj,down_proj"))
    names = {name.rpartition(".")[2] for name, _ in adapted_layers(policy)}
    assert names == {"q_proj", "down_proj"}


def test_a_warning_says_that_experts_are_not_adapted(capsys):
    """transformers has them in one parameter, which is no linear layer."""
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_experts=4,
        vocab_size=97,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    warning = "experts, which are no linear layers here, are not adapted"
    mixture = AutoModelForCausalLM.from_config(config)
    add_adapters(mixture, repeated_blocks(mixture), Machine(lora_rank=2))
    assert warning in capsys.readouterr().out
    dense = AutoModelForCausalLM.from_config(CONFIG)
    add_adapters(dense, repeated_blocks(dense), Machine(lora_rank=2))
    assert warning not in capsys.readouterr().out


def test_all_may_be_named_among_others():
    policy = load_model(TINY, "sdpa", lora_flags=lora(targets="all,q_proj"))
    assert len({name.rpartition(".")[2] for name, _ in adapted_layers(policy)}) == 7


def test_a_checkpoint_holds_adapters_alone(tmp_path):
    """Where the head is tied to the embeddings, too, which torch names apart."""
    for folder in (TINY, write_tied_llama(tmp_path)):
        names = saved_weights(load_model(str(folder), "sdpa", lora_flags=lora())).keys()
        assert names
        assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B"}


def test_peft_loads_the_adapter_to_the_same_logits(tmp_path, world):
    policy = load_model(TINY, "sdpa", lora_flags=lora())
    move_adapters(policy)
    folder = tmp_path / "model"
    export_hugging_face(policy, load_tokenizer(TINY), folder, world, torch.float32, base=TINY)
    ids = torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        original = base(ids).logits
        of_peft = peft.PeftModel.from_pretrained(base, folder / "adapter")(ids).logits
        of_export = exported(ids).logits
    assert (of_peft - original).abs().max() > 0.1
    torch.testing.assert_close(of_export, of_peft, rtol=1e-5, atol=1e-5)
    adapter_config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert adapter_config["r"] == 3
    assert (adapter_config["base_model_name_or_path"], adapter_config["revision"]) == (TINY, None)


def test_an_adapter_names_its_base_and_the_revision_of_that(tmp_path):
    """As PEFT reads them: its key `revision` is the base's."""
    policy = load_model(TINY, "sdpa", lora_flags=lora())
    save_adapter(policy, "org/model@v1", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "v1")
