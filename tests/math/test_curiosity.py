"""The reward of curiosity_rl.py by worked examples; each defect of the released code by name."""

import math

import pytest
import torch
from helpers import checked_args, make_args

import curiosity_rl
from common.data import visual_qa
from common.rewards import is_correct, reward_function, visual_qa_reward
from common.rollout.evaluation import summarize
from common.types import Episode
from curiosity_rl import (
    Args,
    add_curiosity,
    curiosity_means,
    curiosity_terms,
    num_calls,
    of_unequal_groups,
)

PAPER = {"alpha": 0.5, "target": 0.3, "penalty": 0.05, "free_calls": 1}


def call(error: bool = False) -> dict:
    return {
        "turn": 0,
        "name": "crop",
        "arguments": {},
        "text": "",
        "error": error,
        "info": {},
        "media": 0,
    }


def episode(
    score: float, calls: list[dict] = (), prompt: int = 0, reason: str = "stop", **more
) -> Episode:
    sampled = [5, 6, 7]
    rest = {"finish_reason": reason, "rewards": {"score": score}, "calls": list(calls)}
    return Episode(prompt, 0, [1, 2], sampled, [1] * 3, [-0.1] * 3, **rest, **more)


class Video:
    kind = "video"


class Image:
    kind = "image"


def args(**options) -> Args:
    return make_args(curiosity_rl, **options)


# spec/pixel_reasoner.md 5.3: groups of 8
@pytest.mark.parametrize(
    "looking, paper, image, video", [(1, 0.0875, 0.175, 0.233333), (2, 0.025, 0.025, 0.033333)]
)
def test_bonus_of_the_table(looking, paper, image, video):
    share_looking = looking / 8
    assert curiosity_terms("paper", 1, share_looking, False, **PAPER) == pytest.approx((paper, 0.0))
    assert curiosity_terms("paper", 1, share_looking, True, **PAPER) == pytest.approx((paper, 0.0))
    assert curiosity_terms("repo", 1, share_looking, False, **PAPER) == pytest.approx(
        (image, 0.0), abs=1e-6
    )
    assert curiosity_terms("repo", 1, share_looking, True, **PAPER) == pytest.approx(
        (video, 0.0), abs=1e-6
    )


@pytest.mark.parametrize("variant", ["paper", "repo"])
@pytest.mark.parametrize("looking", range(3, 9))
def test_no_bonus_where_enough_of_a_group_look(variant, looking):
    for is_video in (True, False):
        assert curiosity_terms(variant, 1, looking / 8, is_video, **PAPER) == (0.0, 0.0)


@pytest.mark.parametrize("variant", ["paper", "repo"])
def test_calls_above_the_free_ones_cost_whether_they_help_or_not(variant):
    costs = [curiosity_terms(variant, n, 1.0, False, **PAPER)[1] for n in range(6)]
    assert costs == pytest.approx([0, 0, -0.05, -0.1, -0.15, -0.2])
    assert curiosity_terms(variant, 4, 1.0, False, **(PAPER | {"free_calls": 3, "penalty": 0.2}))[
        1
    ] == pytest.approx(-0.2)


def test_without_curiosity_and_without_a_call_there_is_neither():
    for calls in range(5):
        assert curiosity_terms("none", calls, 1 / 8, False, **PAPER) == (0.0, 0.0)
    for variant in ("paper", "repo"):
        assert curiosity_terms(variant, 0, 0.0, True, **PAPER) == (0.0, 0.0)


def test_calls_below_the_free_ones_are_no_gain():
    assert [
        curiosity_terms("paper", n, 1.0, False, **(PAPER | {"free_calls": 3})) for n in (1, 2, 3)
    ] == [(0.0, 0.0)] * 3


@pytest.mark.parametrize(
    "variant, bonus", [("paper", 0.5 * (0.3 - 1 / 16)), ("repo", 0.125 * (0.3 - 1 / 16) * 16)]
)
def test_the_share_is_of_the_group_whatever_its_size(variant, bonus):
    group = [episode(0.0, [call()]), *(episode(0.0) for _ in range(15))]
    add_curiosity(group, args(curiosity=variant))
    assert group[0].terms["curiosity"] == pytest.approx(bonus)


def test_a_worked_group():
    """One of eight looks, twice, and is wrong; three of the others are right."""
    group = [episode(0.0, [call(), call()]), *(episode(float(i < 3)) for i in range(7))]
    add_curiosity(group, args())
    assert group[0].terms == pytest.approx({"curiosity": 0.0875, "call_cost": -0.05})
    assert group[0].score == pytest.approx(0.0875 - 0.05) and group[0].rewards == {"score": 0.0}
    assert curiosity_means(group).reduce() == {"tool/rapr": 1 / 8}
    assert [e.score for e in group[1:]] == [1, 1, 1, 0, 0, 0, 0]
    assert sum(is_correct(e.rewards) for e in group) == 3


def test_what_an_environment_gives_is_added_to_the_shaped_reward():
    group = [episode(1.0, turn_rewards=[(1, 0.25), (3, -0.5)]), *(episode(0.0) for _ in range(3))]
    add_curiosity(group, args())
    assert [e.score for e in group] == [0.75, 0, 0, 0] and is_correct(group[0].rewards)


def test_groups_of_equal_rewards_teach_nothing_and_are_left_out():
    """Equal after bonus and cost; what has no score is left out before its group is looked at."""
    sampled = [episode(float(i == 0 and p < 2), prompt=p) for p in range(3) for i in range(4)]
    unequal_by_bonus = [episode(0.0, [call()] * (i == 0), prompt=3) for i in range(8)]
    unscored = episode(math.nan, prompt=2)
    scored = [e for e in [*sampled, unscored, *unequal_by_bonus] if math.isfinite(e.score)]
    add_curiosity(scored, args())
    chosen = of_unequal_groups(scored)
    assert [e.prompt_index for e in chosen] == [0] * 4 + [1] * 4 + [3] * 8


def test_groups_do_not_mix():
    many = [episode(0.0, [call()], prompt=1) for _ in range(8)]
    few = [episode(0.0, [call()] * (i == 0), prompt=2) for i in range(8)]
    mixed = [e for pair in zip(many, few) for e in pair]
    add_curiosity(mixed, args())
    assert [e.score for e in many] == [0.0] * 8
    assert few[0].score == pytest.approx(0.0875)


def test_failed_and_refused_calls_count():
    failed, refused = episode(0.0, [call(True)]), episode(0.0, [call()], reason="max_turns")
    assert (num_calls(failed), num_calls(refused)) == (1, 2)
    group = [failed, *(episode(0.0) for _ in range(7))]
    add_curiosity(group, args())
    assert failed.terms["curiosity"] == pytest.approx(0.0875)


def test_the_frames_of_a_video_decide_the_variant_of_the_code():
    # selected frames are images
    for media, divisor in (([Video()], 3), ([Video(), Image()], 3), ([Image()], 4)):
        group = [episode(0.0, [call()], media=media), *(episode(0.0) for _ in range(7))]
        add_curiosity(group, args(curiosity="repo"))
        assert group[0].terms["curiosity"] == pytest.approx(0.7 / divisor)


def test_minus_one_does_not_leak_into_the_reward():
    """Defect: r = -1 for what could not be parsed entered the shaped reward."""
    group = [episode(-1.0), episode(1.0), episode(0.4), episode(10.0)]
    add_curiosity(group, args())
    assert [e.score for e in group] == [0.0, 1.0, 0.4, 1.0]


def test_the_formula_is_the_papers_unless_the_codes_is_asked_for():
    """Defect: the released code's bonus is not the paper's."""
    assert Args().curiosity == "paper"
    defaults = Args()
    assert defaults.curiosity_alpha == 0.5 and defaults.call_penalty == 0.05
    assert defaults.curiosity_target == 0.3 and defaults.free_calls == 1
    assert (defaults.clip_low, defaults.clip_high, defaults.advantage) == (0.2, 0.35, "group-mean")
    assert (
        not {"kl_loss_coef", "kl_reward_coef", "entropy_coef", "dual_clip"} & vars(defaults).keys()
    ), "nothing besides the clip"


# --- evaluation -----------------------------------------------------------------------------------


def sample(
    group: int, correct: bool = False, calls: int = 0, errors: int = 0, source: str = "a", **more
) -> dict:
    rest = {
        "data_source": source,
        "group": group,
        "score": float(correct),
        "correct": correct,
        "pred": "",
    }
    return (
        rest
        | {"length": 1, "truncated": False, "calls": calls, "call_errors": errors, "anls": None}
        | more
    )


def test_rates_of_calls():
    """rapr: samples that look, however often. Errors: of calls, not of samples."""
    metrics = summarize([sample(0, calls=4, errors=2), sample(1, calls=1), sample(2), sample(3)])
    assert (metrics["eval/rapr"], metrics["eval/tool_error_rate"]) == pytest.approx((0.5, 0.4))
    assert "eval/anls" not in metrics
    assert summarize([sample(0)])["eval/tool_error_rate"] == 0
    without = [{k: v for k, v in sample(0).items() if not k.startswith("call")}]
    assert not {"eval/rapr", "eval/tool_error_rate"} & set(summarize(without))


def test_anls_is_a_mean_over_prompts_and_a_failure_is_0():
    samples = [sample(0, anls=1.0), sample(0, anls=None), sample(0, anls=0.5), sample(1, anls=0.8)]
    samples += [sample(2, source="has none")]
    assert summarize(samples)["eval/anls"] == pytest.approx((0.5 + 0.8) / 2)


# --- published rows -------------------------------------------------------------------------------


def published(**changes) -> dict:
    row = {
        "question": "Which?",
        "answer": ["left"],
        "qid": "tallyqa-1",
        "image": ["images/a.jpg"],
        "is_video": None,
    }
    return visual_qa.convert(row | changes, "file", "", True)


def test_rows_by_example():
    nothing = ([""], None), (None, None), (math.nan, None), ([math.nan], None)
    for answer, truths in (("left", ["left"]), (0, ["0"]), ([None, " ", "B"], ["B"]), *nothing):
        assert published(answer=answer)["reward_model"]["ground_truth"] == truths
    assert (
        published(question=" ")["prompt"] is None
        and published(image=[{"path": "a"}])["prompt"] is None
    )
    assert published(image=5)["prompt"] is None
    assert (
        published(image="a")["images"] == ["a"]
        and published(qid="000123")["data_source"] == "visual_qa/file"
    )
    asked = published(question="<video>Which <image>?", image=["a", "b"], is_video=True)
    assert asked["prompt"][0]["content"] == "<video>Which ?" + visual_qa.WITH_TOOLS and asked[
        "videos"
    ] == [["a", "b"]]
    for benchmark in ("tallyqa", "infographics", "mvbench", "MATHVista", "gsm8k"):
        source = published(qid=f"{benchmark}-a-1")["data_source"]
        assert source == f"visual_qa/{benchmark}" and reward_function(source) is visual_qa_reward


def test_folders_count_as_moved_only_if_the_picture_is_there_and_nowhere_else(tmp_path):
    records = [{"image": None}, {"image": ["", "images/a.jpg"]}]

    def prefix() -> str:
        return visual_qa.path_prefix(records, tmp_path / "b.parquet", tmp_path)

    assert prefix() == "", "an error names the path of the row"
    for folder, expected in (("b_images", "b_"), ("images", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jpg").touch()
        assert prefix() == expected


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--curiosity", "none", "--curiosity-alpha", "1"],
        ["--curiosity", "none", "--free-calls", "2"],
        ["--tools", "", "--curiosity-alpha", "1"],
        ["--minibatches", "1", "--clip-high", "0.3"],
        ["--lr-schedule", "constant", "--lr-floor", "0.1"],
    ],
)
def test_flags_without_effect_are_refused(flags, monkeypatch):
    """Defect: many of the original's flags were ignored in silence."""
    with pytest.raises(SystemExit, match=f"{flags[-2]} .*has no effect"):
        checked_args(curiosity_rl, monkeypatch, "--model", "tiny-vl", *flags)


def test_calls_of_an_environment_are_paid_for_like_those_of_tools(monkeypatch, tmp_path):
    (tmp_path / "own.py").write_text(
        "class Own:\n    def reset(self): ...\n\n\ndef talk(messages, truth): ...\n"
    )
    own = [
        "--model",
        "x",
        "--train-data",
        "rows.jsonl",
        "--tools",
        "",
        "--curiosity-alpha",
        "1",
        "--environment",
    ]
    assert (
        checked_args(curiosity_rl, monkeypatch, *own, f"{tmp_path}/own.py:Own").curiosity_alpha == 1
    )
    with pytest.raises(
        SystemExit, match=r"--curiosity-alpha 1\.0 has no effect: needs --tools or a class"
    ):
        checked_args(curiosity_rl, monkeypatch, *own, f"{tmp_path}/own.py:talk")
    with pytest.raises(SystemExit, match=r"^error: --environment own\.py:Own: there is no file"):
        checked_args(curiosity_rl, monkeypatch, *own, "own.py:Own")


def test_the_constant_divisor_is_that_of_the_released_code():
    """Sum of token losses / 200 for each sequence, which is --reduction dr_grpo where
    --max-response-tokens is 200."""
    weights = curiosity_rl.token_weights("dr_grpo", torch.tensor([3.0, 7.0]), 10.0, 4.0, 200)
    assert weights.tolist() == pytest.approx([1 / 800] * 2)
    assert not math.isnan(weights.sum())
