"""Answers to flags that a script does not have: what a key of another system (TRL, verl, ...) is
here, which script has a flag, what became of one that is gone."""

import difflib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from common.command_line import flag

# {key: [what it is here, a note]} by the headings of docs/from_verl_trl.md
TABLES = Path(__file__).with_suffix(".toml")
SEE_PAGE = "; see docs/from_verl_trl.md"
# data.train_files=a.parquet, +trainer.nnodes=1, +debug=True
KEY_OF_VERL = re.compile(r"\+*([a-z_]\w*(?:\.[a-z_]\w*)+|(?<=\+)\w+)=.*", re.IGNORECASE | re.DOTALL)
NAME = re.compile(r"--[a-z][a-z-]*")  # a flag in an answer
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")  # a page's [text](address)
SIMILAR = 0.7  # of 1: how similar a flag must be to be proposed for an unknown one
BOOLEANS = ("true", "false", "yes", "no", "1", "0")  # what other systems write behind a switch
SCRIPTS_WITH = {  # the flags that only some scripts have, without those of groups
    "--objective": "grpo.py",
    "--advantage": "grpo.py and curiosity_rl.py",
    "--reduction": "grpo.py, ppo.py and curiosity_rl.py",
    "--clip-low": "grpo.py, ppo.py, curiosity_rl.py and distill.py",
    "--clip-high": "grpo.py, ppo.py, curiosity_rl.py and distill.py",
    "--dual-clip": "grpo.py, ppo.py and distill.py",
    "--minibatches": "grpo.py, ppo.py, curiosity_rl.py and distill.py",
    "--epochs-per-step": "grpo.py, ppo.py, curiosity_rl.py and distill.py",
    "--entropy-coef": "grpo.py and ppo.py",
    "--correction": "grpo.py and ppo.py",
    "--correction-range": "grpo.py and ppo.py",
    "--kl-reward-coef": "grpo.py and ppo.py",
    "--kl-loss-coef": "grpo.py and ppo.py",
    "--kl-estimator": "grpo.py and ppo.py",
    "--overlong-buffer": "grpo.py and ppo.py",
    "--mask-truncated": "grpo.py and ppo.py",
    "--dynamic-sampling": "grpo.py",
    "--oversample": "grpo.py",
    "--tool-bonus": "grpo.py",
    "--gamma": "ppo.py",
    "--gae-lambda": "ppo.py",
    "--value-clip": "ppo.py",
    "--critic-model": "ppo.py",
    "--reward-model": "ppo.py",
    "--reward-model-weight": "ppo.py",
    "--critic-learning-rate": "ppo.py",
    "--critic-warmup-steps": "ppo.py",
    "--curiosity": "curiosity_rl.py",
    "--curiosity-alpha": "curiosity_rl.py",
    "--curiosity-target": "curiosity_rl.py",
    "--call-penalty": "curiosity_rl.py",
    "--free-calls": "curiosity_rl.py",
    "--teacher": "distill.py",
    "--divergence": "distill.py",
    "--jsd-beta": "distill.py",
    "--estimator": "distill.py",
    "--teacher-temperature": "distill.py",
    "--teacher-prompt-column": "distill.py",
    "--data-share": "distill.py",
    "--response-column": "distill.py",
    "--eval-teacher": "distill.py",
    "--max-tokens": "sft.py",
    "--batch-size": "sft.py",
    "--save-weights-only": "sft.py",
}


def refuse_foreign_flags(
    arguments: list[str], script_flags: set[str], rollout_flags: set[str], switches: set[str]
) -> None:
    """SystemExit with an answer to each flag and key that the script does not have, if at least one
    of them is another script's or system's, or if a value stands behind a flag that takes none.

    script_flags: those that the script has; rollout_flags: those of the group that sft.py lacks;
    switches: those of script_flags that take no value.
    """
    refusals: dict[str, str] = {}  # {flag or key: its answer}
    # left to tyro, which names the nearest flag, unless there is a refusal
    unknown: dict[str, str] = {}
    for argument, previous, following in neighbours(arguments):
        follows_flag = previous.startswith("--") and "=" not in previous
        is_value = follows_flag and flag_of(previous) not in switches
        key = None if is_value else KEY_OF_VERL.fullmatch(argument)
        if key:
            answer = answer_to(flag(key[1]), script_flags, rollout_flags)
            refusals[key[1]] = answer or f"nothing that we know of{SEE_PAGE}"
            continue
        if not argument.startswith("--"):
            continue
        spelling, _, value = argument.partition("=")
        name = flag_of(spelling)
        if name in switches:
            if (value or following).lower() in BOOLEANS:
                refusals[name] = f"takes no value: write {name}, or {flag('no-' + name[2:])}"
            continue
        if name in script_flags or name in ("--help", "--help-all"):
            continue
        answer = answer_to(name, script_flags, rollout_flags)
        if answer:
            refusals[name] = answer
        elif "." in name:
            refusals[name] = f"nothing that we know of{SEE_PAGE}"
        else:
            unknown[name] = f"nothing that we know of; {nearest(name, script_flags)}"
    if refusals:
        raise SystemExit(refusal_text(refusals | unknown, switches))


def flag_of(spelling: str) -> str:
    """The flag that is typed: --no_compile and --compile are --compile."""
    name = spelling.lstrip("-").replace("_", "-")
    return flag(name.removeprefix("no-"))


def nearest(name: str, script_flags: set[str]) -> str:
    """Where to look for an unknown flag: at the script's flag with the most similar name."""
    names = [script_flag.removeprefix("--") for script_flag in sorted(script_flags)]
    similar = difflib.get_close_matches(name.removeprefix("--"), names, n=1, cutoff=SIMILAR)
    return f"perhaps --{similar[0]}" if similar else "--help-all shows all flags"


def neighbours(arguments: list[str]) -> Iterator[tuple[str, str, str]]:
    """Each argument with the one before it and the one behind it; "" where there is none."""
    return zip(arguments, ["", *arguments], [*arguments[1:], ""])


def refusal_text(refusals: dict[str, str], switches: set[str]) -> str:
    """A sentence for one refusal, a list for several."""
    script = Path(sys.argv[0]).name
    if len(refusals) == 1:
        ((name, answer),) = refusals.items()
        return f"{name} {answer}" if name in switches else f"{script} has no {name}: {answer}"
    lines = [f"{script} takes none of these {len(refusals)}:"]
    for name, answer in refusals.items():
        lines.append(f"  {name}: {answer.removesuffix(SEE_PAGE)}")
    if any(answer.endswith(SEE_PAGE) for answer in refusals.values()):
        lines.append(SEE_PAGE.removeprefix("; "))
    return "\n".join(lines)


def answer_to(name: str, script_flags: set[str], rollout_flags: set[str]) -> str:
    """What a flag or key is here, or which scripts have it; "" if we know nothing of it. An answer
    with a flag that this script lacks says which ones have that."""
    key = foreign_keys().get(name)
    if not key:
        return owners_of(name, rollout_flags)
    replacement, note = key
    if re.fullmatch(r"\([^()]*\)", note):
        note = note[1:-1]
    if replacement == "none":
        answer = note
    elif note:
        answer = f"here {replacement} ({note})"
    else:
        answer = f"here {replacement}"
    for our_flag in NAME.findall(replacement):
        owners = owners_of(our_flag, rollout_flags)
        if owners and our_flag not in script_flags:
            answer += f"; {Path(sys.argv[0]).name} has no {our_flag}: {owners}"
    return plain(answer) + SEE_PAGE


@cache
def foreign_keys() -> dict[str, tuple[str, str]]:
    """{key of another system, written as a flag: (what it is here, a note)}. The file is read only
    for a flag or key that the script lacks: it takes longer than the script's own flags."""
    keys: dict[str, tuple[str, str]] = {}
    for table in tomllib.loads(TABLES.read_text("utf-8")).values():
        for key, (replacement, note) in table.items():
            keys[flag(key.lstrip("-"))] = (replacement, note)
    return keys


def owners_of(name: str, rollout_flags: set[str]) -> str:
    """The scripts that have a flag, as a sentence; "" if all have it, or none."""
    if name in SCRIPTS_WITH:
        scripts = SCRIPTS_WITH[name]
        verb = "have" if " and " in scripts else "has"
        return f"{scripts} {verb} it"
    if name in rollout_flags:
        return "grpo.py, ppo.py, curiosity_rl.py and distill.py have it"
    return ""


def plain(answer: str) -> str:
    """An answer without the Markdown of code and links."""
    return LINK.sub(r"\1", answer).replace("`", "").replace("\\", "")
