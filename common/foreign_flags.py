"""Answers to flags that a script does not have: what a key of TRL, verl or LLaMA-Factory is here,
which script has a flag, what became of one that is gone."""

import sys
import tomllib
from pathlib import Path

from common.command_line import flag

# {key: [what it is here, a note]} by the headings of docs/from_verl_trl.md
TABLES = Path(__file__).with_suffix(".toml")
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
    arguments: list[str], script_flags: set[str], rollout_flags: set[str]
) -> None:
    """SystemExit with the answer to the first flag that is in our tables and not in the script.

    script_flags: those that the script has; rollout_flags: those of the group that sft.py lacks.
    """
    for argument in arguments:
        spelling = argument.partition("=")[0].lstrip("+")
        is_flag = spelling.startswith("--")
        is_key_of_verl = "=" in argument and "." in spelling
        name = flag(spelling.lstrip("-").removeprefix("no-"))
        if name in script_flags or not (is_flag or is_key_of_verl):
            continue
        answer = all_answers(rollout_flags).get(name)
        if answer is not None:
            script = Path(sys.argv[0]).name
            raise SystemExit(f"{script} has no {name if is_flag else spelling}: {answer}")


def all_answers(rollout_flags: set[str]) -> dict[str, str]:
    """{flag: which scripts have it, or what it is here}."""
    answers = dict.fromkeys(
        rollout_flags, "grpo.py, ppo.py, curiosity_rl.py and distill.py have it"
    )
    for name, scripts in SCRIPTS_WITH.items():
        verb = "have" if " and " in scripts else "has"
        answers[name] = f"{scripts} {verb} it"
    for table in tomllib.loads(TABLES.read_text()).values():
        for key, (replacement, note) in table.items():
            if replacement == "none":
                answer = note
            elif note:
                answer = f"here {replacement} ({note})"
            else:
                answer = f"here {replacement}"
            answer = answer.replace("`", "")  # a page's marks of code
            answers[flag(key.lstrip("-"))] = f"{answer}; see docs/from_verl_trl.md"
    return answers
