"""The reward of curiosity_rl.py and its replay, by worked examples; each defect of the released code by name."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import checked_args, make_args
from test_turns import build_tokenizer

import curiosity_rl
from common.data import visual_qa
from common.episodes import Episode
from common.rewards import is_correct, reward_function, visual_qa_reward
from common.rewards.samples import report, summarize, wilson_interval
from curiosity_rl import Args, ReplayMemory, curiosity_terms, num_calls, select, shape_rewards, side_by_side

PAPER = {"alpha": 0.5, "target": 0.3, "penalty": 0.05, "free": 1}


def call(error: bool = False) -> dict:
    return {"turn": 0, "name": "crop", "arguments": {}, "text": "", "error": error, "info": {}, "media": 0}


def episode(score: float, calls: list[dict] = (), prompt: int = 0, reason: str = "stop", **more) -> Episode:
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
@pytest.mark.parametrize("looking, paper, image, video", [(1, 0.0875, 0.175, 0.233333), (2, 0.025, 0.025, 0.033333)])
def test_bonus_of_the_table(looking, paper, image, video):
    rapr = looking / 8
    assert curiosity_terms("paper", 1, rapr, False, **PAPER) == pytest.approx((paper, 0.0))
    assert curiosity_terms("paper", 1, rapr, True, **PAPER) == pytest.approx((paper, 0.0))
    assert curiosity_terms("repo", 1, rapr, False, **PAPER) == pytest.approx((image, 0.0), abs=1e-6)
    assert curiosity_terms("repo", 1, rapr, True, **PAPER) == pytest.approx((video, 0.0), abs=1e-6)


@pytest.mark.parametrize("variant", ["paper", "repo"])
@pytest.mark.parametrize("looking", range(3, 9))
def test_no_bonus_where_enough_of_a_group_look(variant, looking):
    for is_video in (True, False):
        assert curiosity_terms(variant, 1, looking / 8, is_video, **PAPER) == (0.0, 0.0)


@pytest.mark.parametrize("variant", ["paper", "repo"])
def test_calls_above_the_free_ones_cost_whether_they_help_or_not(variant):
    costs = [curiosity_terms(variant, n, 1.0, False, **PAPER)[1] for n in range(6)]
    assert costs == pytest.approx([0, 0, -0.05, -0.1, -0.15, -0.2])
    assert curiosity_terms(variant, 4, 1.0, False, **(PAPER | {"free": 3, "penalty": 0.2}))[1] == pytest.approx(-0.2)


def test_without_curiosity_and_without_a_call_there_is_neither():
    for calls in range(5):
        assert curiosity_terms("none", calls, 1 / 8, False, **PAPER) == (0.0, 0.0)
    for variant in ("paper", "repo"):
        assert curiosity_terms(variant, 0, 0.0, True, **PAPER) == (0.0, 0.0)


def test_calls_below_the_free_ones_are_no_gain():
    assert [curiosity_terms("paper", n, 1.0, False, **(PAPER | {"free": 3})) for n in (1, 2, 3)] == [(0.0, 0.0)] * 3


@pytest.mark.parametrize("variant, bonus", [("paper", 0.5 * (0.3 - 1 / 16)), ("repo", 0.125 * (0.3 - 1 / 16) * 16)])
def test_the_share_is_of_the_group_whatever_its_size(variant, bonus):
    group = [episode(0.0, [call()]), *(episode(0.0) for _ in range(15))]
    shape_rewards(group, args(curiosity=variant))
    assert group[0].rewards["curiosity"] == pytest.approx(bonus)


def test_a_worked_group():
    """One of eight looks, twice, and is wrong; three of the others are right."""
    group = [episode(0.0, [call(), call()]), *(episode(float(i < 3)) for i in range(7))]
    shape_rewards(group, args())
    assert group[0].rewards == pytest.approx(
        {"score": 0.0875 - 0.05, "acc": 0.0, "curiosity": 0.0875, "call_cost": -0.05, "looks": 1.0}
    )
    assert [e.rewards["score"] for e in group[1:]] == [1, 1, 1, 0, 0, 0, 0]
    assert sum(is_correct(e.rewards) for e in group) == 3


def test_what_an_interaction_gives_is_added_to_the_shaped_reward():
    group = [episode(1.0, turn_rewards=[(1, 0.25), (3, -0.5)]), *(episode(0.0) for _ in range(3))]
    shape_rewards(group, args())
    assert [e.rewards["score"] for e in group] == [0.75, 0, 0, 0] and is_correct(group[0].rewards)


@pytest.mark.parametrize("share, replayed", [(0.0, 0), (0.25, 3), (0.5, 4), (1.0, 4)])
def test_replayed_samples_take_the_places_of_equal_groups_alone(tmp_path, world, share, replayed):
    """Of three groups of four one is equal: four places, and at most the share of twelve."""
    old = [episode(1.0, prompt=9) for _ in range(20)]
    memory = ReplayMemory(tmp_path, 20, 99, 0, world)
    memory.add(old, [1.0] * 20, 0)
    sampled = [episode(float(i == 0 and p < 2), prompt=p) for p in range(3) for i in range(4)]
    fresh, again = select(sampled, memory, args(replay_share=share), 1)
    assert [e.prompt_index for e in fresh] == [0] * 4 + [1] * 4 and len(again) == replayed


def test_groups_do_not_mix():
    many = [episode(0.0, [call()], prompt=1) for _ in range(8)]
    few = [episode(0.0, [call()] * (i == 0), prompt=2) for i in range(8)]
    mixed = [e for pair in zip(many, few) for e in pair]
    shape_rewards(mixed, args())
    assert [e.rewards["score"] for e in many] == [0.0] * 8
    assert few[0].rewards["score"] == pytest.approx(0.0875)


def test_failed_calls_count_when_attempted_and_not_when_successful():
    failed, refused = episode(0.0, [call(True)]), episode(0.0, [call()], reason="max_turns")
    assert (num_calls(failed, "attempted"), num_calls(failed, "successful")) == (1, 0)
    assert (num_calls(refused, "attempted"), num_calls(refused, "successful")) == (2, 1)
    group = [failed, *(episode(0.0) for _ in range(7))]
    shape_rewards(group, args(count_calls="successful"))
    assert failed.rewards["curiosity"] == 0.0 and failed.rewards["looks"] == 0.0


def test_the_frames_of_a_video_decide_the_variant_of_the_code():
    for media, divisor in (([Video()], 3), ([Video(), Image()], 3), ([Image()], 4)):  # selected frames are images
        group = [episode(0.0, [call()], media=media), *(episode(0.0) for _ in range(7))]
        shape_rewards(group, args(curiosity="repo"))
        assert group[0].rewards["curiosity"] == pytest.approx(0.7 / divisor)


def test_minus_one_does_not_leak_into_the_reward():
    """Defect: r = -1 for what could not be parsed entered the shaped reward."""
    group = [episode(-1.0), episode(1.0), episode(0.4), episode(10.0)]
    shape_rewards(group, args())
    assert [e.rewards["score"] for e in group] == [0.0, 1.0, 0.4, 1.0]


def test_the_veto_looks_at_the_trajectory_itself():
    """Defect: the flag of the last call was read with the index within the group, so from other trajectories."""
    group = [episode(1.0), episode(1.0, [call(), call(True)]), episode(1.0, [call(True), call()])]
    shape_rewards(group, args(veto_errors=True))
    assert [e.rewards["score"] for e in group] == pytest.approx([1.0, -0.05, 0.95])
    assert [e.rewards["acc"] for e in group] == [1.0, 1.0, 1.0], "accuracy is the scorer's, as in evaluation"
    again = [replace(e, rewards={"score": 1.0}) for e in group]
    shape_rewards(again, args())
    assert [e.rewards["score"] for e in again] == pytest.approx([1.0, 0.95, 0.95])


def test_the_formula_is_the_papers_unless_the_codes_is_asked_for():
    """Defect: the released code's bonus is not the paper's."""
    assert Args().curiosity == "paper"
    defaults = Args()
    assert (defaults.curiosity_alpha, defaults.call_penalty, defaults.curiosity_target, defaults.free_calls) == (
        0.5, 0.05, 0.3, 1,
    )  # fmt: skip
    assert (defaults.clip_low, defaults.clip_high, defaults.advantage) == (0.2, 0.35, "group-mean")
    assert not {"kl_in", "kl_coef", "entropy_coef", "dual_clip"} & vars(defaults).keys(), "nothing besides the clip"


# --- replay -------------------------------------------------------------------------------------------------------


def memory(world, folder, **options) -> ReplayMemory:
    return ReplayMemory(folder, **({"capacity": 100, "max_age": 3, "seed": 0, "world": world} | options))


def test_samples_are_replayed_by_their_advantage(world, tmp_path):
    m = memory(world, tmp_path, max_age=10**9)
    m.add([episode(float(i)) for i in range(3)], [0.1, -0.3, 0.6], step=0)
    drawn = [m.draw(1, step)[0].rewards["score"] for step in range(2000)]
    shares = np.bincount(np.array(drawn, dtype=int), minlength=3) / len(drawn)
    assert shares == pytest.approx([0.1, 0.3, 0.6], abs=0.04)


def test_what_taught_nothing_is_not_kept(world, tmp_path):
    m = memory(world, tmp_path)
    m.add([replace(episode(1.0), loss_mask=[0, 0, 0])], [0.7], step=0)
    m.add([episode(0.0), episode(1.0)], [0.0, 0.5], step=0)
    assert [e.rewards["advantage"] for e in m.draw(5, 0)] == [0.5]


def test_the_memory_forgets(world, tmp_path):
    """Defect: the released memory was never cleared."""
    m = memory(world, tmp_path)
    m.add([episode(1.0)], [0.5], step=4)
    assert [len(m.draw(1, step)) for step in (5, 6, 7)] == [1, 1, 1]
    assert m.draw(1, 8) == [] == m.episodes


def test_the_memory_is_bounded(world, tmp_path):
    m = memory(world, tmp_path, capacity=3)
    m.add([episode(float(i)) for i in range(5)], [0.5] * 5, step=0)
    assert [e.rewards["score"] for e in m.episodes] == [2.0, 3.0, 4.0]


def test_nothing_is_drawn_twice_and_each_is_a_prompt_of_its_own(world, tmp_path):
    m = memory(world, tmp_path)
    m.add([episode(float(i), prompt=i % 2) for i in range(6)], [0.5] * 6, step=0)
    drawn = m.draw(100, 1)
    assert sorted(e.rewards["score"] for e in drawn) == list(range(6))
    assert len({e.prompt_index for e in drawn}) == 6 and min(e.prompt_index for e in drawn) >= 10**9
    assert [e.rewards["score"] for e in m.draw(3, 1)] == [e.rewards["score"] for e in m.draw(3, 1)]
    assert m.draw(0, 1) == []


def test_ranks_and_runs_draw_apart(world, tmp_path):
    """No two ranks share a prompt's place; each has its own draw, as has each seed."""
    drawn = {}
    for rank, seed in ((0, 0), (1, 0), (2, 0), (0, 1)):
        m = memory(replace(world, rank=rank, size=3), tmp_path, seed=seed)
        m.add([episode(float(i)) for i in range(50)], [0.5] * 50, step=0)
        drawn[rank, seed] = m.draw(5, 1)
    places = [e.prompt_index for (rank, seed), part in drawn.items() for e in part if not seed]
    assert len(set(places)) == len(places) == 15
    assert len({tuple(e.rewards["score"] for e in part) for part in drawn.values()}) == 4


def test_a_disk_that_refuses_does_not_end_the_run(world, tmp_path, monkeypatch):
    """Files whose checkpoint is gone stay."""
    old = tmp_path / "step_000001.parquet"
    old.touch()

    def refuse(path):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(type(old), "unlink", refuse)
    memory(world, tmp_path).save(3, None, tmp_path / "checkpoints")
    assert old.exists()


def test_a_full_disk_leaves_the_memory_of_a_step_that_is_saved_again(world, tmp_path, monkeypatch):
    """At an outage of a judge the newest checkpoint is written once more."""
    m = memory(world, tmp_path / "replay_memory")
    m.add([episode(1.0)], [0.5], step=2)
    (tmp_path / "checkpoints/step_000003").mkdir(parents=True)
    monkeypatch.setattr("curiosity_rl.dump_rollouts", lambda *_: None)
    (tmp_path / "replay_memory").mkdir()
    (tmp_path / "replay_memory/step_000003.parquet").touch()
    m.save(3, None, tmp_path / "checkpoints")
    assert (tmp_path / "replay_memory/step_000003.parquet").is_file()


def test_what_is_kept_leaves_the_sample_of_this_step_as_it_was(world, tmp_path):
    """A dump tells replayed samples by their places: a reward function may have used any name for its own."""
    m, new = memory(world, tmp_path), episode(1.0)
    new.rewards |= {"born": "yesterday", "advantage": "none"}
    m.add([new], [0.5], step=0)
    assert new.rewards == {"score": 1.0, "born": "yesterday", "advantage": "none"} and new.prompt_index == 0
    (drawn,) = m.draw(1, 1)
    assert curiosity_rl.is_replayed(drawn) and not curiosity_rl.is_replayed(new)
    assert drawn.rewards["advantage"] == 0.5
    assert m.episodes[0].prompt_index == 0


def test_an_empty_memory_gives_nothing(world, tmp_path):
    """Defect: replay divided by zero when a rank had no group of unequal rewards."""
    m = memory(world, tmp_path)
    assert m.draw(4, 0) == []
    m.save(1, None, tmp_path)
    m.load(tmp_path / "checkpoints" / "step_000001", 1, None)
    assert m.episodes == [] and not list(tmp_path.iterdir())


def test_a_memory_of_other_ranks_is_left_alone(world, tmp_path, capsys):
    m = memory(world, tmp_path / "replay_memory")
    m.add([episode(1.0)], [0.5], step=2)
    m.save(3, build_tokenizer(), tmp_path / "checkpoints")
    m.world = replace(world, size=2)
    m.load(tmp_path / "checkpoints" / "step_000003", 3, None)
    assert m.episodes == [] and "on 1 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("damaged", ["step_000003.parquet", "step_000003.media_0.parquet"])
def test_a_damaged_memory_is_a_warning(world, tmp_path, capsys, damaged):
    m = memory(world, tmp_path / "replay_memory")
    m.add([episode(1.0)], [0.5], step=2)
    m.save(3, build_tokenizer(), tmp_path / "checkpoints")
    (m.folder / damaged).write_bytes(b"no parquet")
    m.load(tmp_path / "checkpoints" / "step_000003", 3, None)
    assert m.episodes == [] and "nothing is replayed from before step 3" in capsys.readouterr().out


def test_a_memory_is_found_beside_checkpoints_on_another_disk(world, tmp_path):
    (tmp_path / "other" / "disk" / "step_000003").mkdir(parents=True)
    (tmp_path / "checkpoints").symlink_to(tmp_path / "other" / "disk")
    m = memory(world, tmp_path / "replay_memory")
    m.add([episode(1.0)], [0.5], step=2)
    m.save(3, build_tokenizer(), tmp_path / "checkpoints")
    m.load(tmp_path / "checkpoints" / "step_000003", 3, None)
    assert len(m.episodes) == 1


def test_an_abandoned_memory_of_the_same_step_goes(world, tmp_path):
    m = memory(world, tmp_path / "replay_memory")
    m.add([episode(1.0)], [0.5], step=2)
    m.save(3, build_tokenizer(), tmp_path / "checkpoints")
    m.episodes = []
    m.save(3, build_tokenizer(), tmp_path / "checkpoints")
    assert not list(m.folder.iterdir())


def test_a_saved_memory_is_the_same_and_follows_the_checkpoints(world, tmp_path):
    m, rng = memory(world, tmp_path / "replay_memory"), random.Random(0)
    m.add([episode(rng.random(), [call()], prompt=i) for i in range(5)], [rng.gauss(0, 1) for _ in range(5)], step=2)
    for step in (3, 4):
        m.save(step, build_tokenizer(), tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)
    m.save(5, build_tokenizer(), tmp_path / "checkpoints")
    assert {path.name.partition(".")[0] for path in m.folder.iterdir()} == {"step_000004", "step_000005"}
    other = memory(world, tmp_path / "replay_memory")
    other.load(tmp_path / "checkpoints" / "step_000005", 5, None)
    assert other.episodes == m.episodes and other.draw(3, 3) == m.draw(3, 3)


# --- evaluation ---------------------------------------------------------------------------------------------------


def sample(group: int, correct: bool = False, calls: int = 0, errors: int = 0, source: str = "a", **more) -> dict:
    rest = {"data_source": source, "group": group, "score": float(correct), "correct": correct, "pred": ""}
    return rest | {"length": 1, "truncated": False, "calls": calls, "call_errors": errors, "anls": None} | more


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


def test_side_by_side_has_a_line_per_source_and_a_column_per_file(tmp_path):
    reports = {"with": [True, True, False, True], "without": [False, True, False, False]}
    paths = {name: tmp_path / f"{name}.parquet" for name in reports}
    for name, right in reports.items():
        rows = [sample(i, correct, source=source, row=i) for source in "ba" for i, correct in enumerate(right)]
        rows.append(sample(9, source="c", row=9))
        if name == "without":  # with tools this prompt was too long: to compare, nobody has it
            rows.append(sample(10, True, source="b", row=10))
        report(rows, paths[name])
    header, *lines = side_by_side(paths).splitlines()
    assert header.split() == ["source", "rows", "with", "without"]
    assert [line.split()[:3] for line in lines] == [["a", "4", "0.750"], ["b", "4", "0.750"], ["c", "1", "0.000"]]
    low, high = wilson_interval(0.25, 4)
    assert all(line.endswith(f"0.250 ({low:.3f} - {high:.3f})") for line in lines[:2])


# --- published rows -----------------------------------------------------------------------------------------------


def published(**changes) -> dict:
    row = {"question": "Which?", "answer": ["left"], "qid": "tallyqa-1", "image": ["images/a.jpg"], "is_video": None}
    return visual_qa.convert(row | changes, "file", "", True)


def test_rows_by_example():
    nothing = ([""], None), (None, None), (math.nan, None), ([math.nan], None)
    for answer, truths in (("left", ["left"]), (0, ["0"]), ([None, " ", "B"], ["B"]), *nothing):
        assert published(answer=answer)["reward_model"]["ground_truth"] == truths
    assert published(question=" ")["prompt"] is None and published(image=[{"path": "a"}])["prompt"] is None
    assert published(image=5)["prompt"] is None
    assert published(image="a")["images"] == ["a"] and published(qid="000123")["data_source"] == "visual_qa/file"
    asked = published(question="<video>Which <image>?", image=["a", "b"], is_video=True)
    assert asked["prompt"][0]["content"] == "<video>Which ?" + visual_qa.WITH_TOOLS and asked["videos"] == [["a", "b"]]
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


# --- flags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--curiosity", "none", "--curiosity-alpha", "1"],
        ["--curiosity", "none", "--free-calls", "2"],
        ["--no-filter-equal", "--replay-share", "0.2"],
        ["--replay-max-age", "3"],
        ["--loss-length", "200"],
        ["--tools", "", "--curiosity-alpha", "1"],
        ["--tools", "", "--count-calls", "successful"],
        ["--filter-equal", "--no-compare-tools", "--clip-high", "0.3"],
        ["--lr-schedule", "constant", "--lr-floor", "0.1"],
    ],
)
def test_flags_without_effect_are_refused(flags, monkeypatch):
    """Defect: many of the original's flags were ignored in silence."""
    with pytest.raises(SystemExit, match=f"{flags[-2]} .*has no effect"):
        checked_args(curiosity_rl, monkeypatch, "--model", "tiny-vl", *flags)


def test_a_memory_that_keeps_nothing_is_refused(monkeypatch):
    with pytest.raises(SystemExit, match="--replay-max-age 0: a sample is replayed in later steps"):
        checked_args(curiosity_rl, monkeypatch, "--replay-share", "0.5", "--replay-max-age", "0")


def test_calls_of_an_environment_are_paid_for_like_those_of_tools(monkeypatch):
    own = ["--tools", "", "--environment", "own.py:Own", "--train-data", "rows.jsonl"]
    own += ["--curiosity-alpha", "1", "--veto-errors", "--count-calls", "successful"]
    assert checked_args(curiosity_rl, monkeypatch, "--model", "x", *own).curiosity_alpha == 1


def test_the_constant_divisor_is_that_of_the_released_code():
    """Sum of token losses / 200 for each sequence: --reduction dr_grpo --loss-length 200."""
    weights = curiosity_rl.token_weights("dr_grpo", torch.tensor([3.0, 7.0]), 10.0, 4.0, 200)
    assert weights.tolist() == pytest.approx([1 / 800] * 2)
    assert not math.isnan(weights.sum())
