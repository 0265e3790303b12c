"""Evaluation statistics against enumeration, and the table."""

from itertools import combinations

import pytest

from common.look.samples import format_table, maj_at_k, pass_at_k, summarize, wilson_interval
from common.rewards import is_correct


def sample(group, score, pred="", source="a", length=10, truncated=False):
    rest = {"data_source": source, "group": group, "pred": pred, "length": length, "truncated": truncated}
    return rest | {"score": score, "correct": is_correct({"score": score})}


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_equals_all_subsets(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_stable_and_checks_its_arguments():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    for n, c, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match=f"n {n}, c {c}, k {k}"):
            pass_at_k(n, c, k)


def test_majority_vote():
    assert maj_at_k(["7", "7", "8"], [1.0, 1.0, 0.0]) == 1.0
    assert maj_at_k(["7", "8"], [1.0, 0.0]) == 0.5, "a tie is split evenly"
    assert maj_at_k(["7", "8", "9", "7", "8"], [1.0, 0.0, 0.0, 1.0, 0.0]) == 0.5
    assert maj_at_k(["", "", "", "7"], [0.0, 0.0, 0.0, 1.0]) == 1.0, "no answer is not a vote"
    assert maj_at_k(["", ""], [0.0, 0.0]) == 0.0
    with pytest.raises(ValueError):
        maj_at_k(["7"], [1.0, 0.0])


def test_accuracy_means_full_marks():
    assert all(is_correct({"score": score}) for score in (1.0, 1.0 - 1e-7, 1.1))
    assert not any(is_correct({"score": score}) for score in (0.999, 0.1, float("nan")))
    assert is_correct({"score": 0.9, "acc": 1.0}) and not is_correct({"score": 1.0, "acc": 0.0})
    assert is_correct({"score": 1.0, "acc": "a word"}), "what is no number does not count"


def test_summarize_averages_over_prompts_first():
    samples = [sample(0, 1.0, "7"), sample(0, 0.1, "8"), sample(0, 1.0, "7", truncated=True)]
    samples += [sample(1, 0.1, "1", "b", 20), sample(1, 0.1, "1", "b", 20)]  # has lost its third sample
    metrics = summarize(samples)
    assert metrics["eval/accuracy"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["eval/reward"] == pytest.approx((2.1 / 3 + 0.1) / 2)
    assert metrics["eval/a/accuracy"] == pytest.approx(2 / 3) and metrics["eval/b/accuracy"] == 0
    assert metrics["eval/pass@1"] == pytest.approx(metrics["eval/accuracy"])
    assert metrics["eval/pass@2"] == pytest.approx(0.5)
    assert metrics["eval/maj@2"] == pytest.approx(0.5)
    assert metrics["eval/response_length"] == 14 and metrics["eval/truncated"] == 0.2 and metrics["eval/rows"] == 2


def test_summarize_lists_powers_of_two_and_n():
    keys = summarize([sample(0, float(i == 0), str(i)) for i in range(6)])
    assert [key for key in keys if "@" in key] == [
        f"eval/{name}" for name in ("pass@1", "pass@2", "pass@4", "pass@6", "maj@6")
    ]
    assert keys["eval/maj@6"] == pytest.approx(1 / 6)
    single = summarize([sample(0, 1.0)])
    assert not any("maj" in key or key.count("/") > 1 for key in single)
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_wilson_interval():
    low, high = wilson_interval(0.5, 100)
    assert (low, high) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson_interval(1.0, 10)[1] == pytest.approx(1.0) and wilson_interval(1.0, 10)[1] <= 1.0
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


def test_table_is_aligned():
    by_source = {
        "openai/gsm8k": summarize([sample(i, float(i % 2), str(i)) for i in range(1000)]),
        "aime": summarize([sample(i, 0.0, str(j), length=12345) for i in range(3) for j in range(2)]),
    }
    header, *lines = format_table(by_source).splitlines()
    assert len({len(line) for line in (header, *lines)}) == 1
    assert [line.split()[0] for line in lines] == ["openai/gsm8k", "aime"]
    assert "0.500" in lines[0] and "0.469 - 0.531" in lines[0] and "pass@2" in header and "maj@2" in header
    assert lines[0].index("0.500") + 5 == header.index("accuracy") + len("accuracy")
