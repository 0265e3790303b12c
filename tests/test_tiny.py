"""The embedded policy's data and files: honest traces, disjoint splits, a tokenizer that loses nothing."""

import random
import re

import pytest

import sft
from common.models import EMBEDDED, end_token_ids, load_policy, load_tokenizer
from common.prepare import tiny
from common.rewards.countdown import score

STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


@pytest.fixture(scope="module")
def problems():
    return tiny.sums_and_differences(400, seed=7)


def test_traces_calculate_correctly_and_answer_with_their_last_line(problems):
    rng = random.Random(0)
    hits = misses = first_sums = 0
    for problem in problems:
        solution = tiny.steps_of(problem.expression)
        if solution is None:
            continue
        text = tiny.trace(problem, *solution, rng)
        lines = text.removeprefix("<think>").partition("</think>")[0].split("\n")
        assert 1 <= len(lines) <= tiny.MAX_LINES and len(set(lines)) == len(lines)
        for step in " ".join(lines).split():
            left, operator, right, value = STEP.fullmatch(step).groups()
            assert tiny.combine(int(left), int(right), operator) == int(value), step
        hit = lines[-1].endswith(f"={problem.target}")
        result = score(text, {"numbers": list(problem.numbers), "target": problem.target})
        assert result["score"] == (1.0 if hit else 0.1), text
        assert not any(line.endswith(f"={problem.target}") for line in lines[:-1]), "nobody goes on after a hit"
        hits, misses = hits + hit, misses + (not hit)
        first_sums += lines[0] == " ".join(tiny.added_up(problem.numbers)[0])
    assert hits > 100 and misses > 50 and first_sums > 80, "the habits are part of the design"


def test_steps_of_rejects_fractions_and_negative_steps():
    assert tiny.steps_of("(24 + 19) - 5") == (["24+19=43", "43-5=38"], "(24+19)-5")
    assert tiny.steps_of("(5 - 24) + 30") is None
    assert tiny.steps_of("(5 / 2) * 4") is None
    assert tiny.steps_of("3 + (5 / (2 - 2))") is None


def test_splits_are_disjoint():
    held_out, training = tiny.rl_problems()
    keys = [{p.key for p in part} for part in (held_out, training)]
    assert len(keys[0]) == tiny.EVAL_ROWS and len(keys[1]) == tiny.RL_ROWS and not keys[0] & keys[1]
    warm_start = tiny.sums_and_differences(500, seed=1, exclude=keys[0] | keys[1])
    assert not {p.key for p in warm_start} & (keys[0] | keys[1])
    assert {len(p.numbers) for p in held_out[:512]} == {3, 4}


@pytest.mark.parametrize("tokenizer", [tiny.build_tokenizer(), load_tokenizer(str(EMBEDDED["tiny"]))])
def test_tokenizer_round_trip_and_prompt_length(tokenizer):
    for text in ("24 19 5 = 38", "<think>24+19=43</think><answer>(24+19)-5</answer>", "déjà vu, 数学 🙂\n\t "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "24 19 5 30 = 38"}], add_generation_prompt=True
    )
    assert len(rendered["input_ids"]) < 64
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|end|>"


def test_embedded_policy_loads_and_ends_where_its_tokenizer_says():
    path = str(EMBEDDED["tiny"])
    tokenizer = load_tokenizer(path)
    policy = load_policy(path, "sdpa")
    assert policy.model.config.vocab_size == len(tokenizer)
    assert end_token_ids(path, tokenizer) == [tokenizer.eos_token_id]
    assert sum(file.stat().st_size for file in EMBEDDED["tiny"].iterdir()) < 10e6


def test_end_of_turn_is_what_the_template_says():
    """A base model whose end token is not the one that ends its turns would never stop after fine-tuning."""
    tokenizer = tiny.build_tokenizer()
    assert sft.end_of_turn(tokenizer) == "<|end|>"
    tokenizer.eos_token = "<|endoftext|>"
    assert sft.end_of_turn(tokenizer) == "<|end|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert sft.end_of_turn(tokenizer) == "<|endoftext|>", "no special token there: the end token stays"
