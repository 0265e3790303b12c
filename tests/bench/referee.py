"""Losses and gradients of one frozen batch by the papers' definitions, beside those of this
repository and of other libraries, for several splits over micro-batches and ranks.

Each library answers from a virtual environment of its own, a folder of its name
(results/referee/README.md):

    python tests/bench/referee.py --environments venvs --out results/referee
    python tests/bench/referee.py --out results/referee  # this repository's alone
    python tests/bench/referee.py --out results/referee --draw  # tables of what is kept

tests/bench/referee/ has the batch, the definitions and what asks each library.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from report import header, table  # noqa: E402

# {folder of the environment: (program, numbers of processes)}
LIBRARIES = {
    "": ("ask_ours.py", [1]),
    "trl": ("ask_trl.py", [1, 2]),
    "verl": ("ask_verl.py", [1]),
    "openrlhf": ("ask_openrlhf.py", [1, 2]),
    "liger-kernel": ("ask_liger.py", [1]),
}
OTHER_RANKS = "asked with another number of processes"


@dataclass
class Args:
    out: Path  # folder of NAME.json, the answers of each library
    environments: Path | None = None  # folder of virtual environments; without: ours alone
    only: tuple[str, ...] = ()  # names of environments to ask
    draw: bool = False  # ask nobody, print the tables of what is kept


def ask(python: str, program: str, processes: int) -> dict:
    """What a program prints last."""
    command = [python, str(HERE / "referee" / program)]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        command[1:1] = [*launcher, "--nproc_per_node", str(processes)]
    # the environment's own packages; float64 on one thread
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{program} ended with {done.returncode}, see above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def merge(answers: dict, others: dict) -> None:
    """Fill in the splits that need another number of processes."""
    parts = [(answers["objectives"], others["objectives"])]
    for part in ("variants", "divergences"):
        for label, by_name in others.get(part, {}).items():
            parts.append((answers[part][label], by_name))
    for own, other in parts:
        for name, by_split in other.items():
            for split, answer in by_split.items():
                if answer != OTHER_RANKS:
                    own[name][split] = answer


def ask_library(python: str, program: str, numbers: list[int]) -> dict:
    start = time.monotonic()
    answers = ask(python, program, numbers[0])
    for processes in numbers[1:]:
        merge(answers, ask(python, program, processes))
    answers["seconds"] = round(time.monotonic() - start)
    return answers


# --- tables ---------------------------------------------------------------------------------------


def cell(answer: dict | str) -> str:
    """|g - g*| / |g*|; of a multiple of the definition also the factor; a dash if not asked."""
    if isinstance(answer, str):
        return "–"
    text = f"{answer['difference']:.1e}"
    if answer["difference"] > 1e-4 and answer["angle"] < 1e-6:
        text += f" (× {answer['factor']:.4f})"
    return text


def print_table(title: str, rows: dict[str, dict], key: str) -> None:
    """rows: {library: {objective: {split: answer}}}."""
    names = list(next(iter(rows.values())))
    splits = list(next(iter(rows.values()))[names[0]])
    lines = [[key, "", *splits]]
    for name in names:
        for library, answers in rows.items():
            cells = [cell(answer) for answer in answers.get(name, {}).values()]
            if set(cells) - {"–"}:
                lines.append([name, library, *cells])
    print(f"{title}\n")
    table(*lines)


def print_reasons(rows: dict[str, dict]) -> None:
    """Why a library has no answer, once each."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for library, answers in rows.items():
        for name, by_split in answers.items():
            for split, answer in by_split.items():
                if isinstance(answer, str):
                    where = name if len(set(map(str, by_split.values()))) == 1 else split
                    places = reasons.setdefault((library, answer), [])
                    if where not in places:
                        places.append(where)
    for (library, reason), places in reasons.items():
        print(f"- {library}, {'; '.join(places)}: {reason}")
    print()


def draw(kept: dict[str, dict]) -> None:
    rows = {}
    divergences = {}
    advantages = [["advantages", "difference", "largest where all scores are equal"]]
    for answers in kept.values():
        library = answers["library"]
        rows[library] = answers["objectives"]
        rows |= answers.get("variants", {})
        divergences |= answers.get("divergences", {})
        if "advantages" in answers:
            numbers = answers["advantages"]
            equal = f"{numbers['equal']:.1e}" if numbers["equal"] else "0"
            advantages.append([library, f"{numbers['difference']:.1e}", equal])
    print_table("|gradient - definition| / |definition|", rows, "objective")
    print_reasons(rows)
    print_table("the same of divergences", divergences, "divergence")
    print_reasons(divergences)
    table(*advantages)
    for answers in kept.values():
        losses = [
            answer["loss"]
            for by_split in answers["objectives"].values()
            for answer in by_split.values()
            if isinstance(answer, dict)
        ]
        versions = ", ".join(f"{name} {number}" for name, number in answers["versions"].items())
        seconds = answers["seconds"]
        print(f"{answers['library']}: {versions}; losses within {max(losses):.1e}; {seconds} s")


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        header("The referee", threads=1)
        for name, (program, numbers) in LIBRARIES.items():
            if (name and not args.environments) or (args.only and name not in args.only):
                continue
            python = str(args.environments / name / "bin/python") if name else sys.executable
            answers = ask_library(python, program, numbers)
            path = args.out / f"{name or 'ours'}.json"
            path.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    files = [args.out / f"{name or 'ours'}.json" for name in LIBRARIES]
    draw({file.stem: json.loads(file.read_text()) for file in files if file.is_file()})


if __name__ == "__main__":
    main(tyro.cli(Args))
