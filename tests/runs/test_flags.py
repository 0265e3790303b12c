"""How a command line is read: groups, ranges, demo defaults, flags without effect, and names that
are not ours."""

import ast
import inspect
import math
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from typing import get_args, get_type_hints
from unittest.mock import Mock

import pytest
from helpers import ROOT, checked_args, make_args, parsed
from rows import row, write

import curiosity_rl
import distill
import grpo
import ppo
import sft
from common import command_line, flags
from common.command_line import (
    HELP_COLUMN,
    check_ranges,
    expanded_arguments,
    flag,
    flat,
    help_lines,
    refuse_idle,
)
from common.data.prompts import PromptData
from common.flags import Data, Rollout, check_shared, parse
from common.foreign_flags import SCRIPTS_WITH, answer_to, foreign_keys
from common.hub import load_tokenizer, resolve_model

SCRIPTS = [grpo, ppo, curiosity_rl, distill, sft]
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)

# What numbers may be, from before they had types that say so: above 0, at most 1, of any sign; the
# others 0 or above.
LENGTHS = ["max_tokens", "max_prompt_tokens", "max_response_tokens", "max_turn_tokens"]
PICTURES = ["max_images", "min_pixels", "max_pixels", "max_frame_pixels"]
BATCHES = [
    "batch_size",
    "prompts_per_step",
    "samples_per_prompt",
    "minibatches",
    "micro_batch_tokens",
    "max_turns",
]
PASSES = ["epochs_per_step", "total_steps", "total_epochs", "max_rows", "eval_rows", "eval_samples"]
PROCESSES = ["reward_timeout", "tool_workers", "tool_timeout", "stall_minutes", "engine_memory"]
MACHINES = ["shard_size", "lora_alpha", "engine_parallel"]
OTHERS = ["temperature", "eval_top_p", "max_logprob_gap", "keep_checkpoints"]
TAUGHT = ["jsd_beta", "teacher_temperature"]
POSITIVE = [*LENGTHS, *PICTURES, *BATCHES, *PASSES, *PROCESSES, *MACHINES, *OTHERS, *TAUGHT]
SHARES = ["gamma", "gae_lambda", "lr_floor", "eval_top_p", "data_share"]
SHARES += ["activation_memory"]
ANY_SIGN = ["entropy_coef", "reward_model_weight"]
TEMPERATURES = ["temperature", "eval_temperature"]  # vLLM takes none above 2
NUMBERS = [
    -1e9,
    -1,
    -0.5,
    -1e-9,
    0,
    0.0,
    1e-9,
    0.5,
    1,
    1.0,
    1.5,
    2,
    1e9,
    math.inf,
    -math.inf,
    math.nan,
]


def called(monkeypatch, script, *arguments: str):
    """(args, is it the demo) of `script ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", [f"{script.__name__}.py", *arguments])
    return parse(script.Args, script.DEMO, script.__doc__)


def hints(args_class) -> dict:
    """{flag: its type} of a script's Args, with those of its groups."""
    own = get_type_hints(args_class)
    groups = {name: hint for name, hint in own.items() if is_dataclass(hint)}
    own = {name: hint for name, hint in own.items() if name not in groups}
    return own | {name: hint for group in groups.values() for name, hint in hints(group).items()}


def numeric(script) -> list[str]:
    return [
        name for name, hint in hints(script.Args).items() if {hint, *get_args(hint)} & {int, float}
    ]


def was_refused(name: str, value: float, hint: object) -> str | None:
    if value != value:
        return "must be a number"
    if value == math.inf and int in {hint, *get_args(hint)}:  # torch and Arrow count in 64 bits
        return "must not be above 9.0072e+15"
    if name in POSITIVE and not value > 0:
        return "must be above 0"
    if name in ("max_pixels", "max_frame_pixels") and not value >= 784:  # nothing is shown smaller
        return "must not be below 784"
    if name == "temperature" and value < 0.01:  # vLLM would sample with 0.01
        return "must not be below 0.01"
    if name in TEMPERATURES and value > 2:
        return "must not be above 2"
    # of so many, or of an infinity, no number of steps can be made
    if name == "total_epochs" and value > 1e6:
        return "must not be above 1e+06"
    if name == "jsd_beta" and not value < 1:
        return "must be below 1"
    if name in SHARES and not value <= 1:
        return "must not be above 1"
    return "must not be below 0" if name not in ANY_SIGN and not value >= 0 else None


# --- ranges ---------------------------------------------------------------------------------------


@every_script
def test_numbers_out_of_their_range_are_refused_by_their_flag(script, monkeypatch):
    """In whichever group they are; those that may also be None, too."""
    monkeypatch.setattr(command_line, "get_type_hints", cache(get_type_hints))  # a millisecond
    names = numeric(script)
    types = hints(script.Args)
    assert len(names) >= 20 and {
        "seed",
        "micro_batch_tokens",
        "learning_rate",
        "total_steps",
    } <= set(names)
    for name in names:
        for value in NUMBERS:
            args = make_args(script, **{name: value})
            problem = was_refused(name, value, types[name])
            if problem is None:
                check_ranges(args)
                continue
            with pytest.raises(SystemExit) as refusal:
                check_ranges(args)
            assert str(refusal.value) == f"{flag(name)} {value}: {problem}"


def test_the_old_list_names_flags_that_exist():
    assert {*POSITIVE, *SHARES, *ANY_SIGN, *TEMPERATURES} <= {
        name for script in SCRIPTS for name in numeric(script)
    }


@every_script
def test_defaults_and_what_is_not_given_are_in_their_ranges(script):
    for args in (script.Args(), script.DEMO):
        check_ranges(args)
    optional = [
        name for name in numeric(script) if type(None) in get_args(hints(script.Args)[name])
    ]
    assert "total_steps" in optional and flat(script.Args())["total_steps"] is None


@every_script
def test_a_range_is_checked_where_the_line_is_read(script, monkeypatch):
    with pytest.raises(SystemExit, match=r"^--max-grad-norm -1\.0: must not be below 0$"):
        called(monkeypatch, script, "--max-grad-norm", "-1")
    with pytest.raises(SystemExit, match=r"^--keep-checkpoints 0: must be above 0$"):
        called(monkeypatch, script, "--keep-checkpoints=0")


@every_script
def test_pictures_cannot_be_larger_than_the_largest(script, monkeypatch):
    args, _ = called(monkeypatch, script, "--min-pixels", "2000000")
    with pytest.raises(
        SystemExit, match=f"^--min-pixels 2000000: above --max-pixels {args.data.max_pixels}$"
    ):
        script.check_args(args)


@every_script
@pytest.mark.parametrize("given", ["--local-rank=1", "--local_rank=0"])
def test_the_old_launcher_is_answered_with_torchrun(script, given, monkeypatch):
    """It puts the rank before all that was typed."""
    with pytest.raises(
        SystemExit,
        match=r"^--local-rank is what python -m torch\.distributed\.launch .*: take torchrun$",
    ):
        called(monkeypatch, script, given, "--model", "tiny")


def test_without_docstrings_a_run_is_refused():
    """As `python -OO grpo.py` has it."""
    call = "from common import flags; flags.parse(object, None, None)"
    for options, told in (({"PYTHONOPTIMIZE": "2"}, True), ({"PYTHONOPTIMIZE": "1"}, False)):
        command = [sys.executable, "-c", call]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | options, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1 and ("python -OO" in done.stderr) == told
        assert not told or (
            done.stderr.count("\n") == 1 and "take python, or python -O" in done.stderr
        )


# --- groups ---------------------------------------------------------------------------------------


@every_script
def test_flat_has_every_flag_once(script):
    """A name in two groups would be one flag with two values."""
    args = script.Args()
    groups = [
        getattr(args, item.name) for item in fields(args) if is_dataclass(getattr(args, item.name))
    ]
    names = [
        item.name
        for part in (args, *groups)
        for item in fields(part)
        if not is_dataclass(getattr(part, item.name))
    ]
    assert sorted(flat(args)) == sorted(names) and len(groups) == (3 if script is sft else 4)
    assert flat(args)["seed"] is args.run.seed and flat(args)["learning_rate"] == args.learning_rate


@every_script
def test_a_flag_of_a_group_has_no_prefix_and_leaves_the_others_as_they_are(script, monkeypatch):
    args, _ = called(
        monkeypatch, script, "--model", "x", "--micro_batch_tokens", "77", "--max-rows=3"
    )
    changed = {"model": "x", "micro_batch_tokens": 77, "max_rows": 3}
    assert flat(args) == flat(script.Args()) | changed


@pytest.mark.parametrize(
    "typed, compiles", [([], None), (["--compile"], True), (["--no-compile"], False)]
)
def test_whether_layers_are_compiled_depends_unless_it_is_said(typed, compiles, monkeypatch):
    args, _ = called(monkeypatch, grpo, *typed)
    assert args.machine.compile is compiles


@pytest.mark.parametrize(
    "typed, expected",
    [
        ("--objective gspo", (3e-4, 4e-4, "grpo")),
        ("--objective gspo --model x --train-data x --clip_low=0.2", (0.2, 4e-4, "grpo")),
        ("--objective gspo --clip-high 0.2 --reduction dapo", (3e-4, 0.2, "dapo")),
        ("--objective cispo", (0.2, 0.2, "dapo")),
    ],
)
def test_gspo_has_defaults_of_its_own(typed, expected, monkeypatch):
    """Those of PPO would never clip. What is typed counts, be it PPO's default."""
    args = grpo.with_gspo_defaults(
        checked_args(grpo, monkeypatch, "--minibatches", "2", *typed.split())
    )
    assert (args.clip_low, args.clip_high, args.reduction) == expected


def test_the_scripts_differ_in_some_defaults_of_groups():
    assert (
        ppo.Args().rollout.samples_per_prompt == 1 and grpo.Args().rollout.samples_per_prompt == 8
    )
    assert curiosity_rl.Args().rollout.tools == "visual" and grpo.Args().rollout.tools is None
    assert sft.Args().run.eval_every == 0


# --- the demo -------------------------------------------------------------------------------------


@every_script
def test_without_a_model_all_defaults_are_the_demos(script, monkeypatch):
    args, demo = called(monkeypatch, script, "--seed", "3", "--no-eval-before")
    assert demo and flat(args) == flat(script.DEMO) | {"seed": 3, "eval_before": False}
    assert script.DEMO.run.seed == 0, "the demo itself is as it was"


@every_script
@pytest.mark.parametrize("arguments", [["--model=x"], ["--model", "x"]])
def test_with_a_model_none_is(script, arguments, monkeypatch):
    args, demo = called(monkeypatch, script, *arguments)
    assert not demo and flat(args) == flat(script.Args()) | {"model": "x"}


def shown_by(monkeypatch, capsys, script, ask: str) -> str:
    monkeypatch.setattr("sys.argv", [f"{script.__name__}.py", ask])
    with pytest.raises(SystemExit) as stop:
        parse(script.Args, script.DEMO, script.__doc__, script.FIRST_SCREEN)
    assert stop.value.code == 0
    return capsys.readouterr().out


def texts_of(script) -> dict[str, str]:
    """{flag: the comment behind it, or above it}, of a script and its groups."""
    groups = [type(value) for value in vars(script.Args()).values() if is_dataclass(value)]
    texts = {}
    for part in [script.Args, *groups]:
        comment = ""
        for line in inspect.getsource(part).splitlines():
            if line.startswith("    # "):
                comment += line.removeprefix("    #")
                continue
            code, _, behind = line.partition("  # ")
            found = re.match(r"    (\w+): ", code)
            if found and (behind or comment):
                texts[flag(found[1])] = behind or comment.strip()
            comment = ""
    return texts


@every_script
def test_help_is_one_screen_and_help_all_has_all(script, monkeypatch, capsys):
    """The first screen has the first part of each text; both have the defaults of a run, and the
    commands."""
    lines = shown_by(monkeypatch, capsys, script, "--help").splitlines()
    if script is sft:  # the one with the fewest
        assert shown_by(monkeypatch, capsys, script, "-h").splitlines() == lines
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    assert (
        lines[0] == script.__doc__.partition("\n")[0]
        and f"torchrun --nproc_per_node 2 {script.__name__}.py" in lines[2]
    )
    texts = texts_of(script)
    assert texts.keys() == {flag(name) for name in flat(script.Args())}
    first = script.FIRST_SCREEN.split()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert shown == [f"--{name}" for name in first] and len(set(first)) == len(first) <= 30
    joined = " ".join(" ".join(lines).split())
    for name in shown:
        assert texts[name].partition("; ")[0] in joined, name
    assert "1e-06" in joined or script is sft
    assert f"--model {script.DEMO.run.model} " in joined
    # its texts: tests/runs/test_scripts.py
    whole = shown_by(monkeypatch, capsys, script, "--help-all")
    assert all(re.search(rf"{name}\b", whole) for name in texts)
    assert "8e-05" not in whole + joined and "Where this differs" not in whole + joined


# --- flags without effect -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    ["--eval-only", "--no-eval-only", "--eval_only", "--engine-memory 3", "--engine_memory=3"],
)
def test_what_is_given_in_vain_is_refused(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo.py", *arguments.split()])
    name = "engine_memory" if "memory" in arguments else "eval_only"
    rollout = Rollout(engine_memory=3.0, eval_only=True)
    with pytest.raises(SystemExit) as refusal:
        refuse_idle(rollout, {"tools": (False, "x"), name: (False, "a reason")})
    assert (
        str(refusal.value) == f"{flag(name)} {getattr(rollout, name)} has no effect: needs a reason"
    )
    refuse_idle(rollout, {name: (True, "a reason"), "tools": (False, "x")})


def test_what_was_not_typed_is_never_in_vain(monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo.py", "--model", "engine-memory", "--max-rows", "3"])
    uses = dict.fromkeys(["engine_memory", "eval_only", "tools"], (False, "a reason"))
    assert refuse_idle(Rollout(engine_memory=3.0), uses) is None


@pytest.mark.parametrize(
    "given, message",
    [
        ("--eval-only --replay x", "--replay is of training, --eval-only does none"),
        ("--model x", "--model x needs --train-data"),
        ("--model tinny", "--model tinny needs --train-data; tiny brings rows of its own"),
        ("--model x --eval-only", "--model x needs --eval-data"),
        ("--model x --eval-only --train-data y", "--model x needs --eval-data"),
        ("--train-data y --eval-only", "--model tiny needs --eval-data"),
        (
            "--model x --train-data y --eval-rows 3",
            "--eval-rows 3 has no effect: needs --eval-data",
        ),
        (
            "--model x --train-data y --eval-temperature 1",
            "--eval-temperature 1.0 has no effect: needs --eval-data",
        ),
        (
            "--total-steps 3 --total-epochs 2",
            "--total-epochs 2.0 has no effect: needs --total-steps None",
        ),
        ("--tool-timeout 3", "--tool-timeout 3.0 has no effect: needs --tools or --environment"),
        ("--deterministic", "--deterministic True has no effect: needs --tools or --environment"),
        ("--eval-top-p 0.5", "--eval-top-p 0.5 has no effect: needs an --eval-temperature above 0"),
    ],
)
def test_what_the_rl_scripts_refuse_of_shared_flags(given, message, monkeypatch):
    args, _ = called(monkeypatch, grpo, *given.split())
    with pytest.raises(SystemExit) as refusal:
        check_shared(args.data, args.run, args.rollout)
    assert str(refusal.value) == message


# --- names that are not ours ----------------------------------------------------------------------


@pytest.mark.parametrize("space", [" ", "\t", " \n"])
def test_a_lone_space_is_a_backslash_that_was_not_the_last_character(space, monkeypatch):
    with pytest.raises(
        SystemExit, match="a backslash that continues a line must be its last character"
    ):
        called(monkeypatch, grpo, "--model", "x", space, "--seed", "3")
    args, _ = called(monkeypatch, curiosity_rl, "--tools", "")
    assert args.rollout.tools == "", "an empty value is one"


@every_script
@pytest.mark.parametrize(
    "given", [["--output-dir", ""], ["--train-data="], ["--model", "x", "--eval-data", ""]]
)
def test_an_empty_value_is_an_unset_variable(script, given, monkeypatch):
    """It would be the current folder, or the demo's data."""
    name = given[-2] if given[-1] == "" else given[-1].removesuffix("=")
    with pytest.raises(SystemExit, match=f"^{name} is empty: an unset variable"):
        called(monkeypatch, script, *given)


def test_an_empty_argument_is_told_by_its_place(monkeypatch):
    """`--seed 1 "$EXTRA"`, where EXTRA is not set."""
    with pytest.raises(SystemExit, match=r"^an empty argument stands behind 1: an unset variable"):
        called(monkeypatch, grpo, "--seed", "1", "")
    with pytest.raises(SystemExit, match=r"^--train_data is followed by no file"):
        called(monkeypatch, grpo, "--train_data", "--model", "x")


def test_a_default_that_is_longer_than_its_column_has_a_line_of_its_own():
    action = Mock(option_strings=["--model"], help="folder or hub id (default: x)", metavar="STR")
    name = "Qwen/Qwen2.5-VL-72B-Instruct"
    assert help_lines(action, name) == [f"  --model {name}", " " * HELP_COLUMN + "folder or hub id"]
    action.help = "(default: x)"
    assert help_lines(action, "x") == ["  --model x"], "a fork's flag without a text"


@pytest.mark.parametrize("script", [grpo, ppo], ids=["grpo", "ppo"])
def test_a_correction_that_leaves_nothing_is_refused(script, monkeypatch):
    for correction, low, high in (("mask", 3, 2), ("sequence", 0.5, 0.4), ("truncate", 0, 0)):
        given = ["--correction", correction, "--correction-range", f"{low}", f"{high}"]
        with pytest.raises(
            SystemExit,
            match=r"^--correction-range [\d. ]+: the second number must be above the first$",
        ):
            checked_args(script, monkeypatch, *given)
    checked_args(script, monkeypatch, "--correction", "truncate", "--correction-range", "0", "0.3")
    checked_args(script, monkeypatch, "--correction", "truncate")
    with pytest.raises(
        SystemExit, match=r"^--correction-range 0\.5 3: truncate has no lower bound, give 0 3$"
    ):
        checked_args(
            script, monkeypatch, "--correction", "truncate", "--correction-range", "0.5", "3"
        )
    with pytest.raises(SystemExit, match=r"^--correction-range nan: must be a number$"):
        checked_args(
            script, monkeypatch, "--correction", "mask", "--correction-range", "0.5", "nan"
        )
    with pytest.raises(SystemExit, match=r"^--correction-range -1\.0: must not be below 0$"):
        checked_args(script, monkeypatch, "--correction", "mask", "--correction-range", "-1", "2")


@pytest.mark.parametrize("script", [curiosity_rl, sft], ids=["curiosity_rl", "sft"])
def test_a_script_without_a_reference_model_neither_shows_nor_takes_one(
    script, monkeypatch, capsys
):
    screen = shown_by(monkeypatch, capsys, script, "--help")
    assert "--offload NAMES" in screen and "reference" not in screen
    with pytest.raises(
        SystemExit, match=rf"--offload reference: {script.__name__}\.py has no reference model"
    ):
        checked_args(script, monkeypatch, "--offload", "optimizer,reference")


def test_sft_has_no_engine_to_make_room_for(monkeypatch):
    with pytest.raises(SystemExit, match=r"--offload base: sft\.py has no engine"):
        checked_args(sft, monkeypatch, "--lora-rank", "4", "--offload", "base")


@pytest.mark.parametrize(
    "script, given, name, answer",
    [
        (ppo, ["--objective", "gspo"], "--objective", "grpo.py has it"),
        (ppo, ["--dynamic_sampling=5"], "--dynamic-sampling", "grpo.py has it"),
        (curiosity_rl, ["--kl-loss-coef", "0.1"], "--kl-loss-coef", "grpo.py and ppo.py have it"),
        (grpo, ["--gamma", "0.9"], "--gamma", "ppo.py has it"),
        (grpo, ["--curiosity-alpha", "1"], "--curiosity-alpha", "curiosity_rl.py has it"),
        (grpo, ["--model", "x", "--batch-size", "4"], "--batch-size", "sft.py has it"),
        (
            sft,
            ["--epochs-per-step", "2"],
            "--epochs-per-step",
            "grpo.py, ppo.py, curiosity_rl.py and distill.py have it",
        ),
        (curiosity_rl, ["--no-mask-truncated"], "--mask-truncated", "grpo.py and ppo.py have it"),
    ],
)
def test_a_flag_of_another_script_is_named_with_it(script, given, name, answer, monkeypatch):
    with pytest.raises(SystemExit) as refusal:
        called(monkeypatch, script, *given)
    assert str(refusal.value) == f"{script.__name__}.py has no {name}: {answer}"


def test_the_table_says_which_scripts_have_a_flag_that_others_have_not():
    owners: dict[str, list[str]] = {}
    for script in SCRIPTS:
        groups = {name for name, hint in get_type_hints(script.Args).items() if is_dataclass(hint)}
        for item in fields(script.Args):
            if item.name not in groups:
                owners.setdefault(flag(item.name), []).append(f"{script.__name__}.py")
    expected = {name: scripts for name, scripts in owners.items() if len(scripts) < len(SCRIPTS)}
    table = {name: re.split(", | and ", scripts) for name, scripts in SCRIPTS_WITH.items()}
    assert table == expected


@pytest.mark.parametrize(
    "given, told",
    [
        ("--learning-rte 1e-5", "--learning-rate"),
        ("--minibatches x", "'x'"),
        ("--bad-rows x", "'drop'"),
    ],
)
def test_a_flag_or_value_that_is_wrong_is_an_error_that_names_the_nearest_and_where_all_are(
    given, told, monkeypatch, capsys
):
    with pytest.raises(SystemExit) as stop:
        called(monkeypatch, grpo, *given.split())
    captured = capsys.readouterr()
    assert stop.value.code not in (0, None) and told in captured.err
    assert captured.err.endswith("\nall flags: python grpo.py --help-all\n")
    assert "--help " not in captured.out + captured.err


@pytest.mark.parametrize(
    "given, message",
    [
        (
            ["actor_rollout_ref.rollout.n=8"],
            "actor_rollout_ref.rollout.n: here --samples-per-prompt;",
        ),
        (
            ["+actor_rollout_ref.rollout.n=8"],
            "actor_rollout_ref.rollout.n: here --samples-per-prompt;",
        ),
        (["--num-generations", "8"], "--num-generations: here --samples-per-prompt ("),
        (["--num_generations=8"], "--num-generations: here --samples-per-prompt ("),
        (["--seed", "3", "--beta", "0.1"], "--beta: here --kl-loss-coef ("),
        (["--optim=adamw"], "--optim: AdamW with betas"),
        (["--kl-in", "loss"], "--kl-in: here --kl-loss-coef, --kl-reward-coef ("),
        (["--no-whiten"], "--whiten: advantages are always whitened;"),
        (["--critic_lambda=1"], "--critic-lambda: the critic's targets are the plain returns"),
        (["--save-every-epoch"], "--save-every-epoch: here --save-every epoch ("),
    ],
)
def test_keys_of_verl_and_trl_and_flags_that_are_gone_are_answered(given, message, monkeypatch):
    with pytest.raises(SystemExit) as refusal:
        called(monkeypatch, grpo, *given)
    assert str(refusal.value).startswith(f"grpo.py has no {message}")
    assert str(refusal.value).endswith("; see docs/from_verl_trl.md")


# the command of TinyZero's scripts/train_tiny_zero.sh, as its notes and logs have it
TINYZERO = """
data.train_files=countdown/train.parquet
data.val_files=countdown/test.parquet
data.train_batch_size=256
data.val_batch_size=1312
data.max_prompt_length=256
data.max_response_length=1024
actor_rollout_ref.model.path=Qwen2.5-0.5B
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=128
actor_rollout_ref.actor.ppo_micro_batch_size=8
actor_rollout_ref.rollout.log_prob_micro_batch_size=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size=4
critic.model.enable_gradient_checkpointing=True
critic.optim.lr=1e-5
critic.model.path=Qwen2.5-0.5B
critic.ppo_micro_batch_size=8
algorithm.kl_ctrl.kl_coef=0.001
trainer.logger=[wandb]
+trainer.val_before_train=False
trainer.default_hdfs_dir=null
trainer.n_gpus_per_node=1
trainer.nnodes=1
trainer.save_freq=100
trainer.test_freq=100
trainer.project_name=TinyZero
trainer.experiment_name=countdown-qwen2.5-0.5b
trainer.total_epochs=15
"""
# of Pixel Reasoner's instruction_tuning/sft.sh
SFT_SH = """
--deepspeed zero2.json --output_dir output/test --model_name_or_path Qwen2.5-VL-7B-Instruct
--datasetpath processed.json --lr_scheduler_type cosine --warmup_ratio 0.1 --eval_strategy no
--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --logging_steps 1 --bf16
--learning_rate 1e-6 --torch_dtype bfloat16 --data_seed 49 --report_to none
--gradient_checkpointing true --attn_implementation flash_attention_2 --num_train_epochs 5
--run_name test --save_strategy epoch --save_steps 100 --save_only_model true
--freeze_vision_modules true
"""
NOTHING = "nothing that we know of"


def answers_to(monkeypatch, script, pasted: str) -> dict[str, str]:
    """{key: its answer} of the one refusal of a pasted command line."""
    with pytest.raises(SystemExit) as refusal:
        called(monkeypatch, script, *pasted.split())
    first, *lines, last = str(refusal.value).splitlines()
    assert first == f"{script.__name__}.py takes none of these {len(lines)}:"
    assert last == "see docs/from_verl_trl.md"
    return dict(line.removeprefix("  ").split(": ", maxsplit=1) for line in lines)


def test_a_pasted_command_of_tinyzero_is_answered_at_once(monkeypatch):
    answers = answers_to(monkeypatch, ppo, TINYZERO)
    keys = [line.partition("=")[0].lstrip("+") for line in TINYZERO.split()]
    assert list(answers) == keys and len(keys) == 29
    assert not any(NOTHING in answer or "row above" in answer for answer in answers.values())
    assert answers["data.train_batch_size"].startswith("here --prompts-per-step (")
    assert "GiB" in answers["actor_rollout_ref.rollout.gpu_memory_utilization"]
    assert "tokens, not sequences" in answers["critic.ppo_micro_batch_size"]
    unset = re.sub("=.*", "=", TINYZERO)  # $BASE_MODEL and its like are not set in this shell
    assert answers_to(monkeypatch, ppo, unset) == answers


def test_a_pasted_command_of_pixel_reasoner_is_answered_at_once(monkeypatch):
    answers = answers_to(monkeypatch, sft, SFT_SH)
    given = {flag(word.removeprefix("--")) for word in SFT_SH.split() if word.startswith("--")}
    assert answers.keys() == given - {"--output-dir", "--learning-rate"}
    assert answers["--datasetpath"].startswith("here --train-data (")
    assert answers["--gradient-checkpointing"].startswith("takes no value: ")


def test_what_nobody_knows_is_listed_beside_what_is_answered(monkeypatch):
    answers = answers_to(monkeypatch, grpo, "--beta 0.1 --nobodys 3 data.nobodys=3 --data.mine=1")
    assert [name for name, answer in answers.items() if answer.startswith(NOTHING)] == [
        "data.nobodys",
        "--data.mine",
        "--nobodys",
    ]


def test_a_switch_that_is_turned_off_hides_no_key(monkeypatch):
    """However it is spelled."""
    for switch in ("--eval-before", "--no-eval-before", "--eval_before", "--no_eval_before"):
        answers = answers_to(monkeypatch, grpo, f"--beta 0.1 {switch} data.train_files=a")
        assert answers.keys() == {"data.train_files", "--beta"}


def test_a_typo_beside_a_foreign_flag_is_answered_with_the_nearest_name(monkeypatch):
    answers = answers_to(monkeypatch, grpo, "--beta 0.1 --modle tiny --learning_rte=1")
    assert answers["--modle"] == f"{NOTHING}; perhaps --model"
    assert answers["--learning-rte"] == f"{NOTHING}; perhaps --learning-rate"


@pytest.mark.parametrize(
    "script, name, lacking",
    [
        (grpo, "--max-length", "; grpo.py has no --max-tokens: sft.py has it"),
        (sft, "--max-length", ""),
        (sft, "--num-generations", "; sft.py has no --samples-per-prompt: grpo.py, ppo.py, "),
        (grpo, "--num-generations", ""),
        (curiosity_rl, "--beta", "; curiosity_rl.py has no --kl-loss-coef: grpo.py and ppo.py "),
    ],
)
def test_an_answer_with_a_flag_that_the_script_lacks_says_who_has_it(
    script, name, lacking, monkeypatch
):
    with pytest.raises(SystemExit) as refusal:
        called(monkeypatch, script, name, "1")
    message = str(refusal.value)
    assert message.startswith(f"{script.__name__}.py has no {name}: here --") and lacking in message
    assert message.count(" has no ") == (2 if lacking else 1)


def test_answers_have_no_marks_of_the_page():
    assert len(foreign_keys()) > 400
    for name in [*foreign_keys(), *SCRIPTS_WITH]:
        answer = answer_to(name, set(), set())
        assert not re.search(r"`|\\|\]\(|\(\([^()]*\)\)", answer), f"{name}: {answer}"


@pytest.mark.parametrize("given", ["trainer.nobodys=1", "+nobodys=1", "--trainer.nobodys=1"])
def test_any_key_with_a_dot_or_a_plus_is_answered_with_the_page(given, monkeypatch):
    name = given.removeprefix("+").partition("=")[0]
    message = re.escape(f"grpo.py has no {name}: {NOTHING}; see docs/from_verl_trl.md")
    with pytest.raises(SystemExit, match=f"^{message}$"):
        called(monkeypatch, grpo, given)


@pytest.mark.parametrize(
    "given", [["true"], ["False"], ["=1"]], ids=["true", "False", "an equals sign"]
)
@pytest.mark.parametrize("name", ["gradient-checkpointing", "eval_before", "compile"])
def test_a_switch_takes_no_value(name, given, monkeypatch):
    words = [f"--{name}{given[0]}"] if given[0].startswith("=") else [f"--{name}", *given]
    name = name.replace("_", "-")
    with pytest.raises(
        SystemExit, match=f"^--{name} takes no value: write --{name}, or --no-{name}$"
    ):
        called(monkeypatch, grpo, "--seed", "3", *words)


def test_a_file_behind_a_flag_is_no_key(monkeypatch):
    args, _ = called(monkeypatch, grpo, "--train-data", "year.of=2024.parquet")
    assert args.data.train_data == "year.of=2024.parquet"


def test_values_and_names_of_ours_are_not_looked_up(monkeypatch):
    given = [
        "--seed",
        "3",
        "--no-eval-before",
        "--output-dir",
        "runs/lr=0.1",
        "--reward-function",
        "beta",
    ]
    foreign_keys.cache_clear()
    args, _ = called(monkeypatch, grpo, *given)
    assert foreign_keys.cache_info().misses == 0, "the file of other systems' flags is not read"
    assert (args.run.seed, str(args.run.output_dir), args.rollout.reward_function) == (
        3,
        "runs/lr=0.1",
        "beta",
    )


# --- bad_rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad, reason", [(row(prompt=[]), "unusable"), (row("long " * 99), "--max-prompt-tokens 64")]
)
def test_bad_rows_stop_a_run_or_are_counted_and_dropped(bad, reason, tmp_path, capsys):
    """Unusable and too long alike: one flag for both."""
    file = write(tmp_path / "rows.jsonl", [row("one"), bad, row("two")])
    options = {"tokenizer": load_tokenizer(resolve_model("tiny"))}
    rollout = Rollout(max_prompt_tokens=64)
    with pytest.raises(
        ValueError, match=rf"(?s)1 .*{reason}.*--bad-rows drop drops them.*rows\.jsonl line 2: "
    ):
        PromptData(file, Data(), rollout, **options)
    data = PromptData(file, Data(bad_rows="drop"), rollout, **options)
    assert [data[i].index for i in range(len(data))] == [0, 2]
    told = capsys.readouterr().out
    assert told.count("warning: ") == 1 and "1 " in told and reason in told and "dropped" in told


@every_script
def test_bad_rows_are_an_error_unless_it_is_said_otherwise(script, monkeypatch, capsys):
    assert script.Args().data.bad_rows == script.DEMO.data.bad_rows == "error"
    args, _ = called(monkeypatch, script, "--bad-rows", "drop")
    assert args.data.bad_rows == "drop"
    with pytest.raises(SystemExit):
        called(monkeypatch, script, "--bad-rows", "ignore")
    assert "ignore" in "".join(capsys.readouterr())


PATHS = ["~/x", "a.parquet,~/b.jsonl", "~/reward.py:score", "visual,~/tools.py:Pen"]


@pytest.mark.parametrize("value", PATHS)
def test_a_home_folder_is_one_wherever_a_path_begins(value, monkeypatch, tmp_path):
    """A shell leaves it as it is behind an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = value.replace("~", str(tmp_path))
    args, _ = called(
        monkeypatch, grpo, f"--output-dir={value}", f"--train_data={value}", "--tools", value
    )
    assert (str(args.run.output_dir), args.data.train_data, args.rollout.tools) == (
        expected,
        expected,
        expected,
    )
    monkeypatch.setattr("sys.argv", ["look", value, "a~/b", "--a=b~", "~no-such-user/x"])
    assert expanded_arguments() == [expected, "a~/b", "--a=b~", "~no-such-user/x"]


def test_without_a_home_folder_none_is_made_of_its_sign(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(SystemExit, match=r"^--output-dir=~/x: there is no home folder$"):
        called(monkeypatch, sft, "--output-dir=~/x")


def test_every_program_reads_its_command_line_like_that_and_shows_its_docstring(
    monkeypatch, capsys
):
    """Line by line: commands that stand below each other are no paragraph."""
    programs = {}
    for file in [*ROOT.glob("common/**/*.py"), *ROOT.glob("papers/**/*.py")]:
        tree = parsed(file.read_text())
        for node in ast.walk(tree):
            called_name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called_name != "tyro.cli" or file == ROOT / "common/flags.py"
            if called_name == "call_program":
                _, module, doc = map(ast.unparse, node.args)
                name = (
                    str(file.relative_to(ROOT))
                    .removesuffix(".py")
                    .removesuffix("/__main__")
                    .replace("/", ".")
                )
                assert (module, doc) == (repr(name), "__doc__")
                programs[name] = ast.get_docstring(tree, clean=False)
    assert len(programs) > 10

    def nothing() -> None: ...

    for name, doc in programs.items():
        monkeypatch.setattr("sys.argv", [name, "--help"])
        with pytest.raises(SystemExit):
            flags.call_program(nothing, name, doc)
        shown = capsys.readouterr().out.splitlines()
        assert (
            set(doc.strip().splitlines()) <= set(shown) and f"usage: python -m {name} [-h]" in shown
        )


def test_a_program_starts_behind_all_of_its_definitions():
    files = [*ROOT.glob("*.py"), *ROOT.glob("common/**/*.py"), *ROOT.glob("papers/**/*.py")]
    num_programs = 0
    for file in files:
        statements = [ast.unparse(node) for node in parsed(file.read_text()).body]
        starts = [text.startswith("if __name__ == '__main__':") for text in statements]
        if any(starts):
            assert starts.index(True) == len(starts) - 1, file
            num_programs += 1
    assert num_programs > 10
