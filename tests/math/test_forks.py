"""The patches of docs/forks: each applies to its script as it is, is clean, computes what its paper
says, and has one denominator.

A formula is compared with its definition, case by case or by enumeration, in float64.
"""

import inspect
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys

import pytest
import torch
from episodes import random_episodes
from forks import FLAGS, FOLDER, apply_fork, hunks_of, load_fork, patch_of, script_of
from helpers import ROOT, make_args, random_policy, relative_l2, run_script
from reference import check_policy_loss, dense_pass, group_advantages, made_up_columns

import ppo
from common.distributed import World
from common.packing import Minibatch, TokenIndex, pack
from common.teacher import Predictor
from common.types import Episode

WORKER = ROOT / "tests" / "workers" / "gradients.py"
NAMES = sorted(path.stem for path in FOLDER.glob("*.patch"))
LONG = {"replay": 120}  # changed lines that a patch may have; the others 60
WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """NAME/SCRIPT of each fork; a patch that does not apply fails its own tests alone."""
    folder = tmp_path_factory.mktemp("forks")
    for name in NAMES:
        try:
            apply_fork(name, folder)
        except AssertionError:
            (folder / name / script_of(name)).unlink()
    return folder


@pytest.fixture
def load(folder):
    return lambda name: sys.modules.get(module_name(name)) or load_fork(name, folder)


def module_name(name: str) -> str:
    return f"fork_{name.replace('-', '_')}"


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the patches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_applies_to_its_script(name, tmp_path):
    apply_fork(name, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_is_short(name):
    changed = re.findall(r"^[-+](?![-+]{2} )", patch_of(name), flags=re.MULTILINE)
    assert len(changed) <= LONG.get(name, 60)


def test_a_patch_that_does_not_apply_says_which_hunk(tmp_path):
    text = (ROOT / "grpo.py").read_text().replace("def engine_correction(", "def correction(")
    with pytest.raises(AssertionError) as error:
        apply_fork("sapo", tmp_path, text)
    (number,) = [i for i, hunk in enumerate(hunks_of("sapo"), 1) if "def sapo_loss" in hunk]
    message = str(error.value)
    assert "docs/forks/sapo.patch no longer applies to grpo.py" in message
    assert f"hunk {number} of {len(hunks_of('sapo'))}, in or after `def cispo_loss(`" in message
    assert "def engine_correction(" in message and message.count("hunk ") == 1


def test_patched_scripts_are_clean(folder):
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            ["ruff", *command, "--config", ROOT / "pyproject.toml", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_new_flag_has_its_help(name, folder):
    """A comment behind it or above it, from which tyro makes the help."""
    lines = (folder / name / script_of(name)).read_text().splitlines()
    new_fields = re.findall(r"^\+    (\w+): [^=(]+(?:\[.*\])? = .*$", patch_of(name), flags=re.M)
    for field in new_fields:
        (place,) = [i for i, line in enumerate(lines) if line.startswith(f"    {field}: ")]
        has_comment = "  # " in lines[place] or lines[place - 1].startswith("    # ")
        assert has_comment, f"--{field}"


@pytest.mark.parametrize(
    "name, typed, flags, needs",
    [
        ("sapo", "--sapo-temperatures", {}, "needs --objective sapo"),
        ("sapo", "--clip-low", {"objective": "sapo", "minibatches": 2}, "than sapo"),
        ("dppo", "--max-shift", {}, "needs --objective dppo"),
        ("dppo", "--clip-high", {"objective": "dppo", "minibatches": 2}, "than dppo"),
        ("dppo", "--correction", {"objective": "dppo", "correction": "mask"}, "than dppo"),
        ("drpo", "--trust-radius", {}, "needs --objective drpo"),
        ("pass-at-k", "--advantage", {"pass_at": 4}, "needs --pass-at 1"),
        ("pass-at-k", "--pass-at", {"pass_at": 8}, "must be below --samples-per-prompt"),
        ("gdpo", "--advantage", {"separate_rewards": "a,b"}, "needs no --separate-rewards"),
        ("wapo", "--dual-clip", {"advantage": "winner", "minibatches": 2}, "negative advantages"),
        ("maxrl", "--advantage", {"advantage": "maxrl", "overlong_buffer": 9}, "divides by"),
        ("vapo", "--gae-lambda", {"length_alpha": 0.05}, "needs no --length-alpha"),
        ("adaptive-kl", "--kl-target", {}, "needs a --kl-reward-coef"),
        ("adaptive-kl", "--kl-horizon", {"kl_reward_coef": 0.1}, "needs a --kl-target"),
        ("distill-reward", "--reward-coef", {"reward_coef": 1.0}, "no group"),
        (
            "distill-reward",
            "--reward-coef",
            {"reward_coef": 1.0, "samples_per_prompt": 4},
            "needs --estimator sampled",
        ),
        ("replay", "--replay-age", {}, "needs a --replay-share"),
    ],
)
def test_a_flag_without_effect_is_refused(name, typed, flags, needs, load, monkeypatch):
    script = load(name)
    monkeypatch.setattr(sys, "argv", [script_of(name), typed, "X"])
    extra = {"teacher": "x"} if script_of(name) == "distill.py" else {}
    with pytest.raises(SystemExit, match=re.escape(needs)):
        script.check_args(make_args(script, **flags, **extra))


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_has_its_row_on_the_page(name):
    rows = re.findall(rf"^\| \[`{name}`\].*$", (ROOT / "docs" / "forks.md").read_text(), flags=re.M)
    assert len(rows) == 1 and script_of(name) in rows[0]


@pytest.mark.slow  # by default test_invariance.py splits the scripts that are patched
def test_gradients_do_not_depend_on_the_split(folder, tmp_path):
    """Of all forks in one launch: two ranks, micro-batches of 45 tokens."""
    assert sorted(FLAGS) == NAMES
    run_script(WORKER, "--folder", tmp_path, "--forks", folder, "--single")
    done = run_script(WORKER, "--folder", tmp_path, "--forks", folder, "--one", ranks=2)
    distances = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(distances) == len(NAMES)
    worst = max(distances, key=distances.get)
    assert distances[worst] < 1e-10, f"{worst}: {distances[worst]:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_do_not_depend_on_any_split(ranks, folder, tmp_path):
    run_script(WORKER, "--folder", tmp_path, "--forks", folder, "--single")
    done = run_script(WORKER, "--folder", tmp_path, "--forks", folder, ranks=ranks)
    distances = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(distances) == 2 * 2 * 2 * 5 * len(NAMES)
    worst = max(distances, key=distances.get)
    assert distances[worst] < 1e-10, f"{worst}: {distances[worst]:.2g}"


# --- objectives -----------------------------------------------------------------------------------


def test_gmpo_is_the_geometric_mean_of_clipped_ratios(load):
    """-A times the L-th root of the product of min(r, e^high) where A > 0, of max(r, e^-low) where
    A < 0; a token that is not clipped has 1 / L of its sequence's slope."""
    script = load("gmpo")
    low, high = 0.1, 0.23
    args = make_args(
        script, objective="gmpo", reduction="grpo", clip_low=low, clip_high=high, dual_clip=0.0
    )
    columns = made_up_columns()
    tensors = {name: double(column) for name, column in columns.items()}
    episodes = torch.tensor(columns["episode_of_token"])
    logprobs = tensors["logprobs"].requires_grad_()
    nothing = torch.full_like(episodes, math.nan, dtype=torch.float64)
    tokens = script.Tokens(
        episodes, nothing, nothing, tensors["old_logprobs"], nothing, tensors["advantages"]
    )
    loss, clipped = script.policy_loss(logprobs, torch.zeros_like(nothing), tokens, args)
    (slopes,) = torch.autograd.grad(loss.sum(), logprobs)
    for i, episode in enumerate(columns["episode_of_token"]):
        advantage = columns["advantages"][i]
        product, length, is_clipped = 1.0, 0, False
        for j, other in enumerate(columns["episode_of_token"]):
            if other == episode:
                ratio = math.exp(columns["logprobs"][j] - columns["old_logprobs"][j])
                bounded = ratio
                if advantage > 0:
                    bounded = min(ratio, math.exp(high))
                elif advantage < 0:
                    bounded = max(ratio, math.exp(-low))
                product *= bounded
                length += 1
                if j == i:
                    is_clipped = bounded != ratio
        value = -advantage * product ** (1 / length)
        assert loss[i].item() == pytest.approx(value, rel=1e-10)
        # the values of all L tokens of the sequence have a slope by this one, of 1 / L each
        assert slopes[i].item() == pytest.approx(0.0 if is_clipped else value, rel=1e-10)
        assert bool(clipped[i]) == is_clipped
    assert clipped.any() and not clipped.all()


def test_gmpo_has_defaults_of_its_own(load, monkeypatch):
    script = load("gmpo")
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--clip-low", "0.3"])
    args = script.with_gspo_defaults(make_args(script, objective="gmpo", clip_low=0.3))
    assert (args.clip_low, args.clip_high, args.reduction) == (0.3, 0.4, "grpo")
    args = script.with_gspo_defaults(make_args(script, objective="gspo"))
    assert (args.clip_low, args.clip_high, args.reduction) == (0.2, 4e-4, "grpo")


def test_sapo_is_a_sigmoid_gate(load):
    def gated(ratio, advantage, logprob, args):
        t = args.sapo_temperatures[0] if advantage > 0 else args.sapo_temperatures[1]
        sigmoid = 1 / (1 + math.exp(-t * (ratio - 1)))
        slope = -advantage * 4 * sigmoid * (1 - sigmoid) * ratio
        return -advantage * 4 / t * sigmoid, slope, False

    script = load("sapo")
    args = make_args(
        script, objective="sapo", sapo_temperatures=(0.7, 1.6), entropy_coef=0.1, kl_loss_coef=0.2
    )
    check_policy_loss(script, args, gated)


MAX_SHIFT = 0.002


def test_dppo_masks_what_has_moved_far_and_goes_on(load):
    """Far from the probability with which the engine sampled it; the trainer's at that time does
    not count."""
    script = load("dppo")
    args = make_args(script, objective="dppo", max_shift=MAX_SHIFT)
    columns = made_up_columns()
    tensors = {name: double(column) for name, column in columns.items()}
    logprobs = tensors["logprobs"].requires_grad_()
    nothing = torch.full_like(logprobs, math.nan)
    tokens = script.Tokens(
        torch.tensor(columns["episode_of_token"]),
        nothing,
        tensors["rollout_logprobs"],
        nothing,
        nothing,
        tensors["advantages"],
    )
    loss, masked = script.policy_loss(logprobs, torch.zeros_like(nothing), tokens, args)
    (slopes,) = torch.autograd.grad(loss.sum(), logprobs)
    counts = [0, 0]
    for i, advantage in enumerate(columns["advantages"]):
        p, p_rollout = math.exp(columns["logprobs"][i]), math.exp(columns["rollout_logprobs"][i])
        shift = p - p_rollout
        is_masked = (advantage > 0 and shift > MAX_SHIFT) or (advantage < 0 and shift < -MAX_SHIFT)
        value = 0.0 if is_masked else -advantage * p / p_rollout
        assert loss[i].item() == pytest.approx(value, rel=1e-10, abs=1e-12)
        assert slopes[i].item() == pytest.approx(value, rel=1e-10, abs=1e-12)
        assert bool(masked[i]) == is_masked
        counts[is_masked] += 1
    assert min(counts) > 10


def test_dppo_has_an_effect_with_one_minibatch(load, monkeypatch):
    script = load("dppo")
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--objective", "dppo", "--max-shift", "0.1"])
    script.check_args(make_args(script, objective="dppo", max_shift=0.1))


def test_drpo_pulls_back_what_has_moved_far(load):
    def pulled(ratio, advantage, logprob, args):
        p, p_old = math.exp(logprob), math.exp(logprob) / ratio
        loss = -advantage * ratio + abs(advantage) * (p - p_old) ** 2 / p_old / (2 * MAX_SHIFT)
        sign = (advantage > 0) - (advantage < 0)
        slope = -advantage * ratio * (1 - sign * (p - p_old) / MAX_SHIFT)
        is_pulled = sign * (p - p_old) > MAX_SHIFT
        counts[is_pulled] += 1
        return loss, slope, is_pulled

    script, counts = load("drpo"), [0, 0]
    check_policy_loss(script, make_args(script, objective="drpo", trust_radius=MAX_SHIFT), pulled)
    assert min(counts) > 10


# --- advantages -----------------------------------------------------------------------------------


def ragged_groups(seed: int) -> tuple[list[float], list[int]]:
    """Scores of 0 or more in groups of 1 to 6, members apart from each other; one group has 0."""
    rng = random.Random(seed)
    episodes = [(abs(rng.gauss(0, 1)) * (g != 2), 3 * g) for g in range(6) for _ in range(g + 1)]
    rng.shuffle(episodes)
    scores, groups = zip(*episodes)
    return list(scores), list(groups)


def test_maxrl_divides_by_the_mean(load):
    scores, groups = ragged_groups(0)
    found = load("maxrl").group_advantages(double(scores), torch.tensor(groups), "maxrl")
    for score, group, advantage in zip(scores, groups, found.tolist()):
        mean = statistics.fmean(s for s, g in zip(scores, groups) if g == group)
        expected = (score - mean) / mean if mean else 0.0
        assert advantage == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("p", [0.1, 0.7])
def test_maxrl_is_the_gradient_of_the_likelihood_up_to_an_order(p, load):
    """Of the probability p of a right answer, over all outcomes of a group of G: by p, log p =
    -sum of (1 - p)^k / k has the derivative sum of (1 - p)^(k - 1), up to k = G - 1."""
    script, size = load("maxrl"), 5
    slopes = {"maxrl": 0.0, "group-mean": 0.0}
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        probability = math.prod(p if right else 1 - p for right in outcome)
        by_p = double([1 / p if right else -1 / (1 - p) for right in outcome])  # of log-probs
        for advantage in slopes:
            groups = torch.zeros(size, dtype=torch.int64)
            advantages = script.group_advantages(double(outcome), groups, advantage)
            slopes[advantage] += probability * (advantages * by_p).mean().item()
    expected = sum((1 - p) ** (k - 1) for k in range(1, size))
    assert slopes["maxrl"] == pytest.approx(expected, rel=1e-12)
    assert slopes["group-mean"] == pytest.approx((size - 1) / size, rel=1e-12)  # the first term


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pass_at_k_compares_all_sets_of_k(k, load):
    """By enumeration: a set has (passes - mean) / std, an answer the mean of its sets."""
    script, size = load("pass-at-k"), 6
    for num_right in range(size + 1):
        is_right = [i < num_right for i in range(size)]
        sets = list(itertools.combinations(range(size), k))
        passes = [float(any(is_right[i] for i in members)) for members in sets]
        mean, std = statistics.fmean(passes), statistics.pstdev(passes)
        expected = []
        for i in range(size):
            own = [(x - mean) / std if std else 0.0 for x, s in zip(passes, sets) if i in s]
            expected.append(statistics.fmean(own))
        # a second group, too small for a set, among them
        right = torch.tensor([True, *is_right])
        groups = torch.tensor([7] + [3] * size)
        found = script.pass_at_k_advantages(right, groups, k)
        assert found.tolist() == pytest.approx([0.0, *expected], rel=1e-6, abs=1e-7)


def test_wapo_trains_on_winners_alone(load):
    scores, groups = ragged_groups(1)
    found = load("wapo").group_advantages(double(scores), torch.tensor(groups), "winner")
    expected = [max(a, 0.0) for a in group_advantages(scores, groups, "group-mean")]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert 0 < (found > 0).sum() < len(found) / 2 + 1


def test_reinforce_plus_plus_whitens_over_tokens(load):
    """And by the function of ppo.py, word for word."""
    script = load("reinforce-plus-plus")
    scores, groups = ragged_groups(2)
    found = script.group_advantages(double(scores), torch.tensor(groups), "batch")
    assert found.tolist() == scores
    lengths = [1 + i % 4 for i in range(len(scores))]
    tokens = [score for score, length in zip(scores, lengths) for _ in range(length)]
    mean, std = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    expected = [(score - mean) / std for score in tokens]
    assert script.whitened(double(tokens)).tolist() == pytest.approx(expected, rel=1e-10)
    assert inspect.getsource(script.whitened) == inspect.getsource(ppo.whitened)


def test_gdpo_normalises_each_reward_by_itself(load):
    script = load("gdpo")
    columns = [ragged_groups(3), ragged_groups(4)]
    groups = columns[0][1]
    rewards = [columns[0][0], [100 * r for r in columns[1][0]]]
    parts = [group_advantages(reward, groups, "group-std") for reward in rewards]
    sums = [math.fsum(values) for values in zip(*parts)]
    std = math.sqrt(math.fsum(x * x for x in sums) / (len(sums) - 1)) + 1e-6  # their mean is 0
    found = script.gdpo_advantages(double(rewards), torch.tensor(groups))
    assert found.tolist() == pytest.approx([x / std for x in sums], rel=1e-10, abs=1e-13)


def test_gdpo_names_a_reward_that_there_is_not(load):
    script = load("gdpo")
    rewards = {"score": 1.0, "format": 0.5, "note": "text"}
    episodes = [Episode(0, i, [1], [2], [1], [0.0], rewards=rewards) for i in range(3)]
    assert script.named_rewards(episodes, ["format", "score"]).tolist() == [[0.5] * 3, [1.0] * 3]
    assert script.named_rewards([], ["format", "score"]).shape == (2, 0)
    with pytest.raises(SystemExit, match=r"--separate-rewards note: .* are score, format$"):
        script.named_rewards(episodes, ["score", "note"])


# --- ppo.py, distill.py, curiosity_rl.py ----------------------------------------------------------


def test_vapo_has_two_lambdas_and_one_by_length(load):
    script, alpha, gamma = load("vapo"), 0.4, 0.97
    index = TokenIndex([e for e in random_episodes(5) if any(e.loss_mask)])
    rng = random.Random(0)
    rewards, values = (double([rng.gauss(0, 1) for _ in range(len(index))]) for _ in range(2))
    args = make_args(script, gamma=gamma, length_alpha=alpha, critic_lambda=0.9, gae_lambda=0.5)
    returns, advantages = script.returns_and_advantages(rewards, values, index, args)

    def estimate(t: int, end: int, lam: float) -> float:
        """sum over k of (gamma lambda)^k delta_t+k."""
        total = 0.0
        for k in range(end - t):
            next_value = values[t + k + 1].item() if t + k + 1 < end else 0.0
            delta = rewards[t + k].item() + gamma * next_value - values[t + k].item()
            total += (gamma * lam) ** k * delta
        return total

    expected_returns, expected = [], []
    for episode in range(len(index.lengths)):
        tokens = index.tokens_of(episode)
        lam = max(1 - 1 / (alpha * len(tokens)), 0.0)
        for t in tokens:
            expected_returns.append(values[t].item() + estimate(t, tokens.stop, 0.9))
            expected.append(estimate(t, tokens.stop, lam))
    assert returns.tolist() == pytest.approx(expected_returns, rel=1e-9)
    assert advantages.tolist() == pytest.approx(ppo.whitened(double(expected)).tolist(), rel=1e-8)
    lengths = torch.tensor([50, 1000])
    lam = script.length_lambda(lengths, 0.05)
    assert (1 / (1 - lam)).tolist() == pytest.approx([2.5, 50.0])  # what the weights sum to


def test_a_kl_coefficient_adapts_and_resumes(load):
    controller = load("adaptive-kl").KLController(0.1, target=0.02, horizon=1000)
    controller.update(0.022, num_responses=100)  # 10 % above
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller.update(1.0, num_responses=100)  # far above: as if by a fifth
    assert controller.coef == pytest.approx(0.101 * (1 + 0.2 * 0.1))
    controller.update(0.0, num_responses=500)
    assert controller.coef == pytest.approx(0.101 * 1.02 * (1 - 0.2 * 0.5))
    resumed = load("adaptive-kl").KLController(0.1, target=0.02, horizon=1000)
    resumed.counts.update(controller.counts)  # as Checkpoints.resume does
    assert resumed.coef == controller.coef

    fixed = load("adaptive-kl").KLController(0.1, target=0.0, horizon=1000)
    fixed.update(1.0, num_responses=100)
    fixed.counts.update(controller.counts)
    assert fixed.coef == 0.1


def test_distill_reward_has_two_advantages(load, tiny_config):
    """The gradient is that of -(log q - log p + coefficient * (score - mean)) log p, the bracket a
    constant, summed up from a dense pass."""
    script, coef = load("distill-reward"), 0.7
    episodes = random_episodes(6)
    student = Predictor(random_policy(tiny_config).model, "sdpa")
    index = TokenIndex(episodes)
    batches = pack(episodes, range(len(episodes)), index, budget=45)
    minibatch = Minibatch([], len(index), len(episodes), batches, teacher_batches=batches)
    advantages = script.score_advantages(episodes)[index.episode_of_token].double()
    tokens = script.Tokens.of(episodes, index, WORLD.device)
    tokens = script.Tokens(**{name: values.double() for name, values in vars(tokens).items()})
    tokens.advantages = advantages
    tokens.teacher_logprobs = -torch.rand(len(index), dtype=torch.float64) - 1
    args = make_args(script, temperature=0.9, estimator="sampled", reward_coef=coef)
    models = torch.nn.ModuleList([student, student])
    script.backward(
        models, minibatch, tokens, args, WORLD, first_epoch=True, store_old_logprobs=True
    )
    got = [parameter.grad.clone() for parameter in student.parameters()]

    student.zero_grad()
    logprobs, _ = dense_pass(student, episodes, 0.9)
    both = tokens.teacher_logprobs - logprobs.detach() + coef * advantages
    (-both * logprobs).sum().div(len(index)).backward()
    assert relative_l2(got, [parameter.grad for parameter in student.parameters()]) < 1e-10


def test_advantages_of_scores_leave_out_what_has_none(load):
    scores = [1.0, math.nan, 0.0, 0.0, math.nan, 2.0]
    prompts = [0, 0, 0, 0, 1, 2]
    episodes = [
        Episode(prompt, i, [1], [2], [1], [0.0], score=score)
        for i, (prompt, score) in enumerate(zip(prompts, scores))
    ]
    found = load("distill-reward").score_advantages(episodes)
    assert found.tolist() == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3, 0.0, 0.0])


def replay_memory(script, rank: int = 0, size: int = 1, **options):
    world = World(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))
    options = {"capacity": 100, "max_age": 3, "seed": 1} | options
    return script.ReplayMemory(world=world, **options)


def test_a_replay_draws_by_the_size_of_the_advantage(load):
    script = load("replay")
    memory = replay_memory(script, max_age=10_000)
    episodes = random_episodes(7, prompts=1)
    advantages = [0.1, -0.6, 0.0, 0.3]
    memory.add(episodes, advantages, step=0)
    drawn = [memory.draw(1, step)[0] for step in range(1, 1001)]
    for episode, advantage in zip(episodes, advantages):
        share = sum(e.sample_index == episode.sample_index for e in drawn) / len(drawn)
        assert share == pytest.approx(abs(advantage), abs=0.06)  # 4 standard deviations
    assert {e.terms["advantage"] for e in drawn} == {0.1, -0.6, 0.3}
    again = replay_memory(script, max_age=10_000)
    again.add(episodes, advantages, step=0)
    assert [again.draw(1, step)[0] for step in range(1, 21)] == drawn[:20]


def test_a_replay_forgets_and_numbers_its_prompts(load):
    script = load("replay")
    memories = [replay_memory(script, rank, size=2, capacity=5) for rank in (0, 1)]
    prompts = []
    for memory in memories:
        memory.add(random_episodes(8), [1.0] * 12, step=4)
        assert len(memory.episodes) == 5
        drawn = memory.draw(9, step=7)
        assert len({episode.response_ids[0] for episode in drawn}) > 1 and len(drawn) == 5
        assert all(script.is_replayed(episode) for episode in drawn)
        prompts += [episode.prompt_index for episode in drawn]
        memory.add(drawn, [1.0] * 5, step=7)  # what is replayed keeps its age
        assert memory.draw(9, step=8) == [] and memory.draw(0, step=8) == []
    assert len(set(prompts)) == 10


def test_replayed_episodes_keep_their_advantages_and_are_spread(load):
    script = load("replay")
    memory = replay_memory(script)
    memory.add(random_episodes(9, prompts=2), [0.5 + i for i in range(8)], step=0)
    replayed = memory.draw(4, step=1)
    episodes = random_episodes(10, prompts=4) + replayed
    advantages = script.with_replayed(torch.zeros(len(episodes)), episodes)
    assert advantages.tolist() == [0.0] * 16 + [e.terms["advantage"] for e in replayed]
    assert all(advantages[16:] > 0)
    prompts = sorted({episode.prompt_index for episode in episodes})
    for members in script.split_minibatches(episodes, prompts, 4, seed=0, step=1):
        kinds = [script.is_replayed(episodes[i]) for i in members]
        assert (kinds.count(True), kinds.count(False)) == (1, 4)


# --- whole steps ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fork_trains(name, folder, tmp_path):
    """Two steps of the demo with the patch's flags."""
    flags = {
        "adaptive-kl": ["--kl-reward-coef", 0.01, "--kl-target", 0.001, "--critic-warmup-steps", 0],
        "distill-reward": ["--estimator", "sampled", "--reward-coef", 2, "--samples-per-prompt", 4],
        "dppo": ["--objective", "dppo", "--minibatches", 2],
        "drpo": ["--objective", "drpo", "--minibatches", 2],
        "gdpo": ["--separate-rewards", "score"],
        "gmpo": ["--objective", "gmpo", "--minibatches", 2],
        "maxrl": ["--advantage", "maxrl"],
        "pass-at-k": ["--pass-at", 2],
        "reinforce-plus-plus": ["--advantage", "batch"],
        # pairs whose scores are often equal
        "replay": ["--replay-share", 0.5, "--samples-per-prompt", 2, "--curiosity", "none"],
        "sapo": ["--objective", "sapo", "--minibatches", 2],
        "vapo": ["--length-alpha", 0.05, "--critic-warmup-steps", 0],
        "wapo": ["--advantage", "winner", "--reduction", "dr_grpo"],
    }[name]
    small = ["--prompts-per-step", 8, "--total-steps", 2, "--no-eval-before", "--eval-every", 0]
    small += ["--eval-rows", 8, "--engine-memory", 0.25, "--output-dir", tmp_path / "run"]
    ranks = 2 if name == "replay" else 0  # between which replayed samples may move, too
    run_script(folder / name / script_of(name), *small, *flags, ranks=ranks)
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in records if "policy/loss" in line]
    assert len(steps) == 2 and all(math.isfinite(step["policy/loss"]) for step in steps)
    if name == "replay":
        assert steps[0]["rollout/replayed"] == 0 < steps[1]["rollout/replayed"]
