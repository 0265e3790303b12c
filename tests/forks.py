"""The patches of docs/forks, applied to copies of the scripts as they are today."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from helpers import ROOT, make_args
from torch import Tensor

from common.packing import TokenIndex
from common.types import Episode

FOLDER = ROOT / "docs" / "forks"
# Flags that turn a patch on, for the grid of tests/workers/gradients.py.
GRPO = {"temperature": 0.9, "clip_high": 0.3, "entropy_coef": 0.1, "max_response_tokens": 20}
FLAGS = {
    "adaptive-kl": GRPO | {"kl_target": 0.1, "gae_lambda": 0.9},
    "distill-reward": {"temperature": 0.9, "estimator": "sampled", "reward_coef": 0.5},
    "dppo": GRPO | {"objective": "dppo", "max_shift": 0.002},
    "drpo": GRPO | {"objective": "drpo", "trust_radius": 0.01},
    "gdpo": GRPO | {"separate_rewards": "score,brevity"},
    "gmpo": GRPO | {"objective": "gmpo", "reduction": "grpo", "clip_low": 0.1},
    "maxrl": GRPO | {"advantage": "maxrl"},
    "pass-at-k": GRPO | {"pass_at": 2},
    "reinforce-plus-plus": GRPO | {"advantage": "batch"},
    "replay": {"temperature": 0.9, "clip_high": 0.3, "replay_share": 0.5},
    "sapo": GRPO | {"objective": "sapo", "reduction": "grpo"},
    "vapo": GRPO | {"length_alpha": 0.4, "critic_lambda": 0.95},
    "wapo": GRPO | {"advantage": "winner", "reduction": "dr_grpo"},
}


def patch_of(name: str) -> str:
    return (FOLDER / f"{name}.patch").read_text()


def script_of(name: str) -> str:
    """The script that a patch changes, such as "grpo.py"."""
    return re.search(r"^\+\+\+ b/(.+)$", patch_of(name), flags=re.MULTILINE)[1]


def hunks_of(name: str) -> list[str]:
    return re.split(r"^(?=@@ )", patch_of(name), flags=re.MULTILINE)[1:]


def apply_fork(name: str, folder: Path, text: str | None = None) -> Path:
    """Its script, or `text` in that one's place, copied into `folder`/NAME and patched.

    AssertionError that says which hunks do not apply, and what they look for.
    """
    script = folder / name / script_of(name)
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / script.name).read_text() if text is None else text)
    done = subprocess.run(
        ["git", "apply", "--reject", "--verbose", FOLDER / f"{name}.patch"],
        cwd=script.parent,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder), "LC_ALL": "C"},
        capture_output=True,
        text=True,
    )
    hunks = hunks_of(name)
    problems = []
    for number in map(int, re.findall(r"^Rejected hunk #(\d+)", done.stderr, flags=re.MULTILINE)):
        head, *lines = hunks[number - 1].splitlines()
        place = head.rpartition("@@")[2].strip() or "the first lines"
        sought = "\n".join(line[1:] for line in lines if line[:1] in " -")
        problems.append(
            f"hunk {number} of {len(hunks)}, in or after `{place}`: {script.name} no longer has "
            f"these lines in a row:\n{sought}"
        )
    assert done.returncode == 0, (
        f"docs/forks/{name}.patch no longer applies to {script.name}; "
        'mend it as docs/forks.md says under "When a patch no longer applies".\n'
        + ("\n".join(problems) or done.stderr)
    )
    return script


def load_fork(name: str, folder: Path) -> ModuleType:
    """A fork that `apply_fork` has written into `folder`, as a module of its own."""
    module_name = f"fork_{name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(module_name, folder / name / script_of(name))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def fork_args(name: str, script: ModuleType):
    return make_args(script, **FLAGS[name])


def with_brevity(episodes: list[Episode]) -> list[Episode]:
    """With a second reward, of a larger scale."""
    return [
        replace(e, rewards=e.rewards | {"brevity": -10.0 * len(e.response_ids)}) for e in episodes
    ]


def as_replayed(episodes: list[Episode], first: int) -> list[Episode]:
    """Those of prompt 0 as if they came from an earlier step."""
    found = []
    for episode in episodes:
        if episode.prompt_index == 0:
            terms = {"advantage": 0.5 - episode.sample_index, "step": 0}
            number = first + episode.sample_index
            episode = replace(episode, prompt_index=number, terms=terms)
        found.append(episode)
    return found


def fork_advantages(script: ModuleType, args, episodes: list[Episode], index: TokenIndex) -> Tensor:
    """Advantages [T], float64, by the functions of grpo.py, curiosity_rl.py or a fork, in the order
    in which their `main` calls them."""
    scores = torch.tensor([e.score for e in episodes], dtype=torch.float64)
    groups = torch.tensor([e.prompt_index for e in episodes], dtype=torch.int64)
    if getattr(args, "separate_rewards", ""):
        names = args.separate_rewards.split(",")
        rewards = script.named_rewards(with_brevity(episodes), names).double()
        advantages = script.gdpo_advantages(rewards, groups)
    elif getattr(args, "pass_at", 1) > 1:
        advantages = script.pass_at_k_advantages(scores > 0.5, groups, args.pass_at)
    else:
        advantages = script.group_advantages(scores, groups, args.advantage)
    if getattr(args, "replay_share", 0):
        advantages = script.with_replayed(advantages, as_replayed(episodes, script.FIRST_REPLAYED))
    token_advantages = advantages[index.episode_of_token].double()
    if args.advantage == "batch":
        token_advantages = script.whitened(token_advantages)
    return token_advantages
