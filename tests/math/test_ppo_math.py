"""The mathematics of ppo.py against independent definitions, closed forms and finite differences,
in float64."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from episodes import random_episodes
from helpers import ROOT, checked_args, make_args, random_policy, relative_l2, run_script

import ppo
from common.distributed import World
from common.hub import FOLDERS
from common.metrics import explained_variance, rollout_means, rollout_metrics
from common.packing import Layout, Minibatch, TokenIndex, pack
from common.pictures import PixelLimits
from common.types import Episode
from ppo import Critic

ALONE = World(0, 1, 0, torch.device("cpu"))


def random_pair(size: int, seed: int) -> torch.Tensor:
    """Two rows of normal numbers, [2, size] float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, size, dtype=torch.float64, generator=generator)


def episode(prompt: int, mask: list[int], score: float = 0.0) -> Episode:
    ids = list(range(3, 3 + len(mask)))
    logprobs = [-0.5 * m for m in mask]
    return Episode(prompt, 0, [1, 2], ids, mask, logprobs, "stop", {"score": score})


# --- rewards --------------------------------------------------------------------------------------


def test_the_score_stands_at_the_last_trained_token():
    episodes = [
        episode(0, [1, 1, 0, 0, 1, 1, 0]),  # ends with an observation
        episode(1, [0, 0]),  # nothing is trained: its score belongs to no token
        episode(2, [1]),
    ]
    rewards = ppo.token_rewards(torch.tensor([1.0, 7.0, 0.125]), TokenIndex(episodes), episodes)
    assert rewards.tolist() == [0.0, 0.0, 0.0, 1.0, 0.125]


def test_a_reward_of_an_environment_stands_at_the_last_token_of_its_turn():
    episodes = [episode(0, [1, 1, 0, 1, 1]), episode(1, [0, 0]), episode(2, [1, 1])]
    # (sampled tokens before it, reward)
    episodes[0].turn_rewards = [(2, 0.5), (4, 0.25)]
    episodes[1].turn_rewards = [(0, 9.0)]
    episodes[2].turn_rewards = [(1, -1.0)]
    rewards = ppo.token_rewards(torch.tensor([1.0, 7.0, 3.0]), TokenIndex(episodes), episodes)
    assert rewards.tolist() == [0.0, 0.5, 0.0, 1.25, -1.0, 3.0]


# --- GAE ------------------------------------------------------------------------------------------


def gae_by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """arXiv 1506.02438 eq. 14: the exponentially weighted mean of all k-step estimates, each
    written out. O(T^3)."""
    T = len(rewards)
    result = []
    for t in range(T):
        # of k = 1, 2, ... steps; from the end of the episode on they are all the same
        estimates = []
        for k in range(1, T - t + 1):
            bootstrap = gamma**k * values[t + k] if t + k < T else 0.0
            discounted = sum(gamma**i * rewards[t + i] for i in range(k))
            estimates.append(-values[t] + discounted + bootstrap)
        last = len(estimates) - 1
        weights = [(1 - lam) * lam**k for k in range(last)]
        weights.append(lam**last)
        result.append(sum(w * e for w, e in zip(weights, estimates)))
    return result


@pytest.mark.parametrize(
    "gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.5, 1.0)]
)
def test_gae_is_its_definition_over_the_trained_tokens(gamma, lam):
    episodes = random_episodes(0, prompts=5)
    index = TokenIndex(episodes)
    rewards, values = random_pair(len(index), seed=0)
    expected = []
    for i in range(len(episodes)):
        part = slice(index.offsets[i], index.offsets[i + 1])
        expected += gae_by_definition(rewards[part].tolist(), values[part].tolist(), gamma, lam)
    advantages = ppo.gae(rewards, values, index, gamma, lam)
    assert (advantages - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12
    lam_of_episode = torch.full((len(episodes),), lam, dtype=torch.float64)
    assert torch.equal(ppo.gae(rewards, values, index, gamma, lam_of_episode), advantages)


def test_each_episode_has_its_own_lambda():
    episodes = [episode(i, [1] * 4) for i in range(2)]
    index = TokenIndex(episodes)
    rewards, values = random_pair(8, seed=1)
    both = ppo.gae(rewards, values, index, 0.9, torch.tensor([0.2, 0.8]))
    for tokens, lam in ((slice(0, 4), 0.2), (slice(4, 8), 0.8)):
        alone = gae_by_definition(rewards[tokens].tolist(), values[tokens].tolist(), 0.9, lam)
        # in `both` 0.2 and 0.8 are float32
        assert both[tokens].tolist() == pytest.approx(alone, abs=1e-7)


def test_observations_are_passed_over():
    """The same tokens with and without observations between them have the same advantages."""
    with_tools = [episode(0, [1, 0, 0, 1, 1, 0, 1])]
    without = [episode(0, [1, 1, 1, 1])]
    rewards, values = random_pair(4, seed=2)
    advantages = ppo.gae(rewards, values, TokenIndex(with_tools), 0.9, 0.8)
    assert torch.equal(advantages, ppo.gae(rewards, values, TokenIndex(without), 0.9, 0.8))


def test_with_gamma_and_lambda_1_the_return_is_what_is_still_to_come():
    episodes = random_episodes(3)
    index = TokenIndex(episodes)
    rewards, values = random_pair(len(index), seed=3)
    returns = values + ppo.gae(rewards, values, index, 1.0, 1.0)
    for i in range(len(episodes)):
        part = slice(index.offsets[i], index.offsets[i + 1])
        to_come = rewards[part].flip(0).cumsum(0).flip(0)
        assert torch.allclose(returns[part], to_come, atol=1e-12)


def test_gae_of_no_tokens():
    index = TokenIndex([episode(0, [0, 0])])
    assert len(ppo.gae(torch.zeros(0), torch.zeros(0), index, 1.0, 0.9)) == 0
    assert len(ppo.gae(torch.zeros(0), torch.zeros(0), TokenIndex([]), 1.0, 0.9)) == 0


# --- whitening ------------------------------------------------------------------------------------


def test_whitened_has_mean_0_and_unbiased_variance_1():
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(57, dtype=torch.float64, generator=generator) * 3 + 5
    white = ppo.whitened(values)
    assert white.mean().abs() < 1e-12
    assert white.var() == pytest.approx(1.0, abs=1e-8)
    assert torch.allclose(white, (values - values.mean()) / values.std(), atol=1e-7)


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 8])
def test_what_does_not_vary_is_0_after_whitening(values):
    assert ppo.whitened(torch.tensor(values)).abs().sum() < 1e-6


# --- returns and advantages -----------------------------------------------------------------------


def test_returns_are_plain_and_advantages_have_a_lambda():
    """The critic's targets are the discounted sums of what comes, whatever the values say."""
    episodes = [episode(i, [1] * length) for i, length in enumerate((1, 3, 8))]
    index = TokenIndex(episodes)
    rewards, values = random_pair(12, seed=5)
    args = make_args(ppo, gamma=0.9, gae_lambda=0.7)
    returns, advantages = ppo.returns_and_advantages(rewards, values, index, args)
    expected_returns = []
    expected_advantages = []
    for i in range(len(episodes)):
        part = slice(index.offsets[i], index.offsets[i + 1])
        rewards_of_episode = rewards[part].tolist()
        values_of_episode = values[part].tolist()
        expected_advantages += gae_by_definition(rewards_of_episode, values_of_episode, 0.9, 0.7)
        for t in range(len(rewards_of_episode)):
            to_come = rewards_of_episode[t:]
            expected_returns.append(sum(r * 0.9**k for k, r in enumerate(to_come)))
    expected_returns = torch.tensor(expected_returns, dtype=torch.float64)
    assert torch.allclose(returns, expected_returns, rtol=0, atol=1e-12)
    white = ppo.whitened(torch.tensor(expected_advantages, dtype=torch.float64))
    assert torch.allclose(advantages, white, rtol=0, atol=1e-12)


# --- value loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, old, target, loss, clipped, slope",
    [
        (0.5, 0.4, 1.0, 0.125, False, -0.5),  # inside: (V - R)^2 / 2
        # closer to the target than allowed: judged at 0.2, no gradient
        (0.9, 0.0, 1.0, 0.5 * 0.64, True, 0.0),
        (-0.9, 0.0, 1.0, 0.5 * 1.9**2, False, -1.9),  # moved away: full loss and gradient
        # overshot: what is worse counts, here the value itself
        (0.9, 0.0, 0.5, 0.5 * 0.16, False, 0.4),
        (0.2, 0.2, 0.2, 0.0, False, 0.0),
    ],
)
def test_value_loss_by_hand(value, old, target, loss, clipped, slope):
    value = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([old], dtype=torch.float64)
    target = torch.tensor([target], dtype=torch.float64)
    value_loss, is_clipped = ppo.value_loss(value, old, target, 0.2)
    (gradient,) = torch.autograd.grad(value_loss.sum(), value)
    assert value_loss.item() == pytest.approx(loss, abs=1e-12)
    assert is_clipped.item() == clipped
    assert gradient.item() == pytest.approx(slope, abs=1e-12)


def test_a_value_inside_the_range_is_not_clipped():
    """old + (v - old) is not v in float32: where that rounds, v counted as clipped."""
    generator = torch.Generator().manual_seed(0)
    values, old, target = torch.randn(3, 4096, generator=generator).clamp(-2.4, 2.4) / 10
    assert not ppo.value_loss(values, old, target, 0.5)[1].any()
    assert ppo.value_loss(old + 2, old, old + 3, 0.5)[1].all()


def test_value_loss_without_clip_is_half_the_square():
    generator = torch.Generator().manual_seed(5)
    v, old, target = torch.randn(3, 9, dtype=torch.float64, generator=generator)
    loss, clipped = ppo.value_loss(v, old, target, 0.0)
    assert torch.equal(loss, 0.5 * (v - target).square())
    assert not clipped.any()


# --- metrics --------------------------------------------------------------------------------------


def test_explained_variance_is_that_of_its_definition():
    values, returns = torch.randn(2, 50, generator=torch.Generator().manual_seed(6)) + 3
    expected = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert explained_variance(values, returns) == pytest.approx(expected.item(), abs=1e-5)
    assert explained_variance(returns, returns) == 1.0
    assert math.isnan(explained_variance(values, torch.ones(50)))
    assert math.isnan(explained_variance(values[:0], returns[:0])), "a step that trains nothing"


@pytest.mark.parametrize("samples, share", [(1, None), (2, 0.5)])
def test_groups_of_one_have_no_variance_to_report(samples, share):
    episodes = []
    for prompt in (0, 1):
        for sample in range(samples):
            score = 1.0 if sample == prompt == 1 else 0.0
            episodes.append(episode(prompt, [1], score))
    metrics = rollout_metrics(rollout_means(episodes, {}).reduce())
    assert metrics.get("reward/zero_variance_groups") == share


# --- the critic -----------------------------------------------------------------------------------


def make_critic(config, seed: int = 0) -> Critic:
    """With a head that is not zero: a gradient through a zero head does not reach the backbone."""
    critic = Critic(random_policy(config, seed=seed).model.base_model, "sdpa")
    torch.nn.init.normal_(critic.head, generator=torch.Generator().manual_seed(seed))
    return critic


def test_the_critic_is_zero_at_first_and_has_a_head_of_its_own(tiny_config):
    critic = Critic(random_policy(tiny_config).model.base_model, "sdpa")
    episodes = random_episodes(6)
    (batch,) = pack(episodes, range(len(episodes)), TokenIndex(episodes), budget=10_000)
    values = critic(batch)
    assert not values.any()
    assert values.dtype == torch.float64
    values.sum().backward()
    assert critic.head.grad.any(), "it learns"


def test_a_value_is_read_at_the_token_before(tiny_config):
    """The value of a token must not change with the token itself, nor with any later one."""
    critic = make_critic(tiny_config)
    ids = [5, 6, 7, 8]

    def values(response: list[int]) -> list[float]:
        one = [Episode(0, 0, [3, 4], response, [1] * 4, [0.0] * 4, "stop")]
        (batch,) = pack(one, [0], TokenIndex(one), budget=100)
        return critic(batch).tolist()

    before = values(ids)
    for changed in range(4):
        after = values([*ids[:changed], 20, *ids[changed + 1 :]])
        assert after[: changed + 1] == pytest.approx(before[: changed + 1], abs=1e-12)
        assert all(abs(a - b) > 1e-6 for a, b in zip(after[changed + 1 :], before[changed + 1 :]))


@pytest.fixture(scope="module")
def case(tiny_config):
    critic = make_critic(tiny_config)
    episodes = random_episodes(8)
    index = TokenIndex(episodes)
    generator = torch.Generator().manual_seed(7)
    old, returns = torch.randn(2, len(index), dtype=torch.float64, generator=generator)
    lengths = index.lengths[index.episode_of_token].double()
    nothing = torch.full_like(old, math.nan)
    tokens = ppo.Tokens(
        index.episode_of_token, lengths, nothing, nothing, nothing, nothing, old, returns
    )
    return critic, episodes, index, tokens


def gradient(
    case, args, budget: int, order: int = 1, world: World = ALONE, scale: float = 1.0, **options
):
    critic, episodes, index, tokens = case
    critic.zero_grad()
    batches = pack(episodes, range(len(episodes))[::order], index, budget=budget, **options)
    minibatch = Minibatch([], float(len(index)), float((index.lengths > 0).sum()), batches)
    means = ppo.critic_backward(critic, minibatch, tokens, args, world, scale=scale)
    assert means.counts == {"value/clip_fraction": len(index), "value/loss": 1}
    assert means.totals == {}
    sums = [float(means.sums["value/loss"]) / world.size, float(means.sums["value/clip_fraction"])]
    return sums, [p.grad.clone() for p in critic.parameters()]


@pytest.mark.parametrize("reduction", ["dapo", "grpo", "dr_grpo"])
def test_the_critics_gradient_is_that_of_the_dense_loss_however_it_is_split(case, reduction):
    critic, episodes, index, tokens = case
    args = make_args(ppo, reduction=reduction, max_response_tokens=20)
    critic.zero_grad()
    critic.model.set_attn_implementation("sdpa")
    total = 0.0
    num_sequences = int((index.lengths > 0).sum())
    for i, e in enumerate(episodes):  # one by one, transformers' own forward
        hidden = critic.model(torch.tensor([e.prompt_ids + e.response_ids])).last_hidden_state[0]
        places = [t for t, m in enumerate(e.loss_mask, start=len(e.prompt_ids)) if m]
        part = slice(index.offsets[i], index.offsets[i + 1])
        old_values = tokens.values[part]
        returns = tokens.returns[part]
        values = hidden[[t - 1 for t in places]] @ critic.head
        clipped = old_values + (values - old_values).clamp(-0.5, 0.5)
        loss = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum()
        size = {
            "dapo": len(index),
            "grpo": max(len(places), 1) * num_sequences,
            "dr_grpo": 20 * num_sequences,
        }
        total = total + loss / size[reduction]
    total.backward()
    reference = [p.grad.clone() for p in critic.parameters()]
    critic.model.set_attn_implementation("shared_prompts")
    for budget, order, share in itertools.product((1, 45, 10_000), (1, -1), (True, False)):
        layout = Layout(share_prompts=share)
        sums, gradients = gradient(case, args, budget, order, layout=layout)
        assert relative_l2(gradients, reference) < 1e-10, (budget, order, share)
        assert sums[0] == pytest.approx(total.item(), rel=1e-5)


@pytest.mark.parametrize("reduction", ["dapo", "grpo", "dr_grpo"])
def test_the_critics_denominator_is_that_of_all_ranks(case, reduction):
    critic, episodes, index, tokens = case
    gradients = []
    # more than this rank has
    for num_tokens, num_sequences in ((150.0, 17.0), (300.0, 34.0)):
        critic.zero_grad()
        batches = pack(episodes, range(12), index, budget=100)
        minibatch = Minibatch([], num_tokens, num_sequences, batches)
        ppo.critic_backward(critic, minibatch, tokens, make_args(ppo, reduction=reduction), ALONE)
        gradients.append([p.grad.clone() for p in critic.parameters()])
    assert relative_l2([2 * g for g in gradients[1]], gradients[0]) < 1e-12


def test_ranks_and_loss_scale_multiply_the_critics_gradient_alone(case):
    args = make_args(ppo)
    four_ranks = World(0, 4, 0, torch.device("cpu"))
    sums, once = gradient(case, args, 100)
    sums_of_four, scaled = gradient(case, args, 100, world=four_ranks, scale=8.0)
    assert sums_of_four == pytest.approx(sums, rel=1e-6)
    assert relative_l2([g / 32 for g in scaled], once) < 1e-12


def test_the_critics_gradient_by_finite_differences(case):
    critic, episodes, index, tokens = case
    args = make_args(ppo, value_clip=0.0)
    _, gradients = gradient(case, args, 10_000)
    direction = [torch.randn_like(p) for p in critic.parameters()]
    slope = sum((g * d).sum() for g, d in zip(gradients, direction)).item()
    (batch,) = pack(episodes, range(len(episodes)), index, budget=10_000)

    @torch.no_grad()
    def loss_after_move(step: float) -> float:
        for parameter, d in zip(critic.parameters(), direction):
            parameter.add_(step * d)
        values = critic(batch)[batch.token_index.argsort()]
        return (0.5 * (values - tokens.returns).square()).mean().item()

    h = 1e-6
    ahead = loss_after_move(h)
    behind = loss_after_move(-2 * h)
    loss_after_move(h)  # back to where it was
    assert (ahead - behind) / (2 * h) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    "ranks, strategy",
    [
        (1, "fsdp"),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
    ],
)
def test_the_critic_finds_values_that_are_known(ranks, strategy):
    done = run_script(ROOT / "tests" / "workers" / "critic.py", "--strategy", strategy, ranks=ranks)
    errors = json.loads(done.stdout.strip().splitlines()[-1])
    assert errors["at the start"] == 0.0, "V = 0 everywhere"
    assert errors["at the end"] < 0.02


# --- check_args -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--minibatches 1 --value-clip 0.2",
            "--value-clip 0.2 has no effect: needs several",
        ),
        (
            "--reward-model-weight 2",
            "--reward-model-weight 2.0 has no effect: needs --reward-model",
        ),
        (
            "--kl-reward-coef 0.01 --kl-estimator k3",
            "--kl-estimator k3 has no effect: needs a --kl-loss-coef",
        ),
        ("--gamma 1.5", "--gamma 1.5: must not be above 1"),
        ("--gae-lambda 1.1", "--gae-lambda 1.1: must not be above 1"),
        ("--eval-only --critic-model tiny", "--critic-model tiny has no effect: needs training"),
        ("--eval-only --reward-model x", "--reward-model x has no effect: needs training"),
        ("--minibatches 64 --prompts-per-step 32", "--minibatches 64 of --prompts-per-step 32"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(flags, message, monkeypatch):
    with pytest.raises(SystemExit) as refusal:
        checked_args(ppo, monkeypatch, *flags.split())
    assert str(refusal.value).startswith(message)


def test_a_critic_reads_what_the_policy_reads():
    def policy(name: str, vision=None):
        return SimpleNamespace(
            machine=ppo.Args().machine,
            limits=PixelLimits(3136, 12544, 12544),
            vision=vision,
            tokenizer=ppo.load_tokenizer(str(FOLDERS[name])),
            model_folder=str(FOLDERS[name]),
        )

    assert ppo.resolve_critic(policy("tiny"), "tiny") == str(FOLDERS["tiny"])
    with pytest.raises(
        SystemExit, match="--critic-model tiny-vl: its tokenizer is not the policy's"
    ):
        ppo.resolve_critic(policy("tiny"), "tiny-vl")
    message = "--critic-model tiny-vl: only one of policy and critic reads pictures"
    with pytest.raises(SystemExit, match=message):
        ppo.resolve_critic(policy("tiny-vl"), "tiny-vl")
    same = SimpleNamespace(model_type="qwen2_5_vl")
    folder = ppo.resolve_critic(policy("tiny-vl", vision=same), "tiny-vl")
    assert folder == str(FOLDERS["tiny-vl"])
    message = "tiny-vl: qwen2_5_vl reads pictures in another way than the policy, qwen3_vl"
    other = SimpleNamespace(model_type="qwen3_vl")
    with pytest.raises(SystemExit, match=message):
        ppo.resolve_critic(policy("tiny-vl", vision=other), "tiny-vl")


def test_kl_in_the_reward_is_allowed_with_one_sample_per_prompt(monkeypatch):
    args = checked_args(ppo, monkeypatch, "--kl-reward-coef", "0.01", "--samples-per-prompt", "1")
    assert (args.kl_reward_coef, args.rollout.samples_per_prompt) == (0.01, 1)


# --- metrics --------------------------------------------------------------------------------------


def test_a_component_of_a_reward_function_is_not_taken_for_the_reward_models():
    for component in (7.0, "judge"):
        rewards = {"score": 0.0, "reward_model": component}
        episode = Episode(0, 0, [1], [2], [1], [0.0], "stop", rewards=rewards)
        assert "reward/model_mean" not in rollout_means([episode], {}).reduce()
        episode.model_reward = 2.5
        assert rollout_means([episode], {}).reduce()["reward/model_mean"] == 2.5


def test_a_critic_reads_past_words_that_it_lacks(tiny_config):
    """The padding at the end of the policy's vocabulary, which the engine may sample."""
    critic = Critic(random_policy(tiny_config).model.base_model, "sdpa")
    num_words = critic.model.get_input_embeddings().weight.shape[0]
    episode = Episode(0, 0, [1, 2], [num_words + 3, 5, 6], [1] * 3, [0.0] * 3)
    (batch,) = pack([episode], [0], TokenIndex([episode]), budget=64)
    assert critic(batch).isfinite().all()
