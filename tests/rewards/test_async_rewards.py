"""Reward functions that are `async def`: calls that overlap in one process, each with its
deadline."""

import time

import pytest
from helpers import alive, deadline

import common.rewards
from common.rewards import AT_ONCE, RewardWorkers

FUNCTION = """
import asyncio
import os
import time

under_way = most = 0
loops = set()
hoard = []


async def meet():
    '''Waits until 64 calls are under way.'''
    global under_way, most
    under_way += 1
    most = max(most, under_way)
    while most < 64:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # time for one too many to begin
    under_way -= 1
    return float(most)


async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass


async def act(data_source, solution_str, ground_truth, extra_info=None):
    loops.add(id(asyncio.get_running_loop()))
    if solution_str == "meet":
        return await meet()
    if solution_str == "hang":
        await asyncio.sleep(600)
    if solution_str == "stubborn":
        await stubborn()
    if solution_str == "block":
        time.sleep(600)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "memory":
        return len(bytearray(10 * 2**30))
    if solution_str == "hoard":
        while True:
            hoard.append(bytearray(2**25))
    if solution_str == "need":
        return len(bytearray(2**28)) / 2**28
    if solution_str == "cancel":
        raise asyncio.CancelledError
    if solution_str == "raise":
        raise KeyError("answer")
    if solution_str == "stop":
        raise SystemExit(3)
    if solution_str == "nan":
        return float("nan")
    if solution_str == "loops":
        return len(loops)
    await asyncio.sleep(0.01 * (int(solution_str) % 5))
    return {"score": int(solution_str), "truth": ground_truth}
"""

FAILURES = {
    "hang": "timeout after 2 s",
    "stubborn": "timeout after 2 s",
    "cancel": "the call was cancelled",
    "block": "timeout after 5 s",
    "exit": "the worker died (exit code 3)",
    "memory": "MemoryError (line ",
    "raise": "KeyError: 'answer' (line ",
    "stop": "SystemExit: 3 (line ",
    "nan": "ValueError: reward function act on data_source 'test' returned the score nan",
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """RewardWorkers for FUNCTION and more lines, with 2 s for a call, closed after the test."""
    monkeypatch.setattr(common.rewards, "SLACK_S", 3.0)
    started = []

    def start(more: str = "", timeout_s: float = 2.0) -> RewardWorkers:
        (tmp_path / "function.py").write_text(FUNCTION + more)
        started.append(RewardWorkers(f"{tmp_path}/function.py:act", 4, timeout_s, memory_gib=1.0))
        return started[-1]

    yield start
    for pool in started:
        pool.close()
        assert not any(alive(worker.process.pid) for worker in pool.workers)


def job(text: str) -> tuple:
    return "test", text, 7, {}


def scored(number: float) -> dict:
    return {"score": float(number), "truth": 7.0}


def test_so_many_calls_are_under_way_at_once_in_one_process(start):
    """None of the first 64 ends before all are under way; the others wait for them."""
    pool = start(timeout_s=60)
    with deadline(100):
        results = pool.score([job("meet")] * 80)
    assert results == [{"score": float(AT_ONCE)}] * 80 and AT_ONCE == 64
    assert len(pool.workers) == 1


def test_results_are_in_the_order_of_the_responses(start):
    pool = start()
    assert pool.score([]) == []
    assert pool.score([job(str(i)) for i in range(150)]) == [scored(i) for i in range(150)]
    assert pool.score([job("loops")]) == [{"score": 1.0}], (
        "a client keeps its loop from batch to batch"
    )


@pytest.mark.parametrize(
    "text",
    # "block" takes ten seconds
    [pytest.param(text, marks=pytest.mark.slow if text == "block" else []) for text in FAILURES],
)
def test_a_failure_costs_its_own_response(start, text):
    pool = start()
    with deadline(60):
        before, failed, after = pool.score([job("1"), job(text), job("2")])
    assert failed.keys() == {"error"} and failed["error"].startswith(FAILURES[text])
    assert (before, after) == (scored(1), scored(2))
    assert pool.score([job("3")]) == [scored(3)]


@pytest.mark.slow  # by default test_reward_workers.py has it
def test_after_memory_error_the_worker_is_new(start):
    pool = start()
    before, failed = pool.score([job("1"), job("hoard")])
    assert before == scored(1) and failed["error"].startswith("MemoryError")
    assert pool.score([job("need")]) == [{"score": 1.0}]


def test_calls_that_hang_take_one_deadline_together(start):
    pool = start()
    began = time.monotonic()
    results = pool.score([job("hang")] * AT_ONCE)
    assert results == [{"error": "timeout after 2 s"}] * AT_ONCE
    assert time.monotonic() - began < 2 * 10


@pytest.mark.parametrize("is_async", [True, False])
def test_a_functions_own_deadline_counts(start, is_async):
    more = "\nact.timeout_s = 0.3\n"
    if not is_async:
        more = (
            "\ndef act(data_source, solution_str, ground_truth, extra_info=None):\n    "
            "time.sleep(600)\n" + more
        )
    assert start(more, timeout_s=600).score([job("hang")]) == [{"error": "timeout after 0.3 s"}]


@pytest.mark.parametrize("timeout_s", ["0", "-1", "float('inf')", "float('nan')", "'60'"])
def test_what_is_no_deadline_is_refused(start, timeout_s):
    with pytest.raises(ValueError, match=r"timeout_s is .*, expected seconds above 0"):
        start(f"\nact.timeout_s = {timeout_s}\n")


def test_an_async_function_behind_a_decorator_is_told(start):
    (result,) = start("\n\nplain = act\n\n\ndef act(**row):\n    return plain(**row)\n").score(
        [job("1")]
    )
    assert "returned a coroutine: write it as a plain `async def`" in result["error"]
