"""Rebuild the embedded `tiny` policy from nothing: tokenizer, Countdown traces, supervised warm
start.

    python -m common.assets.build.tiny --out common/assets/tiny   # under 10 minutes on 2 cores

A byte-level Qwen2 of 3 million parameters learns to search: it subtracts some of the numbers from
the others, compares with the target, one try a line, and answers with its last try.

    user:      14 19 5 = 28
    assistant: <think>14+19=33 33+5=38>28
               14+19=33 33-5=28=28</think><answer>(14+19)-5</answer>

The searches are systematic, but impatient: most of them give up after a first line that missed,
some later. Going on until a line hits pays; that is left for reinforcement learning to find out.
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import common.packages  # noqa: F401, one line if a package is missing

import pyarrow as pa
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.flags import call_program
from common.prepare.countdown import Problem, iter_problems, prompt_text, to_table
from common.prepare.writing import write_splits
from common.torch_repair import transformers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
WORDS = ["<think>", "</think>", "<answer>", "</answer>"]
# small, so that the arithmetic is learnt in a few minutes
RANGES = {"numbers": (1, 20), "targets": (5, 40)}
EVAL_ROWS = 1024
RL_ROWS = 2048
SFT_ROWS = 5_000
TRACES_PER_ROW = 12
GIVE_UP_AT_ONCE = 0.65  # probability that the first line, if it missed, is the last
GIVE_UP_LATER = 0.2  # and of each later line


def build_tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """256 bytes, no merges (every digit is a token), the words of the format as one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: i for i, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_config(tokenizer: "transformers.PreTrainedTokenizerFast") -> "transformers.Qwen2Config":
    return transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def write_demo_data(folder: Path) -> None:
    """train.parquet and eval.parquet of the demo that `grpo.py` and `ppo.py` run without
    --model."""
    write_splits(folder, demo_tables())


def write_supervised_data(folder: Path) -> None:
    """train.jsonl and eval.jsonl of the demo that `sft.py` runs without --model: searches on
    problems of another seed than the warm start's, which has about a third of them, too."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = sums_and_differences(3000, seed=2)
    write_traces(folder / "eval.jsonl", problems[:256], 1, random.Random(2))
    write_traces(folder / "train.jsonl", problems[256:], 3, random.Random(3))


def write_traces(
    path: Path, problems: list[Problem], traces_per_row: int, rng: random.Random
) -> None:
    with path.open("w") as file:
        for problem in problems:
            for _ in range(traces_per_row):
                messages = [
                    {"role": "user", "content": prompt_text(problem, "compact")},
                    {"role": "assistant", "content": trace(problem, rng)},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")


def write_warm_start(path: Path) -> None:
    """The traces of the supervised warm start, on problems that are in no file of the RL demo."""
    held_out, training = rl_problems()
    demo_keys = {problem.key for problem in held_out + training}
    problems = sums_and_differences(SFT_ROWS, seed=1, exclude=demo_keys)
    write_traces(path, problems, TRACES_PER_ROW, random.Random(1))


def sums_and_differences(count: int, **options) -> list[Problem]:
    """`count` problems that + and - suffice to solve, alternately of three and four numbers."""
    problems_by_size: list[list[Problem]] = []
    for operands in (3, 4):
        problems = iter_problems(operands=(operands,), **RANGES, **options)
        solvable = (p for p in problems if "*" not in p.expression and "/" not in p.expression)
        problems_by_size.append(list(islice(solvable, count // 2)))
    mixed = []
    for of_three, of_four in zip(*problems_by_size):
        mixed += [of_three, of_four]
    return mixed


@cache
def demo_tables() -> dict[str, pa.Table]:
    """Rows of the demo, by the names of their files."""
    held_out, training = rl_problems()
    return {
        "train": to_table(training, "compact", "train"),
        "eval": to_table(held_out, "compact", "test"),
    }


def rl_problems() -> tuple[list[Problem], list[Problem]]:
    """(held-out, training) rows of the demo; no row of one is in the other, nor in the traces of
    the warm start."""
    problems = sums_and_differences(EVAL_ROWS + RL_ROWS, seed=0)
    return problems[:EVAL_ROWS], problems[EVAL_ROWS:]


def add_up(numbers: list[int]) -> tuple[list[str], str, int]:
    """Steps "14+19=33", "33+5=38"; the expression "(14+19)+5"; its value."""
    steps = []
    expression = str(numbers[0])
    value = numbers[0]
    for number in numbers[1:]:
        steps.append(f"{value}+{number}={value + number}")
        expression = join(expression, "+", str(number))
        value += number
    return steps, expression, value


def join(left: str, operator: str, right: str) -> str:
    return in_brackets(left) + operator + in_brackets(right)


def in_brackets(expression: str) -> str:
    return expression if expression.isdigit() else f"({expression})"


def tries(numbers: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """(line, expression, value) of all sums and differences of the numbers, up to the sign, in a
    fixed order.

    One for each subset of the numbers but the first: its sum and the sum of the rest, the smaller
    subtracted from the larger.
    """
    num_rest = len(numbers) - 1
    for subset in range(2**num_rest):
        added = []
        subtracted = []
        for i, number in enumerate(numbers):
            in_subset = subset >> (num_rest - i) & 1  # 0 for the first number: it has no bit
            if in_subset:
                subtracted.append(number)
            else:
                added.append(number)
        steps, expression, value = add_up(added)
        if subtracted:
            more_steps, other_expression, other_value = add_up(subtracted)
            if value < other_value:
                expression, other_expression = other_expression, expression
                value, other_value = other_value, value
            steps += [*more_steps, f"{value}-{other_value}={value - other_value}"]
            expression = join(expression, "-", other_expression)
            value -= other_value
        yield " ".join(steps), expression, value


def trace(problem: Problem, rng: random.Random) -> str:
    """One try after the other until the target is hit, or until patience ends."""
    lines = []
    for line, expression, value in tries(problem.numbers):
        give_up = GIVE_UP_LATER if lines else GIVE_UP_AT_ONCE
        if value < problem.target:
            relation = "<"
        elif value > problem.target:
            relation = ">"
        else:
            relation = "="
        lines.append(f"{line}{relation}{problem.target}")
        if value == problem.target or rng.random() < give_up:
            return "<think>" + "\n".join(lines) + f"</think><answer>{expression}</answer>"
    raise ValueError(f"{problem}: no sum or difference hits the target")


@dataclass
class Args:
    out: Path = Path("common/assets/tiny")  # folder of the finished policy
    # folder for traces, the untrained model and the supervised run
    work: Path = Path("runs/prepare-tiny")
    steps: int = 1400  # optimizer steps of the supervised run
    batch_size: int = 32  # traces per step
    learning_rate: float = 1.5e-3  # peak


def main(args: Args) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    write_warm_start(args.work / "traces.jsonl")
    blank = args.work / "blank"
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(blank)
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(build_config(tokenizer)).save_pretrained(blank)
    options = {
        "model": blank,
        "train-data": args.work / "traces.jsonl",
        "output-dir": args.work,
        "total-steps": args.steps,
        "batch-size": args.batch_size,
        "learning-rate": args.learning_rate,
        "warmup-steps": 50,
        "lr-schedule": "cosine",
        "resume": "never",
    }
    command = [sys.executable, "sft.py"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True)
    shutil.copytree(args.work / "model", args.out, dirs_exist_ok=True)
    # as it was built: the export has written it as transformers loads a Qwen2's
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main(call_program(Args, "common.assets.build.tiny", __doc__))
