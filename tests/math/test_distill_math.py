"""The mathematics of distill.py: divergences and their gradients against the definitions, the
sampled estimator by enumeration, one denominator, prompts of the teacher's own."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_args, random_policy
from torch import nn
from transformers import Qwen2Config

import common.divergence
import distill
from common.distributed import World
from common.divergence import MISSING_LOGPROB, Prediction, compare
from common.flags import Rollout
from common.logprobs import LogitTransform
from common.packing import Packer, TokenIndex, pack
from common.steps import Stopwatch
from common.teacher import (
    Predictor,
    check_same_tokens,
    store_divergences,
    with_teacher_prompts,
)
from common.types import Episode, Row
from distill import Args, Tokens, backward, divergence_terms

DIVERGENCES = [("reverse-kl", 0.5), ("forward-kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p / q).log()).sum(-1)


def definition(
    logits: torch.Tensor, teacher_logits: torch.Tensor, divergence: str, beta: float
) -> torch.Tensor:
    """As in GKD's section 2, P the teacher and Q the student."""
    p, q = logits.softmax(-1), teacher_logits.softmax(-1)
    if divergence == "reverse-kl":
        return kl(p, q)
    if divergence == "forward-kl":
        return kl(q, p)
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def random_predictions(num_words: int = 31, num_teacher_words: int = 31, **student):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    own = Prediction(
        normal(17, 8).requires_grad_(),
        normal(num_words, 8).requires_grad_(),
        **{"transform": LogitTransform(), "temperature": 1.0, **student},
    )
    teacher = Prediction(
        normal(17, 6), normal(num_teacher_words, 6), LogitTransform(softcap=3.0), 1.3
    )
    targets = torch.randint(num_words, (17,), generator=generator)
    return own, teacher, targets


@pytest.mark.parametrize("chunk", [2**23, 40])
@pytest.mark.parametrize("divergence, beta", DIVERGENCES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"num_words": 29},
        {"num_words": 37, "transform": LogitTransform(scale=0.5, softcap=2.0), "temperature": 2.0},
    ],
    ids=["same", "temperature", "smaller", "larger-capped"],
)
def test_divergence_and_gradient_are_those_of_the_definition(
    divergence, beta, options, chunk, monkeypatch
):
    monkeypatch.setitem(common.divergence.CHUNK_ELEMENTS, "cpu", chunk)
    student, teacher, targets = random_predictions(**options)
    terms = partial(divergence_terms, divergence=divergence, beta=beta)
    comparison = compare(student, teacher, targets, terms)
    weights = torch.linspace(-1, 2, 17, dtype=torch.float64)
    (comparison.divergence * weights).sum().backward()
    gradients = student.hidden.grad, student.weight.grad

    hidden = student.hidden.detach().clone().requires_grad_()
    weight = student.weight.detach().clone().requires_grad_()
    logits = student.transform.scale * (hidden @ weight.T)
    if student.transform.softcap:
        logits = student.transform.softcap * (logits / student.transform.softcap).tanh()
    logits = logits / student.temperature
    teacher_logits = 3 * (teacher.hidden @ teacher.weight.T / 3).tanh() / 1.3
    shared = min(logits.shape[1], teacher_logits.shape[1])
    expected = definition(logits[:, :shared], teacher_logits[:, :shared], divergence, beta)
    (expected * weights).sum().backward()

    torch.testing.assert_close(comparison.divergence, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradients[0], hidden.grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradients[1], weight.grad, rtol=0, atol=1e-13)

    logp, logq = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    at = targets[:, None]
    torch.testing.assert_close(comparison.logprobs, logp.gather(-1, at)[:, 0])
    torch.testing.assert_close(comparison.entropy, -(logp.exp() * logp).sum(-1))
    torch.testing.assert_close(comparison.teacher_entropy, -(logq.exp() * logq).sum(-1))
    agreement = (logp.argmax(-1) == logq.argmax(-1)).double()
    torch.testing.assert_close(comparison.agreement, agreement)
    known = torch.nn.functional.pad(logq, (0, 10), value=MISSING_LOGPROB).gather(-1, at)[:, 0]
    torch.testing.assert_close(comparison.teacher_logprobs, known)


def test_only_the_divergence_has_a_gradient():
    student, teacher, targets = random_predictions()
    comparison = compare(
        student, teacher, targets, partial(divergence_terms, divergence="jsd", beta=0.3)
    )
    names = [name for name, x in comparison._asdict().items() if x.requires_grad]
    assert names == ["divergence"]


@pytest.mark.parametrize("divergence, beta", DIVERGENCES)
def test_a_teacher_that_is_the_student_moves_nothing(divergence, beta):
    student, _, targets = random_predictions()
    teacher = replace(student, hidden=student.hidden.detach(), weight=student.weight.detach())
    terms = partial(divergence_terms, divergence=divergence, beta=beta)
    comparison = compare(student, teacher, targets, terms)
    comparison.divergence.sum().backward()
    assert comparison.divergence.abs().max() < 1e-15
    assert student.hidden.grad.abs().max() < 1e-14 and student.weight.grad.abs().max() < 1e-14
    assert comparison.agreement.min() == 1


@pytest.mark.parametrize("beta, limit", [(1e-6, "forward-kl"), (1 - 1e-6, "reverse-kl")])
def test_the_jsd_tends_to_the_two_kls(beta, limit):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, 11, generator=generator, dtype=torch.float64).log_softmax(-1)
    jsd, _ = divergence_terms(*logits, "jsd", beta)
    expected, _ = divergence_terms(*logits, limit, beta)
    torch.testing.assert_close(
        jsd.sum(-1) / (beta * (1 - beta)), expected.sum(-1), rtol=1e-4, atol=0
    )


def test_the_sampled_estimator_has_the_gradient_of_the_reverse_kl():
    """By enumeration: a policy of three tokens, all of whose samples are weighted by their
    probability."""
    logits = torch.tensor([0.3, -0.9, 0.1], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor([-0.2, 0.4, 1.1], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    old = logp.detach()
    loss, clipped = distill.clipped_loss((logp - old).exp(), logq - old, 0.2, 0.2, 3.0)
    assert not clipped.any()
    (gradient,) = torch.autograd.grad((old.exp() * loss).sum(), logits)

    logp = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


def some_episodes(with_teacher_prompts: bool = False) -> list[Episode]:
    episodes = []
    for prompt in range(2):
        for sample in range(2):
            length = 3 + 2 * prompt + sample
            ids = [(7 * prompt + 3 * sample + i) % 50 + 5 for i in range(length)]
            mask = [1] * length
            if sample:
                mask[1] = 0  # an observation
            episode = Episode(prompt, sample, [5, 6 + prompt, 8], ids, mask, [-1.0] * length)
            if with_teacher_prompts:
                episode.teacher_prompt_ids = [9, 10, 11 + prompt, 12, 13]
            episodes.append(episode)
    return episodes


def models(teacher_seed: int = 1) -> nn.ModuleList:
    options = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(
        **options, intermediate_size=48, num_attention_heads=4, max_position_embeddings=128
    )
    pair = [Predictor(random_policy(config, seed=seed).model, "sdpa") for seed in (0, teacher_seed)]
    return nn.ModuleList([pair[0], pair[1].requires_grad_(False)])


def plain_logits(policy: nn.Module, prompt_ids: list[int], episode: Episode) -> torch.Tensor:
    """Logits [R, V] at the tokens of a response, by transformers' forward of the text alone."""
    ids = torch.tensor([prompt_ids + episode.response_ids])
    policy.model.config._attn_implementation = "sdpa"
    return policy.own_logits(ids)[0, len(prompt_ids) - 1 : -1]


def loss_by_definition(pair: nn.ModuleList, episodes: list[Episode], args: Args) -> torch.Tensor:
    student, teacher = pair
    losses = []
    for episode in episodes:
        teacher_prompt = episode.teacher_prompt_ids or episode.prompt_ids
        logits = plain_logits(student, episode.prompt_ids, episode) / args.rollout.temperature
        teacher_logits = plain_logits(teacher, teacher_prompt, episode) / (
            args.teacher_temperature or args.rollout.temperature
        )
        if args.estimator == "full":
            loss = definition(logits, teacher_logits, args.divergence, args.jsd_beta)
        else:
            at = torch.tensor(episode.response_ids)[:, None]
            logp = logits.log_softmax(-1).gather(-1, at)[:, 0]
            logq = teacher_logits.log_softmax(-1).gather(-1, at)[:, 0]
            loss = -(logq - logp).detach() * (logp - logp.detach()).exp()
        losses.append(loss[torch.tensor(episode.loss_mask) == 1])
    return torch.cat(losses).mean()


def packed_step(
    pair: nn.ModuleList, episodes: list[Episode], args: Args, tmp_path, attention: str, budget: int
):
    """The gradients of a step, its tokens, and its metrics."""
    for policy in pair:
        policy.attention = attention
        policy.model.config._attn_implementation = {"sdpa": "shared_prompts", "rows": "sdpa"}[
            attention
        ]
    index = TokenIndex(episodes)
    packer = Packer(attention, budget, tmp_path, WORLD)
    tokens = Tokens.of(episodes, index, WORLD.device)
    tokens = Tokens(*(x.double() if x.is_floating_point() else x for x in vars(tokens).values()))
    (minibatch,) = packer.minibatches(
        episodes,
        index,
        [list(range(len(episodes)))],
        with_teacher_prompts(episodes) if args.teacher_prompt_column else None,
    )
    if args.estimator == "sampled":
        packer.fill(
            tokens.teacher_logprobs,
            pair[1],
            [minibatch],
            args.teacher_temperature or args.rollout.temperature,
            of_teacher=True,
        )
    pair.zero_grad()
    means = backward(
        pair, minibatch, tokens, args, WORLD, first_epoch=True, store_old_logprobs=True
    )
    gradients = {name: p.grad.clone() for name, p in pair[0].named_parameters()}
    return gradients, tokens, means.reduce()


CASES = {
    "reverse": {},
    "forward": {"divergence": "forward-kl", "teacher_temperature": 0.5},
    "jsd": {"divergence": "jsd", "jsd_beta": 0.3},
    "sampled": {"estimator": "sampled"},
}


@pytest.mark.parametrize("own_prompts", [False, True], ids=["one prompt", "teacher's prompts"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_single_forwards(case, own_prompts, tmp_path):
    """Whatever the micro-batches: packs with shared prompts, of one group or of all; rows."""
    column = "hint" if own_prompts else None
    args = Args(rollout=Rollout(temperature=0.8), teacher_prompt_column=column, **CASES[case])
    episodes = some_episodes(own_prompts)
    pair = models()
    loss = loss_by_definition(pair, episodes, args)
    parameters = dict(pair[0].named_parameters())
    gradients = torch.autograd.grad(loss, parameters.values())
    expected = dict(zip(parameters, gradients))
    for attention, budget in (("sdpa", 64), ("sdpa", 8), ("rows", 20)):
        found, tokens, metrics = packed_step(pair, episodes, args, tmp_path, attention, budget)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)
        mean = tokens.divergences.mean().item()
        assert metrics["distill/divergence"] == pytest.approx(mean, abs=1e-12)
        if args.estimator == "full":
            assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_the_log_ratio_is_bounded(tmp_path):
    """Of tokens that the rollout found impossible: e^1000 would be inf."""
    episodes = some_episodes()
    index = TokenIndex(episodes)
    packer = Packer("sdpa", 64, tmp_path, WORLD)
    (minibatch,) = packer.minibatches(episodes, index, [list(range(len(episodes)))])
    tokens = Tokens.of(episodes, index, WORLD.device)
    tokens.old_logprobs = torch.full((len(index),), -1000.0)
    tokens.teacher_logprobs = torch.full((len(index),), -1.0)
    args = Args(estimator="sampled")
    means = backward(
        models(), minibatch, tokens, args, WORLD, first_epoch=True, store_old_logprobs=False
    )
    assert means.reduce()["policy/approx_kl"] == pytest.approx(math.exp(20) - 21, rel=1e-5)


def test_divergences_stand_at_their_tokens():
    episodes = some_episodes()
    index = TokenIndex(episodes)
    store_divergences(episodes, torch.arange(len(index), dtype=torch.float32))
    flat = []
    for episode in episodes:
        assert len(episode.divergences) == len(episode.response_ids)
        pairs = list(zip(episode.divergences, episode.loss_mask))
        assert all(value == 0 for value, mask in pairs if not mask)
        flat += [value for value, mask in pairs if mask]
    assert flat == list(range(len(index)))


def test_the_share_of_the_data_set_is_the_same_on_all_ranks():
    places = distill.data_places(40, 0.25, seed=3, step=7)
    assert len(places) == 10 and places <= set(range(40))
    assert distill.data_places(40, 0.25, seed=3, step=7) == places
    assert distill.data_places(40, 0.25, seed=3, step=8) != places
    assert distill.data_places(40, 0, 3, 7) == set()
    assert distill.data_places(40, 1, 3, 7) == set(range(40))


def test_what_a_step_draws_comes_from_streams_of_their_own(monkeypatch):
    """The prompts of the data set's responses, and the rotation of minibatches."""
    seeds = []

    def recorded(seed: list[int]) -> np.random.PCG64:
        seeds.append(tuple(seed))
        return pcg64(seed)

    pcg64 = np.random.PCG64
    monkeypatch.setattr(np.random, "PCG64", recorded)
    distill.data_places(40, 0.25, seed=3, step=7)
    distill.split_minibatches([], [], 1, seed=3, step=7)
    assert len(set(seeds)) == 2


def test_vocabularies_are_compared_id_by_id():
    words = {i: f"w{i}" for i in range(50)}
    check_same_tokens(words, dict(words), 64, 60, "--teacher T")
    other = words | {3: "x", 7: "y"}
    with pytest.raises(SystemExit) as error:
        check_same_tokens(words, other, 64, 60, "--teacher T")
    assert "2 token ids" in str(error.value) and "3: 'w3', 'x'; 7: 'w7', 'y'" in str(error.value)
    with pytest.raises(SystemExit, match="49: 'w49', None"):  # a row that the teacher lacks
        check_same_tokens(words, words, 64, 49, "--teacher T")
    with pytest.raises(SystemExit) as error:
        check_same_tokens(words, {i: f"w{(i + 2) % 50}" for i in range(50)}, 50, 50, "--teacher T")
    assert "another tokenizer altogether" in str(error.value)
    many = words | dict.fromkeys(range(24), "x")
    with pytest.raises(SystemExit) as error:
        check_same_tokens(words, many, 50, 50, "--teacher T")
    assert str(error.value).count("'x'") == 20


def test_a_teacher_reads_past_words_that_it_lacks():
    teacher = models()[1]
    num_words = len(teacher.model.get_output_embeddings().weight)
    episode = Episode(0, 0, [1, 2], [num_words + 3, 5, 6], [1] * 3, [0.0] * 3)
    (batch,) = pack([episode], [0], TokenIndex([episode]), budget=64)
    found, _ = teacher(batch)
    assert found[0] == MISSING_LOGPROB and found.isfinite().all()
    assert teacher(batch, as_teacher=True).hidden.isfinite().all()


def test_missing_words_of_a_teacher_are_as_good_as_impossible(tmp_path):
    pair = models()
    batch = Packer("sdpa", 64, tmp_path, WORLD)
    episodes = some_episodes()
    index = TokenIndex(episodes)
    (minibatch,) = batch.minibatches(episodes, index, [list(range(4))])
    (micro_batch,) = minibatch.micro_batches
    num_words = pair[1].model.get_output_embeddings().weight.shape[0]
    expected, _ = pair[1](micro_batch)
    beyond = replace(micro_batch, targets=micro_batch.targets.clone())
    beyond.targets[2] = num_words + 3
    found, _ = pair[1](beyond)
    assert found[2] == MISSING_LOGPROB and math.isfinite(found.sum())
    others = [i for i in range(len(found)) if i != 2]
    torch.testing.assert_close(found[others], expected[others])


def test_a_response_of_the_data_is_left_out_where_a_row_cannot_be_read():
    """Whichever row: the student's (1) or its teacher's (2). Of 3 the teacher's cannot be read, and
    the response was sampled."""

    def row(index: int, *, is_bad: bool) -> Row:
        problem = "a picture is gone" if is_bad else ""
        return Row(index, "", "", None, {}, [1], problem=problem)

    def episode(place: int, finish_reason: str) -> Episode:
        return Episode(place, 0, [1], [2], [1], [0.0], finish_reason=finish_reason)

    rollouts = SimpleNamespace(
        draw=lambda count: {place: row(place, is_bad=place == 1) for place in range(count)},
        sample=lambda prompts, step, watch: [episode(place, "stop") for place in prompts],
        score=lambda episodes, prompts: None,
    )
    responses = SimpleNamespace(episode=lambda place, row, max_tokens: episode(place, "data"))
    teacher = SimpleNamespace(usable_row=lambda index: row(index, is_bad=index in (2, 3)))
    args = make_args(distill, prompts_per_step=4, data_share=0.75)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "data_places", lambda *_: {0, 1, 2})
        episodes = distill.collect(rollouts, args, responses, teacher, 0, Stopwatch())
    found = {episode.prompt_index: episode.finish_reason for episode in episodes}
    assert found == {0: "data", 3: "unreadable"}
