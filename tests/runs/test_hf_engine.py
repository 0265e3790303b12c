"""The engine on transformers alone: exact log-probs, seeds that ignore the neighbours, a sync that
keeps its books."""

import copy
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from helpers import generate, random_policy
from transformers import GPT2Config, MambaConfig, Qwen2Config

from common.distributed import World
from common.engine.books import WeightBooks
from common.engine.hf import HuggingFaceEngine
from common.engine.protocol import EngineConfig
from common.engine.vllm import VllmEngine
from common.models import full_parameters
from common.rotary import num_positions
from common.types import Request, Sampling

WORLD = World(0, 1, 0, torch.device("cpu"))
END = 2
# ragged: all but one are padded
PROMPTS = [[5, 9, 17, 33, 60, 4, 81], [7], [11, 12, 13], [40, 41, 42, 43, 44]]
SEEDS = [100, 200, 300, 400]


def plain_policy(config, seed=0):
    """Its model is called as transformers' own, not with packs."""
    policy = random_policy(config, torch.float32, seed)
    policy.model.set_attn_implementation("sdpa")
    return policy


@pytest.fixture(scope="module")
def policy(tiny_config):
    return plain_policy(tiny_config)


@pytest.fixture(scope="module")
def folder(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-qwen2")
    policy.model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def make_engine(folder, policy):
    def make(synced=True, **options):
        options = {"end_ids": [END], "max_model_len": 64} | options
        engine = HuggingFaceEngine(EngineConfig(folder, torch.float32, WORLD, **options))
        if synced:
            engine.sync_weights(full_parameters(policy), 0)
        return engine

    return make


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine()


@torch.no_grad()
def plain_logprobs(policy, prompt, response, temperature):
    """[response, vocab] of the model itself, without padding, cache or batch."""
    logits = policy.model(torch.tensor([prompt + response])).logits[0].double()
    return torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]


def worst_gap(policy, completions, prompts, temperature):
    gaps = []
    for prompt, samples in zip(prompts, completions, strict=True):
        for sample in samples:
            ids = torch.tensor(sample.token_ids)
            logprobs = torch.tensor(sample.logprobs, dtype=torch.float64)
            of_all_tokens = plain_logprobs(policy, prompt, sample.token_ids, temperature)
            expected = of_all_tokens.gather(-1, ids[:, None])[:, 0]
            gaps.append((logprobs - expected).abs().max())
    return max(gaps).item()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_the_models_own_at_the_temperature(engine, policy, temperature):
    completions = generate(engine, PROMPTS, Sampling(3, 20, temperature), SEEDS, 0)
    assert [len(samples) for samples in completions] == [3] * 4
    assert worst_gap(policy, completions, PROMPTS, temperature) < 1e-5


def test_samples_follow_the_distribution(engine, policy):
    """4,000 first tokens: no frequency is further than 5 standard deviations from the model's
    probability."""
    n = 4000
    temperature = 1.3
    (samples,) = generate(engine, [PROMPTS[2]], Sampling(n, 1, temperature), [0], 0)
    counts = torch.bincount(torch.tensor([s.token_ids[0] for s in samples]), minlength=97)
    p = plain_logprobs(policy, PROMPTS[2], [0], temperature)[0].exp()
    assert ((counts - n * p).abs() / (n * p * (1 - p)).sqrt().clamp(min=1)).max() < 5


def token_ids(completions) -> list[list[list[int]]]:
    """The ids of each sample of each prompt."""
    return [[sample.token_ids for sample in samples] for samples in completions]


def test_a_sample_depends_on_its_seed_alone(engine, make_engine):
    sampling = Sampling(3, 20, 1.0)
    together = token_ids(generate(engine, PROMPTS, sampling, SEEDS, 0))
    for samples in together:
        assert len({tuple(ids) for ids in samples}) == 3, "samples of a prompt differ"
    for i in (0, 1):
        alone = token_ids(generate(engine, [PROMPTS[i]], sampling, [SEEDS[i]], 0))
        assert alone == [together[i]]
        (second,) = generate(engine, [PROMPTS[i]], Sampling(1, 20, 1.0), [SEEDS[i] + 1], 0)
        assert second[0].token_ids == together[i][1], "sample j has seed + j"
    reversed_order = generate(engine, PROMPTS[::-1], sampling, SEEDS[::-1], 0)
    assert token_ids(reversed_order) == together[::-1]
    for max_sequences in (1, 5):
        engine = make_engine()
        engine.max_sequences = max_sequences
        assert token_ids(generate(engine, PROMPTS, sampling, SEEDS, 0)) == together
    (other,) = generate(engine, PROMPTS[:1], sampling, [SEEDS[0] + 50], 0)
    assert other[0].token_ids != together[0][0]


def test_a_longer_neighbour_does_not_shorten_a_sample(make_engine):
    """`max_model_len` bounds prompt + response of each request, as in vLLM, not of the padded
    batch."""
    engine = make_engine(max_model_len=16, end_ids=[])
    sampling = Sampling(1, 12, 1.0)
    (alone,), _ = generate(engine, [[7], [8]], sampling, [1, 2], 0)
    (beside,), (long,) = generate(engine, [[7], list(range(10, 22))], sampling, [1, 2], 0)
    assert len(alone.token_ids) == 12
    assert len(long.token_ids) == 4
    assert long.finish_reason == "length"
    assert beside.token_ids == alone.token_ids


def test_a_token_costs_two_copies_to_the_host(make_engine, monkeypatch):
    """Of all requests together: each copy waits for the device."""
    engine = make_engine(end_ids=[])
    num_copies = 0
    tolist = torch.Tensor.tolist

    def counted(tensor):
        nonlocal num_copies
        num_copies += 1
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "item", Mock(side_effect=AssertionError("one value")))
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    completions = generate(engine, PROMPTS, Sampling(max_tokens=6, temperature=1.0), SEEDS, 0)
    assert [len(c.token_ids) for (c,) in completions] == [6] * len(PROMPTS)
    assert num_copies == 2 * 6


def test_greedy_is_the_argmax_of_the_plain_model(engine, policy):
    greedy = generate(engine, PROMPTS, Sampling(1, 12, 0.0), SEEDS, 0)
    for prompt, (sample,) in zip(PROMPTS, greedy):
        ids = []
        while len(ids) < 12 and END not in ids:
            logits = policy.model(torch.tensor([prompt + ids])).logits
            ids.append(logits[0, -1].argmax().item())
        assert sample.token_ids == ids
    assert worst_gap(policy, greedy, PROMPTS, 1.0) < 1e-5


def test_truncated_sampling(engine, policy):
    """With a tiny top_p the most likely token is certain."""
    greedy = generate(engine, PROMPTS, Sampling(1, 12, 0.0), SEEDS, 0)
    truncated = generate(engine, PROMPTS, Sampling(2, 12, 1.5, top_p=1e-6), SEEDS, 0)
    for (expected,), samples in zip(greedy, truncated, strict=True):
        assert len(samples) == 2
        for sample in samples:
            assert sample.token_ids == expected.token_ids
            assert max(map(abs, sample.logprobs)) < 1e-6


def test_truncated_sampling_keeps_the_right_tokens(engine, policy):
    (samples,) = generate(engine, [PROMPTS[0]], Sampling(300, 1, 1.2, top_p=0.5), [0], 0)
    p, order = plain_logprobs(policy, PROMPTS[0], [0], 1.2)[0].exp().sort(descending=True)
    size = next(i + 1 for i, mass in enumerate(p.cumsum(0)) if mass >= 0.5)
    kept = order[:size].tolist()
    assert 1 < size < 30
    sampled = {sample.token_ids[0] for sample in samples}
    assert sampled <= set(kept)
    assert len(sampled) > 1
    for sample in samples:
        expected = (p[kept.index(sample.token_ids[0])] / p[:size].sum()).log()
        assert sample.logprobs[0] == pytest.approx(expected.item(), abs=1e-5)


def test_stops_at_an_end_token_and_includes_it(make_engine):
    ends = set(range(0, 97, 5))  # many, so that samples stop at different places
    engine = make_engine(end_ids=sorted(ends))
    completions = generate(engine, PROMPTS, Sampling(8, 10, 1.5), SEEDS, 0)
    samples = [sample for samples in completions for sample in samples]
    reasons = set()
    for sample in samples:
        assert len(sample.token_ids) == len(sample.logprobs) <= 10
        assert not ends & set(sample.token_ids[:-1]), "nothing follows an end token"
        if sample.token_ids[-1] in ends:
            assert sample.finish_reason == "stop"
        else:
            assert sample.finish_reason == "length"
            assert len(sample.token_ids) == 10
        reasons.add((sample.finish_reason, len(sample.token_ids)))
    assert len(reasons) > 3, "samples that stop early do not end the others"


def test_a_length_beyond_the_models_positions_is_refused(make_engine, folder):
    message = r"513 tokens together, and the model has 512 positions \(config.json\)"
    with pytest.raises(SystemExit, match=message):
        make_engine(max_model_len=513)
    make_engine(synced=False, max_model_len=512)


@pytest.mark.parametrize(
    "options, length",
    [
        ({}, 1024),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 2048),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, 4096),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            },
            4096,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 512,
                }
            },
            1024,
        ),
        ({"model_max_length": 3000}, 3000),
    ],
)
def test_how_long_a_sequence_a_model_was_made_for(options, length):
    assert num_positions(Qwen2Config(max_position_embeddings=1024, **options)) == length


def test_positions_go_by_other_names_or_have_no_end():
    assert num_positions(GPT2Config(n_positions=77)) == 77
    assert num_positions(MambaConfig()) == math.inf


def test_no_prompts_are_no_work(engine):
    assert generate(engine, [], Sampling(2), [], 0) == []


# --- the books ------------------------------------------------------------------------------------

# the tensor that the message must name, and what is done to the list of (name, tensor) to send
FAULTS = {
    "missing": (
        "model.layers.1.mlp.up_proj.weight",
        lambda name, sent: [(n, t) for n, t in sent if n != name],
    ),
    "unknown": (
        "model.layers.7.nonsense.weight",
        lambda name, sent: [*sent, (name, torch.zeros(3))],
    ),
    "sent twice": (
        "model.norm.weight",
        lambda name, sent: sent + [(n, t) for n, t in sent if n == name],
    ),
    "wrong size": (
        "model.layers.0.self_attn.q_proj.bias",
        lambda name, sent: [(n, t[: t.numel() // 2] if n == name else t) for n, t in sent],
    ),
    "one element for all": (  # which copy_ would spread over the whole tensor
        "model.layers.0.self_attn.k_proj.bias",
        lambda name, sent: [(n, t[:1] if n == name else t) for n, t in sent],
    ),
}
each_fault = pytest.mark.parametrize("fault", FAULTS)


@each_fault
def test_books_name_the_tensor_that_is_wrong(engine, policy, fault):
    name, spoil = FAULTS[fault]
    books = WeightBooks(engine.books.expected)
    books.step = 0
    with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
        list(books.record(spoil(name, list(full_parameters(policy)))))
        books.close(1)
    assert books.step is None


@each_fault
def test_engine_refuses_a_faulty_sync_and_is_unusable_after_it(make_engine, policy, fault):
    name, spoil = FAULTS[fault]
    engine = make_engine()
    with pytest.raises((RuntimeError, KeyError), match=name.replace(".", r"\.")):
        engine.sync_weights(spoil(name, list(full_parameters(policy))), 1)
    for step in (0, 1):
        with pytest.raises(RuntimeError, match="call sync_weights"):
            generate(engine, PROMPTS, Sampling(1, 1), SEEDS, step)


def test_books_pass_the_weights_on_as_they_are(engine, policy):
    books = WeightBooks(engine.books.expected)
    sent = list(books.record(full_parameters(policy, torch.bfloat16)))
    assert {tensor.dtype for _, tensor in sent} == {torch.bfloat16}
    assert {name: tensor.numel() for name, tensor in sent} == books.expected
    books.close(3)
    books.check(3)
    next(books.record(full_parameters(policy)))  # a sync that has not ended
    with pytest.raises(RuntimeError, match="call sync_weights"):
        books.check(3)


def test_stale_weights_are_refused(make_engine, policy):
    engine = make_engine(synced=False)
    attempt = partial(generate, engine, PROMPTS, Sampling(1, 1), SEEDS)
    with pytest.raises(RuntimeError, match="optimizer step None, the trainer is at 0"):
        attempt(0)
    engine.sync_weights(full_parameters(policy), 4)
    attempt(4)
    with pytest.raises(RuntimeError, match="optimizer step 4, the trainer is at 5"):
        attempt(5)


def test_a_sync_finds_the_buffers_that_sleep_has_replaced(make_engine, policy):
    """As on a GPU, where they are other tensors after each move; a CPU's stay."""
    engine = make_engine(synced=False)
    engine.model.register_buffer("scale", torch.ones(2))
    engine.books = WeightBooks(engine.books.expected | {"scale": 2})
    for buffers in [module._buffers for module in engine.model.modules()]:
        for name, buffer in buffers.items():
            buffers[name] = buffer.clone()
    weights = [*full_parameters(policy), ("scale", torch.full((2,), 3.0))]
    engine.sync_weights(weights, 0)
    assert engine.model.scale.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("sleep_level, kept", [(1, True), (2, False)])
def test_weights_that_sleep_has_dropped_are_not_sampled_with(sleep_level, kept):
    """If the next sync is forgotten. CPUs have no sleep: a mock stands in for vLLM, and the books
    alone are tested."""
    engine = object.__new__(VllmEngine)
    engine.llm = Mock()
    engine.books = WeightBooks({})
    engine.sleep_level = sleep_level
    engine.asleep = False
    engine.books.step = 7
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv_cache")
    if kept:
        engine.books.check(7)
    else:
        with pytest.raises(RuntimeError, match="optimizer step None, the trainer is at 7"):
            engine.submit(Request(0, PROMPTS[0], Sampling(1, 1), 0, weights_step=7))


@pytest.mark.parametrize("tied", [True, False])
def test_sync_changes_the_samples_to_those_of_the_new_weights(
    make_engine, tiny_config, tied, tmp_path
):
    config = copy.deepcopy(tiny_config)
    config.tie_word_embeddings = tied
    old = plain_policy(config, seed=3)
    new = plain_policy(config, seed=4)
    old.model.save_pretrained(tmp_path)
    engine = HuggingFaceEngine(
        EngineConfig(str(tmp_path), torch.float32, WORLD, [END], max_model_len=64)
    )
    engine.sync_weights(full_parameters(old), 0)
    before = generate(engine, PROMPTS, Sampling(2, 12), SEEDS, 0)
    engine.sleep()
    engine.wake("weights")
    engine.sync_weights(full_parameters(new), 1)
    engine.wake("kv_cache")
    after = generate(engine, PROMPTS, Sampling(2, 12), SEEDS, 1)
    assert worst_gap(old, before, PROMPTS, 1.0) < 1e-5
    assert worst_gap(new, after, PROMPTS, 1.0) < 1e-5
    assert worst_gap(new, before, PROMPTS, 1.0) > 0.1, "the two differ, or this test shows nothing"


def test_as_many_requests_at_once_as_fit_into_the_cache(make_engine, tiny_config):
    """Of the longest: 64 tokens, in each of two layers a key and a value of one head of 32 numbers
    in float32."""
    sequence_bytes = 64 * 2 * 2 * 32 * 4
    for memory, most in ((5.5 * sequence_bytes, 5), (0.5 * sequence_bytes, 1), (2**30, 256)):
        assert make_engine(memory_gib=memory / 2**30).max_sequences == most
    small = make_engine(memory_gib=2.5 * sequence_bytes / 2**30, end_ids=[])
    batch_sizes = []
    generate_batch = small._generate_batch

    def record_size(requests):
        batch_sizes.append(len(requests))
        return generate_batch(requests)

    small._generate_batch = record_size
    in_batches = generate(small, [PROMPTS[1]], Sampling(5, 4), [3], 0)
    together = generate(make_engine(end_ids=[]), [PROMPTS[1]], Sampling(5, 4), [3], 0)
    assert batch_sizes == [2, 2, 1]
    assert token_ids(in_batches) == token_ids(together)
