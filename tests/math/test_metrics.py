"""Means over ranks, and the metrics of a rollout."""

import json
import math

import pytest
import torch
from episodes import random_episodes
from helpers import ROOT, run_script

from common.metrics import Means, rollout_means, rollout_metrics
from common.packing import TokenIndex
from common.types import Episode
from grpo import split_minibatches


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict]:
    """What each of two ranks has found."""
    done = run_script(ROOT / "tests" / "workers" / "reductions.py", ranks=2)
    return json.loads(done.stdout.strip().splitlines()[-1])


# --- Means ----------------------------------------------------------------------------------------


def test_means_over_ranks_that_hold_different_names(of_two_ranks):
    assert of_two_ranks[0]["means"] == of_two_ranks[1]["means"] == {
        "both": 3.0,
        "weighted": 3.0,  # 12 / 4, not the mean of 10 and 2/3
        "only rank 0": 2.5,
        "only rank 1": 2.5,
        "of nothing here": 0.0,
        "summed": 3.0,
        "on every rank": 7.0,
        "total of rank 0": 3.0,
        "total of rank 1": 3.0,
    }  # fmt: skip


def test_sums_add_up_and_a_mean_of_nothing_is_left_out():
    means = Means()
    means.add("a", 1.0)
    means.add("a", 5.0, count=2)
    means.add("nothing", 3.0, count=0)
    means.add("nan", math.nan, count=2)
    means.add_total("total", 2)
    means.add_total("total", True)
    means.add_total("zero", 0.0)
    reduced = means.reduce()
    assert math.isnan(reduced.pop("nan")), "what is no number is told, not hidden"
    assert type(reduced) is dict and reduced == {"a": 2.0, "total": 3.0, "zero": 0.0}
    assert means.reduce()["a"] == 2.0, "reduced again"


def test_tensors_are_summed_in_float64_without_their_graph():
    """2^24 + 1 is not a float32; and a graph that is kept would keep a micro-batch's
    activations."""
    means, x = Means(), torch.ones(1, requires_grad=True)
    for value in (2.0**24, 1.0, 1.0, 1.0):
        means.add("x", (x * value).sum(), count=1)
    assert not means.sums["x"].requires_grad and means.sums["x"].dtype == torch.float64
    assert means.reduce() == {"x": (2.0**24 + 3) / 4}
    means.add("x", 1.0, count=0)
    assert means.reduce() == {"x": (2.0**24 + 4) / 4}, "numbers and tensors mix"


def test_merged_means_are_those_of_all():
    one, other = Means(), Means()
    one.add("a", torch.tensor(3.0), count=2)
    other.add("a", 5.0, count=2)
    other.add("b", 1.0)
    one.add_total("t", 1)
    other.add_total("t", 2)
    one.merge(other)
    assert one.reduce() == {"a": 2.0, "b": 1.0, "t": 3.0}
    assert other.reduce() == {"a": 2.5, "b": 1.0, "t": 2.0}, "as it was"


# --- counts of a step over ranks ------------------------------------------------------------------


def test_the_denominators_of_a_minibatch_are_those_of_all_ranks(of_two_ranks):
    episodes = random_episodes(5, prompts=7)
    index = TokenIndex(episodes)
    split = split_minibatches(episodes, list(range(7)), 3, seed=1, step=2)
    for rank in of_two_ranks:
        for selected, (num_tokens, num_sequences, _) in zip(split, rank["counts"], strict=True):
            lengths = index.lengths[selected]
            assert (num_tokens, num_sequences) == (int(lengths.sum()), int((lengths > 0).sum()))
    assert sum(c[1] for c in of_two_ranks[0]["counts"]) < len(episodes), "some train nothing"


def test_ranks_share_a_minibatchs_prompts_and_have_as_many_micro_batches(of_two_ranks):
    """A collective that one rank enters and the other does not would wait for ever."""
    one, other = of_two_ranks
    assert [c[2] for c in one["counts"]] == [c[2] for c in other["counts"]] and min(
        c[2] for c in one["counts"]
    ) > 0
    split = split_minibatches(random_episodes(5, prompts=7), list(range(7)), 3, seed=1, step=2)
    every = [
        sorted({random_episodes(5, prompts=7)[i].prompt_index for i in selected})
        for selected in split
    ]
    assert [sorted(a + b) for a, b in zip(one["prompts"], other["prompts"])] == every
    assert all(p % 3 == 0 for part in one["prompts"] for p in part), "each what is its own"
    assert one["nothing"] == other["nothing"] == [], "a minibatch without a trained token is none"


def test_explained_variance_is_of_the_tokens_of_all_ranks(of_two_ranks):
    values, returns = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double()
    expected = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert [rank["explained"] for rank in of_two_ranks] == pytest.approx(
        [expected.item()] * 2, rel=1e-6
    )


# --- rollout metrics ------------------------------------------------------------------------------


def test_a_rank_without_episodes_has_a_part_in_the_seconds_alone(of_two_ranks):
    """Tokens of all ranks over the mean of their seconds."""
    mine = [e for e in random_episodes(5, prompts=7) if e.prompt_index % 3]
    metrics = of_two_ranks[0]["rollout"]
    assert metrics == of_two_ranks[1]["rollout"]
    tokens = sum(len(e.response_ids) for e in mine)
    assert metrics["rollout/tokens_per_s"] == pytest.approx(tokens / 2.0)
    assert metrics["rollout/response_length"] == pytest.approx(tokens / len(mine))
    assert metrics["reward/mean"] == pytest.approx(sum(e.score for e in mine) / len(mine))


def episode(
    prompt: int, score: float, reason: str = "stop", calls: int = 0, errors: int = 0
) -> Episode:
    made = [{"error": i < errors, "info": {}} for i in range(calls)]
    return Episode(
        prompt,
        0,
        [1],
        [2] * 4,
        [1] * 4,
        [0.0] * 4,
        reason,
        {"score": score},
        calls=made,
        turns=calls + 1,
    )


def test_rollout_metrics_by_hand():
    """Two groups and a half: the failed one counts as an episode, and not as a score."""
    episodes = [
        episode(0, 1.0, "length"),
        episode(0, 0.0),
        episode(1, 0.5),
        episode(1, 0.5, "max_turns", 3, 1),
    ]
    episodes += [episode(2, math.nan, "tool_failed"), episode(2, 1.0, calls=1)]
    metrics = rollout_metrics(rollout_means(episodes, {"rollout": 2.0}, with_tools=True).reduce())
    assert metrics == pytest.approx({
        "reward/mean": 0.6,
        "reward/std": math.sqrt((1 + 0.25 + 0.25 + 1) / 5 - 0.36),
        "reward/accuracy": 2 / 5,
        "reward/failed": 1,
        "reward/zero_variance_groups": 1 / 2,
        "rollout/response_length": 4.0,
        "rollout/truncated": 1 / 6,
        "rollout/max_turns": 1 / 6,
        "rollout/tool_failed": 1 / 6,
        "rollout/turns": 10 / 6,
        "rollout/tokens_per_s": 12.0,
        "tool/calls": 4 / 6,
        "tool/callers": 2 / 6,
        "tool/error_rate": 1 / 4,
    })  # fmt: skip
    plain = rollout_metrics(rollout_means(episodes[:1], {}).reduce())
    assert (
        not [name for name in plain if name.startswith("tool/")]
        and "rollout/tokens_per_s" not in plain
    )


def test_what_a_tool_says_of_its_call_is_counted_whatever_it_is():
    episodes = [episode(0, 1.0, calls=3)]
    for call, acted in zip(episodes[0].calls, ("clicked the button", False, True), strict=True):
        call["info"] = {"acted": acted}
    assert (
        rollout_metrics(rollout_means(episodes, {}, with_tools=True).reduce())["tool/acted"]
        == 2 / 3
    )


def test_numbers_of_the_reward_function_are_metrics():
    """Means over the scored episodes that have them; texts, what is no number, and names of other
    metrics are not."""
    episodes = [episode(0, 1.0), episode(0, 0.0), episode(0, math.nan)]
    own = {
        "format": 1.0,
        "a/b": -2.0,
        "pred": "7",
        "mean": 9.0,
        "failed": 9.0,
        "std": 9.0,
        "worst": math.nan,
    }
    episodes[0].rewards |= own | {"accuracy": 9.0, "model_mean": 9.0, "judge_s": math.inf}
    episodes[1].rewards |= {"format": 0.5, "pred": 7.0}
    episodes[2].rewards |= {"format": 100.0, "error": "why"}
    metrics = rollout_metrics(rollout_means(episodes, {}).reduce())
    assert {name: x for name, x in metrics.items() if name.startswith("reward/")} == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/accuracy": 0.5,
        "reward/failed": 1,
        "reward/zero_variance_groups": 0.0,
        "reward/format": 0.75,
        "reward/a/b": -2.0,
        "reward/pred": 7.0,
    }


def test_a_reward_function_that_makes_up_a_key_for_each_response(capsys):
    """Its numbers are left out, on all ranks alike; those that scripts add are not."""
    episodes = [episode(0, 1.0), episode(0, 0.0)]
    for count in (32, 33):
        episodes[0].rewards = {"score": 1.0} | {f"made_up_{i}": 2e6 for i in range(count)}
        episodes[0].terms = {"tool_bonus": 0.5}
        metrics = rollout_metrics(rollout_means(episodes, {}).reduce())
        found = {name: x for name, x in metrics.items() if "made_up" in name}
        assert len(found) == (count if count == 32 else 0) and {*found.values()} <= {2e6}
        assert metrics["reward/tool_bonus"] == 0.5
    rollout_means(episodes, {})
    assert capsys.readouterr().out.count("warning: rewards have 33 numbers beside the score") == 1


def test_a_term_of_the_script_wins_over_the_users_number_of_the_same_name():
    episodes = [episode(0, 1.0), episode(0, 0.0)]
    for e in episodes:
        e.rewards |= {"tool_bonus": 7.0, "looks": 3.0}
        e.terms = {"tool_bonus": 0.5}
    reduced = rollout_means(episodes, {}).reduce()
    assert (reduced["reward/tool_bonus"], reduced["reward/looks"]) == (0.5, 3.0)


def test_programs_that_did_something_and_what_they_earned():
    one, other = episode(0, 1.2, calls=3, errors=1), episode(0, 0.0, calls=1)
    for call, acted in zip([*one.calls, *other.calls], (False, True, True, False)):
        call["info"]["acted"] = acted
    one.terms["tool_bonus"], other.terms["tool_bonus"] = 0.2, 0.0
    metrics = rollout_metrics(rollout_means([one, other], {}, with_tools=True).reduce())
    assert metrics["tool/acted"] == 2 / 4 and metrics["reward/tool_bonus"] == pytest.approx(0.1)


def test_a_step_of_which_nothing_could_be_scored_is_counted():
    sampled = [episode(0, math.nan), episode(0, math.nan)]
    metrics = rollout_metrics(rollout_means(sampled, {"rollout": 1.0}).reduce())
    assert (metrics["reward/failed"], metrics["reward/unscored_steps"]) == (2.0, 1.0)
    assert (
        not {"reward/mean", "reward/mean_square", "reward/std", "reward/accuracy"} & metrics.keys()
    )
    scored = rollout_metrics(rollout_means([episode(0, 1.0), *sampled], {"rollout": 1.0}).reduce())
    assert "reward/unscored_steps" not in scored and scored["reward/std"] == 0.0
