"""Which groups grpo.py trains on: those that are replaced, those that are ranked, and what tool
calls earn."""

import math
import random
from types import SimpleNamespace

import pytest
from episodes import UNEQUAL, call, group
from helpers import checked_args, make_args

import grpo
from common.rollout.opening import print_plan
from common.steps import Stopwatch


def rollouts_of(world, groups=group) -> SimpleNamespace:
    """Prompt number p has the scores of UNEQUAL; what was drawn is noted."""
    rollouts = SimpleNamespace(world=world, drawn=[])

    def draw(count: int, first: int) -> list[int]:
        rollouts.drawn.append((first, count))
        return list(range(first, first + count))

    rollouts.draw, rollouts.score = draw, lambda episodes, prompts: None
    rollouts.sample = lambda prompts, step, watch: [e for prompt in prompts for e in groups(prompt)]
    return rollouts


def collect(rollouts, args, step: int = 0, group_yield=None) -> tuple[list, list]:
    group_yield = group_yield or grpo.GroupYield()
    return grpo.collect_groups(rollouts, args, group_yield, step, Stopwatch())


@pytest.mark.parametrize(
    "flags, drawn, trained",
    [
        # one of three is unequal: (2 + a standard deviation of 1) / (2 of 4) are 6
        ({"dynamic_sampling": 9, "prompts_per_step": 3}, [(0, 3), (3, 6)], [1, 4, 5]),
        ({"dynamic_sampling": 2, "prompts_per_step": 3}, [(0, 3), (3, 3)], [1, 4, 5]),
        # none of one; then all that are allowed
        ({"dynamic_sampling": 5, "prompts_per_step": 1}, [(0, 1), (1, 4)], [1]),
        ({"oversample": 1.5, "prompts_per_step": 4}, [(0, 6)], [1, 4, 5]),
        ({"oversample": 3.0, "prompts_per_step": 3}, [(0, 9)], [1, 4, 8]),
        ({"oversample": 3.0, "prompts_per_step": 1}, [(0, 3)], [1]),
        # 1.12 * 25 is a bit above 28
        ({"oversample": 1.12, "prompts_per_step": 25}, [(0, 28)], [1, 4, 5, 7, 8]),
        (
            {"oversample": 1.5, "prompts_per_step": 3, "dynamic_sampling": 9},
            [(0, 5), (5, 4)],
            [1, 4, 8],
        ),
        (
            {"oversample": 2.0, "prompts_per_step": 2, "dynamic_sampling": 9},
            [(0, 4), (4, 5)],
            [4, 8],
        ),
        ({"prompts_per_step": 3}, [(0, 3)], [0, 1, 2]),
    ],
)
def test_groups_are_replaced_and_ranked(world, capsys, flags, drawn, trained):
    """A round draws ceil(missing x F), or as many as the yield so far asks for. With F the widest
    unequal groups are kept whole, of equal ones the first; without it the first."""
    rollouts = rollouts_of(world)
    sampled, episodes = collect(rollouts, make_args(grpo, **flags), step=4)
    assert rollouts.drawn == drawn
    assert [e.prompt_index for e in episodes] == [prompt for prompt in trained for _ in range(3)]
    assert len(sampled) == 3 * sum(count for _, count in drawn)
    found, wanted = len(trained), flags["prompts_per_step"]
    told = f"step 5 trains on {found} groups, not on {wanted}: no more of"
    assert (told in capsys.readouterr().out) == (found < wanted)


def test_groups_of_other_ranks_count(world, monkeypatch):
    """This rank has two of its six prompts; with those of another one the four are there."""
    others = {6: 1.0, 9: 1.0}
    monkeypatch.setattr(grpo, "gather_objects", lambda own: [own, others])
    rollouts = rollouts_of(world)
    args = make_args(grpo, dynamic_sampling=9, oversample=1.5, prompts_per_step=4)
    collect(rollouts, args)
    assert rollouts.drawn == [(0, 6)]


def test_a_solved_task_takes_what_is_allowed_and_no_more(world):
    rollouts = rollouts_of(world, groups=lambda prompt: group(prompt, [1.0, 1.0]))
    _, episodes = collect(rollouts, make_args(grpo, dynamic_sampling=5, prompts_per_step=2))
    assert rollouts.drawn == [(0, 2), (2, 8)] and not episodes


def test_a_step_draws_what_earlier_ones_would_have_needed(world):
    """Half of 99 prompts were unequal: (4 + sqrt(4 / 2)) / 0.5 are 11. What a round finds counts
    at once; groups that could not be scored do not."""
    group_yield = grpo.GroupYield(window=400)
    group_yield.counts.update({"sampled": 99.0, "unequal": 49.0})
    scores = {2: (math.nan,) * 3, 3: (math.nan, 1.0, math.nan)}
    rollouts = rollouts_of(world, groups=lambda prompt: group(prompt, scores.get(prompt)))
    args = make_args(grpo, dynamic_sampling=9, prompts_per_step=4)
    sampled, episodes = collect(rollouts, args, group_yield=group_yield)
    assert rollouts.drawn == [(0, 11)] and len(sampled) == 33
    assert sorted({e.prompt_index for e in episodes}) == [1, 4, 5, 7]  # 8 is wider than 7
    fading = 1 - 10 / 400
    assert group_yield.counts == {"sampled": fading * 99 + 10, "unequal": fading * 49 + 5}


@pytest.mark.parametrize("flat", [0.0, 0.2, 0.45, 0.8])
def test_most_rounds_find_enough(flat):
    """Of prompts that are flat by chance: a standard deviation more is enough in 84 % of rounds,
    were the share known; it is measured on few."""
    rng = random.Random(0)
    group_yield = grpo.GroupYield()
    num_enough = []
    for _ in range(300):
        count = group_yield.num_prompts(64)
        found = sum(rng.random() >= flat for _ in range(count))
        group_yield.add(count, found)
        num_enough.append(found >= 64)
        assert count >= 64 and group_yield.share > 0
    assert sum(num_enough[1:]) / 299 > 0.65
    assert group_yield.counts["sampled"] <= max(256, count + 1)
    assert group_yield.share == pytest.approx(1 - flat, abs=0.1)


def test_the_yield_is_never_none():
    group_yield = grpo.GroupYield(window=8)
    assert group_yield.share == 1 and group_yield.num_prompts(3) == 3
    for _ in range(5):
        group_yield.add(20, 0)  # more than it remembers
    assert group_yield.share == 1 / 21
    group_yield.add(8, 8)
    assert group_yield.share == 1


def test_the_deviation_is_that_of_the_scored_samples(world):
    """Unbiased: over two samples it is wider than over three; a sample that could not be scored is
    none."""
    scores = {0: (1.0, 0.0, 0.0), 1: (1.0, 0.0, math.nan), 2: (1.0, 1.0, math.nan)}
    rollouts = rollouts_of(world, groups=lambda prompt: group(prompt, scores[prompt]))
    args = make_args(grpo, oversample=3.0, prompts_per_step=1)
    sampled, episodes = collect(rollouts, args)
    assert [(e.prompt_index, e.score) for e in episodes] == [(1, 1.0), (1, 0.0)] and len(
        sampled
    ) == 9


def test_what_an_environment_gives_is_part_of_the_score(world):
    """Once, and before groups are compared: without it these are equal."""

    def answered(prompt: int) -> list:
        episodes = group(prompt, [1.0, 1.0])
        episodes[1].turn_rewards = [(1, 0.25), (1, 0.5)]
        return episodes

    args = make_args(grpo, dynamic_sampling=2, prompts_per_step=1)
    _, episodes = collect(rollouts_of(world, groups=answered), args)
    assert [e.score for e in episodes] == [1.0, 1.75]


def test_equal_widths_are_equal_whatever_their_rounding(world):
    """One right of eight deviates as seven do, whichever it is; 0.1 + 0.2 is 0.3, whose advantages
    would be 0."""
    scores = {
        0: (0.1 + 0.2,) + (0.3,) * 7,
        1: (1.0,) + (0.1,) * 7,
        2: (0.1,) * 5 + (1.0,) + (0.1,) * 2,
    }
    scores |= {3: (1.0,) * 7 + (0.1,)}
    episodes = [e for prompt in scores for e in group(prompt, scores[prompt])]
    deviations = grpo.score_deviations(episodes)
    for count, kept in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3])):
        for widest_first in (True, False):
            assert sorted(grpo.unequal_prompts(deviations, count, widest_first)) == kept


def test_ranks_choose_together(monkeypatch):
    """Prompts 0, 2, 4 ... are one rank's, the others another's; together they keep what one rank
    alone would."""
    episodes = [e for prompt in UNEQUAL for e in group(prompt)]
    alone = grpo.score_deviations(episodes)
    parts = [[e for e in episodes if e.prompt_index % 2 == rank] for rank in (0, 1)]
    told: list[dict] = []
    monkeypatch.setattr(grpo, "gather_objects", lambda own: told.append(own) or [own])
    for part in parts:
        grpo.score_deviations(part)
    monkeypatch.setattr(grpo, "gather_objects", lambda own: told)
    for part in parts:
        assert grpo.score_deviations(part) == alone
    for count in range(len(UNEQUAL) + 2):
        for widest_first, order in ((True, [4, 8, 1, 5, 7]), (False, [1, 4, 5, 7, 8])):
            assert grpo.unequal_prompts(alone, count, widest_first) == set(order[:count])


@pytest.mark.parametrize(
    "score, calls, earned",
    [
        (1.0, [call(acted=True), call(acted=True)], 0.2),
        (0.0, [call(acted=True)], 0.0),
        (1.0, [], 0.0),
        (1.0, [call(acted=False), call(True, acted=True), call(acted=True)], 0.1),
        # whatever a tool says
        (1.0, [call(acted="clicked"), call(acted=3), call(acted=""), call(acted=None)], 0.2),
        (1.0, [call(), call(True)], 0.1),  # other tools: what was no error
        (1.0, [call(), call(turn=1)], 0.1),  # after the second there was no room for what it showed
        (math.nan, [call(acted=True)], 0.0),
    ],
)
def test_calls_earn_something_if_the_answer_is_right(score, calls, earned):
    (episode,) = group(0, [score], calls)
    grpo.add_tool_bonus([episode], 0.1)
    assert episode.terms["tool_bonus"] == pytest.approx(earned)
    assert episode.score == pytest.approx(score + earned, nan_ok=True)


def test_the_bonus_decides_which_groups_are_unequal(world):
    rollouts = rollouts_of(world, groups=lambda prompt: group(prompt, [1.0, 1.0]))
    rollouts.sample = lambda prompts, step, watch: [
        e
        for prompt in prompts
        for e in [*group(prompt, [1.0]), *group(prompt, [1.0], [call(acted=True)])]
    ]
    args = make_args(grpo, oversample=2.0, prompts_per_step=1, tool_bonus=0.5)
    _, episodes = collect(rollouts, args)
    assert [e.score for e in episodes] == [1.0, 1.5]


@pytest.mark.parametrize("bonus, kept", [(0.5, [(1, 1.5), (1, 2.0)]), (0.0, [])])
def test_as_many_calls_of_all_make_no_group_unequal(world, bonus, kept):
    """All answers are right: with one call each the group is dropped, with one and two it is
    trained on."""
    calls = {0: (1, 1), 1: (1, 2), 2: (3, 3)}
    rollouts = rollouts_of(
        world,
        groups=lambda prompt: [
            e for n in calls[prompt] for e in group(prompt, [1.0], [call(acted=True)] * n)
        ],
    )
    args = make_args(grpo, oversample=1.5, prompts_per_step=2, tool_bonus=bonus)
    sampled, episodes = collect(rollouts, args)
    assert [(e.prompt_index, e.score) for e in episodes] == kept and len(sampled) == 6


def test_an_epoch_counts_the_prompts_that_are_drawn(capsys):
    flags = grpo.Rollout(prompts_per_step=4, samples_per_prompt=2)
    print_plan(flags, num_rows=30, prompts_per_step=6, total_steps=10, updates=1)
    assert (
        "30 prompts; 6 x 2 samples and 1 update a step; 10 steps = 2.00 epochs"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--oversample", "0.5"], "--oversample 0.5: must be from 1 to 100"),
        (["--tool-bonus", "0.1"], "--tool-bonus 0.1 has no effect: needs --tools"),
        (["--tool-bonus", "-1", "--tools", "python"], "--tool-bonus -1.0: must not be below 0"),
    ],
)
def test_flags_that_cannot_work_are_refused(monkeypatch, flags, told):
    with pytest.raises(SystemExit, match=told):
        checked_args(grpo, monkeypatch, "--model", "m", "--train-data", "d", *flags)
