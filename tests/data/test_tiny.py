"""The embedded policy's data and files: honest traces, disjoint splits, a tokenizer that loses
nothing."""

import json
import random
import re
from itertools import product
from types import SimpleNamespace

import pytest

from common.assets.build import tiny
from common.data.render import end_of_turn, end_token_ids
from common.hub import FOLDERS, load_tokenizer
from common.models import load_model
from common.rewards.countdown import score

STEP = re.compile(r"(\d+)([-+])(\d+)=(\d+)")
VERDICT = re.compile(r"(\d+)([<=>])(\d+)$")


@pytest.fixture(scope="module")
def problems():
    return tiny.sums_and_differences(400, seed=7)


def test_traces_calculate_correctly_and_answer_with_their_last_line(problems):
    rng = random.Random(0)
    hits = gave_up_at_once = gave_up_later = 0
    for problem in problems:
        text = tiny.trace(problem, rng)
        verdicts = text.removeprefix("<think>").partition("</think>")[0].split("\n")
        lines = [line.rstrip("0123456789")[:-1] for line in verdicts]
        assert lines == [line for line, _, _ in tiny.tries(problem.numbers)][: len(lines)], (
            "one order for all"
        )
        for step in " ".join(lines).split():
            left, operator, right, value = STEP.fullmatch(step).groups()
            assert int(value) == int(left) + int(right) * (1 if operator == "+" else -1) >= 0, step
        relations = []
        for line in verdicts:
            value, relation, target = VERDICT.search(line).groups()
            assert int(target) == problem.target
            assert {"<": int.__lt__, "=": int.__eq__, ">": int.__gt__}[relation](
                int(value), int(target)
            ), line
            relations.append(relation)
        hit = relations[-1] == "="
        result = score(text, {"numbers": list(problem.numbers), "target": problem.target})
        assert result["score"] == (1.0 if hit else 0.1), text
        assert "=" not in relations[:-1], "nobody goes on after a hit"
        hits += hit
        gave_up_at_once += not hit and len(lines) == 1
        gave_up_later += not hit and len(lines) > 1
    assert min(hits, gave_up_at_once) > 100, "impatience is part of the design"
    assert gave_up_later > 10, "impatience is part of the design"


def test_tries_are_all_sums_and_differences():
    """Each once up to the sign, and what an expression says is what its line calculates."""
    numbers = (3, 5, 9, 16)
    found = list(tiny.tries(numbers))
    assert [value for _, expression, value in found] == [
        abs(eval(expression)) for _, expression, _ in found
    ]
    signed = {
        abs(sum(n * s for n, s in zip(numbers, signs))) for signs in product((1, -1), repeat=4)
    }
    assert {value for _, _, value in found} == signed and len(found) == 8
    assert found[0] == ("3+5=8 8+9=17 17+16=33", "((3+5)+9)+16", 33)
    assert ("3+5=8 9+16=25 25-8=17", "(9+16)-(3+5)", 17) in found


def test_splits_are_disjoint():
    held_out, training = tiny.rl_problems()
    keys = [{p.key for p in part} for part in (held_out, training)]
    assert len(keys[0]) == tiny.EVAL_ROWS
    assert len(keys[1]) == tiny.RL_ROWS
    assert not keys[0] & keys[1]
    warm_start = tiny.sums_and_differences(500, seed=1, exclude=keys[0] | keys[1])
    assert not {p.key for p in warm_start} & (keys[0] | keys[1])
    assert {len(p.numbers) for p in held_out[:512]} == {3, 4}


@pytest.mark.parametrize(
    "tokenizer", [tiny.build_tokenizer(), load_tokenizer(str(FOLDERS["tiny"]))]
)
def test_tokenizer_round_trip_and_prompt_length(tokenizer):
    for text in (
        "24 19 5 = 38",
        "<think>24+19=43</think><answer>(24+19)-5</answer>",
        "déjà vu, 数学 🙂\n\t ",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "24 19 5 30 = 38"}], add_generation_prompt=True
    )
    assert len(rendered["input_ids"]) < 64
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|end|>"


def test_embedded_policy_loads_and_ends_where_its_tokenizer_says():
    path = str(FOLDERS["tiny"])
    tokenizer = load_tokenizer(path)
    policy = load_model(path, "sdpa")
    assert policy.model.config.vocab_size == len(tokenizer)
    assert end_token_ids(path, tokenizer) == [tokenizer.eos_token_id]
    assert sum(file.stat().st_size for file in FOLDERS["tiny"].iterdir()) < 10e6


@pytest.mark.parametrize(
    "listed, ids", [([9, 7], [5, 7, 9]), (7, [5, 7]), (5, [5]), (0, [0, 5]), (None, [5])]
)
def test_a_response_ends_as_the_generation_config_says_too(listed, ids, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert end_token_ids(str(tmp_path), SimpleNamespace(eos_token_id=5)) == ids


def test_without_a_generation_config_it_ends_as_the_models_own_says(tmp_path):
    """As vLLM does."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert end_token_ids(str(tmp_path), SimpleNamespace(eos_token_id=5)) == [5, 7, 9]
    (tmp_path / "generation_config.json").write_text("{}")
    assert end_token_ids(str(tmp_path), SimpleNamespace(eos_token_id=5)) == [5]


def test_end_of_turn_is_what_the_template_says():
    """A base model whose end token is not the one that ends its turns would never stop after
    fine-tuning."""
    tokenizer = tiny.build_tokenizer()
    assert end_of_turn(tokenizer) == "<|end|>"
    tokenizer.eos_token = "<|endoftext|>"
    assert end_of_turn(tokenizer) == "<|end|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert end_of_turn(tokenizer) == "<|endoftext|>", "no special token there: the end token stays"
