"""Rebuild the embedded `tiny` policy from nothing: tokenizer, Countdown traces, supervised warm start.

    python -m common.prepare.tiny --out common/assets/tiny        # under 10 minutes on 2 CPU cores

A byte-level Qwen2 of 3 million parameters learns to search: it tries combinations, one a line, and answers.

    user:      24 19 5 = 38
    assistant: <think>24+19=43 43+5=48
               24+19=43 43-5=38</think><answer>(24+19)-5</answer>

The traces are a mixed bag on purpose: six in ten begin by adding everything up, and six in ten of the lines that miss
the target are answered with all the same. What pays, to think first and to go on until a line hits, is left for
reinforcement learning to find out.
"""

import ast
import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tyro
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from common.prepare.countdown import Problem, iter_problems, prompt_text, to_table, write_atomically

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
WORDS = ["<think>", "</think>", "<answer>", "</answer>"]
RANGES = {"numbers": (1, 20), "targets": (5, 40)}  # small, so that a few minutes suffice to learn the arithmetic
EVAL_ROWS, RL_ROWS, SFT_ROWS = 1024, 2048, 5_000
TRACES_PER_ROW = 12
ADD_UP = 0.6  # probability that a trace begins by adding everything up
RIGHT = 0.75  # probability that another line is a right one
GIVE_UP = 0.6  # probability that a line which missed the target becomes the answer
MAX_LINES = 5
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, no merges (every digit is a token), the words of the format as one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    return Qwen2Config(
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
    """train.parquet and eval.parquet of the demo that `grpo.py` and `ppo.py` run without --model."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out, training = rl_problems()
    write_atomically(to_table(training, "compact", "train"), folder / "train.parquet")
    write_atomically(to_table(held_out, "compact", "test"), folder / "eval.parquet")


def sums_and_differences(count: int, **options) -> list[Problem]:
    """Problems of three and of four numbers, equally many, that + and - suffice to solve."""
    by_size: list[list[Problem]] = []
    for operands in (3, 4):
        stream = iter_problems(operands=(operands,), **RANGES, **{"exclude": frozenset(), **options})
        by_size.append(list(islice((p for p in stream if not set("*/") & set(p.expression)), count // 2)))
    return [problem for pair in zip(*by_size) for problem in pair]


def rl_problems() -> tuple[list[Problem], list[Problem]]:
    """(held-out, training) rows of the demo; no row of one is in the other, nor in the traces of the warm start."""
    problems = sums_and_differences(EVAL_ROWS + RL_ROWS, seed=0)
    return problems[:EVAL_ROWS], problems[EVAL_ROWS:]


def steps_of(expression: str) -> tuple[list[str], str] | None:
    """("44+19=63", "63+35=98", ...) and the answer that they amount to, of a solution such as ((44 + 19) + 35).

    None if a step leaves the whole, non-negative numbers that the traces keep to.
    """
    steps: list[str] = []

    def walk(node: ast.expr) -> tuple[int, str]:
        if isinstance(node, ast.Constant):
            return node.value, str(node.value)
        (left, left_text), (right, right_text) = walk(node.left), walk(node.right)
        operator = OPERATORS[type(node.op)]
        value = combine(left, right, operator)
        steps.append(f"{left}{operator}{right}={value}")
        return value, join(left_text, operator, right_text)

    try:
        _, answer = walk(ast.parse(expression, mode="eval").body)
    except TypeError:  # a step with None
        return None
    return (steps, answer) if not any(step.endswith("None") for step in steps) else None


def join(left: str, operator: str, right: str) -> str:
    return operator.join(text if text.isdigit() else f"({text})" for text in (left, right))


def combine(left: int, right: int, operator: str) -> int | None:
    """Value of one step, or None where it leaves the small non-negative integers that the traces keep to."""
    if operator == "+":
        value = left + right
    elif operator == "-":
        value = left - right
    elif operator == "*":
        value = left * right
    else:
        value = left // right if right and left % right == 0 else -1
    return value if 0 <= value <= 999 else None


def added_up(numbers: tuple[int, ...]) -> tuple[list[str], str, int]:
    """The sum of all numbers in their order: steps, answer, value."""
    steps, answer, value = [], str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        steps.append(f"{value}+{number}={value + number}")
        answer, value = join(answer, "+", str(number)), value + number
    return steps, answer, value


def random_line(numbers: tuple[int, ...], rng: random.Random) -> tuple[list[str], str, int]:
    """A random way to use all numbers: steps, answer, value."""
    pool = [(number, str(number)) for number in numbers]
    steps = []
    while len(pool) > 1:
        rng.shuffle(pool)
        (left, left_text), (right, right_text) = pool.pop(), pool.pop()
        if left < right:
            (left, left_text), (right, right_text) = (right, right_text), (left, left_text)
        value = None
        while value is None:
            operator = rng.choice("+-")
            value = combine(left, right, operator)
        steps.append(f"{left}{operator}{right}={value}")
        pool.append((value, join(left_text, operator, right_text)))
    return steps, pool[0][1], pool[0][0]


def trace(problem: Problem, right_steps: list[str], right_answer: str, rng: random.Random) -> str:
    """A search over a few lines, with two bad habits: adding everything up first, and giving up."""
    lines, answer, hit = [], "", False
    while not hit and len(lines) < MAX_LINES:
        if not lines and rng.random() < ADD_UP:
            steps, answer, value = added_up(problem.numbers)
        elif rng.random() < RIGHT or len(lines) == MAX_LINES - 1:
            steps, answer, value = right_steps, right_answer, problem.target
        else:  # of a few random lines the one that comes nearest
            tries = [random_line(problem.numbers, rng) for _ in range(6)]
            steps, answer, value = min(tries, key=lambda t: abs(t[2] - problem.target))
        if " ".join(steps) in lines:
            continue
        lines.append(" ".join(steps))
        hit = value == problem.target
        if not hit and rng.random() < GIVE_UP:
            break
    return "<think>" + "\n".join(lines) + f"</think><answer>{answer}</answer>"


@dataclass
class Args:
    out: Path = Path("common/assets/tiny")  # folder of the finished policy
    work: Path = Path("runs/prepare-tiny")  # folder for traces, the untrained model and the supervised run
    processes: int = 2  # torchrun ranks of the supervised run
    steps: int = 1600  # optimizer steps of the supervised run
    batch_size: int = 32  # traces a step
    learning_rate: float = 1.5e-3  # peak


def main(args: Args) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    held_out, training = rl_problems()
    rng = random.Random(1)
    with (args.work / "traces.jsonl").open("w") as file:
        for problem in sums_and_differences(SFT_ROWS, seed=1, exclude={p.key for p in held_out + training}):
            solution = steps_of(problem.expression)
            for _ in range(TRACES_PER_ROW if solution else 0):
                messages = [{"role": "user", "content": prompt_text(problem, "compact")}]
                messages.append({"role": "assistant", "content": trace(problem, *solution, rng)})
                file.write(json.dumps({"messages": messages}) + "\n")
    blank = args.work / "blank"
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(blank)
    build_config(tokenizer).save_pretrained(blank)
    options = {
        "model": blank,
        "train-data": args.work / "traces.jsonl",
        "output-dir": args.work,
        "total-steps": args.steps,
        "batch-size": args.batch_size,
        "learning-rate": args.learning_rate,
        "warmup-steps": 50,
        "lr-schedule": "cosine",
        "strategy": "ddp",
        "resume": "never",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(args.processes),
        "sft.py",
    ]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)] + ["--from-scratch"]
    subprocess.run(command, check=True)
    shutil.copytree(args.work / "model", args.out, dirs_exist_ok=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
