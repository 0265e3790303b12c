"""Whole groups move between ranks: in each minibatch all have about as many tokens to compute."""

import pickle
import random
import threading
from collections import Counter

import pytest
import torch

from common import balance
from common.balance import Group, balance_ranks, num_tokens, rank_of_prompts
from common.distributed import World
from common.types import Episode


def episode(prompt: int, sample: int, length: int, trained: bool = True) -> Episode:
    """Of 5 + `length` tokens."""
    ids, mask = list(range(length)), [int(trained)] * length
    return Episode(prompt, sample, [prompt] * 5, ids, mask, [-0.5] * length, score=0.0)


def groups_of(seed: int, prompts: int, samples: int) -> list[list[Episode]]:
    """Lengths as they are: lognormal."""
    rng = random.Random(seed)
    return [
        [episode(p, s, min(400, int(rng.lognormvariate(4, 1))) + 1) for s in range(samples)]
        for p in range(prompts)
    ]


def on_ranks(monkeypatch, dealt: list[list[list[Episode]]], minibatch_of: dict[int, int]) -> list:
    """(sampled, trained, split) of each rank: a thread that gathers what the others bring."""
    size = len(dealt)
    local, barrier = threading.local(), threading.Barrier(size, timeout=60)
    board: dict[int, bytes] = {}

    def gather(value: object) -> list:
        board[local.rank] = pickle.dumps(value)
        barrier.wait()
        values = [pickle.loads(board[rank]) for rank in range(size)]
        barrier.wait()
        return values

    def balanced(rank: int) -> None:
        local.rank = rank
        sampled = [e for group in dealt[rank] for e in group]
        trained = [e for e in sampled if e.sample_index or e.prompt_index % 3]
        split = [[] for _ in range(1 + max(minibatch_of.values()))]
        for i, e in enumerate(trained):
            split[minibatch_of[e.prompt_index]].append(i)
        world = World(rank, size, rank, torch.device("cpu"))
        results[rank] = balance_ranks(sampled, trained, split, world)

    results: list = [None] * size
    monkeypatch.setattr(balance, "gather_objects", gather)
    threads = [threading.Thread(target=balanced, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("num_ranks, num_minibatches", [(2, 1), (4, 3), (8, 2)])
def test_ranks_have_about_as_many_tokens_in_each_minibatch(monkeypatch, num_ranks, num_minibatches):
    groups = groups_of(1, prompts=64, samples=4)
    minibatch_of = {p: p * num_minibatches // 64 for p in range(64)}
    dealt = [groups[rank::num_ranks] for rank in range(num_ranks)]
    results = on_ranks(monkeypatch, dealt, minibatch_of)

    keys = [(e.prompt_index, e.sample_index) for sampled, *_ in results for e in sampled]
    assert sorted(keys) == [(p, s) for p in range(64) for s in range(4)], "each once"
    loads = [Counter() for _ in range(num_minibatches)]
    for rank, (sampled, trained, split) in enumerate(results):
        own = [(e.prompt_index, e.sample_index) for e in sampled]
        assert own == sorted(own)
        for p in {p for p, _ in own}:
            assert [s for q, s in own if q == p] == [0, 1, 2, 3], "groups stay whole"
        assert {id(e) for e in trained} == {
            id(e) for e in sampled if e.sample_index or e.prompt_index % 3
        }
        assert sorted(i for part in split for i in part) == list(range(len(trained)))
        for minibatch, numbers in enumerate(split):
            assert all(minibatch_of[trained[i].prompt_index] == minibatch for i in numbers)
            for p in {trained[i].prompt_index for i in numbers}:
                group = [trained[i] for i in numbers if trained[i].prompt_index == p]
                loads[minibatch][rank] += num_tokens(group)
    largest = max(num_tokens(group) for group in groups)
    for load in loads:
        assert max(load.values()) - min(load.values()) <= largest, "longest first"

    # what a dump holds, and ranks that have sampled other groups, end in the same place
    again = on_ranks(monkeypatch, [by_group(sampled) for sampled, *_ in results], minibatch_of)
    shuffled = random.Random(2).sample(groups, len(groups))
    other = on_ranks(
        monkeypatch, [shuffled[rank::num_ranks] for rank in range(num_ranks)], minibatch_of
    )
    for same in (again, other):
        assert [result[0] for result in same] == [result[0] for result in results]
        assert [result[1:] for result in same] == [result[1:] for result in results]


def by_group(episodes: list[Episode]) -> list[list[Episode]]:
    prompts = sorted({e.prompt_index for e in episodes})
    return [[e for e in episodes if e.prompt_index == p] for p in prompts]


def test_groups_of_one_length_stay_where_they_were_dealt():
    assert rank_of_prompts([Group(p, 0, 7) for p in range(8)], 4) == {p: p % 4 for p in range(8)}


def test_the_longest_group_has_a_rank_to_itself():
    groups = [Group(0, 0, 10), Group(1, 0, 100), Group(2, 0, 10), Group(3, 0, 10), Group(4, 1, 5)]
    assert rank_of_prompts(groups, 2) == {1: 0, 0: 1, 2: 1, 3: 1, 4: 0}


def test_tokens_of_a_group_are_its_prompt_once_and_what_is_trained_on():
    assert num_tokens([episode(0, 0, 7), episode(0, 1, 20, trained=False), episode(0, 2, 3)]) == 15
    assert num_tokens([episode(0, 0, 7, trained=False)]) == 0


def test_a_prompt_that_is_not_shared_counts_with_each_response():
    group = [episode(0, s, 20, trained=s != 1) for s in range(3)]
    assert num_tokens(group, share_prompts=False) == 2 * (5 + 20)
    assert num_tokens(group) == 5 + 2 * 20


def test_a_rank_alone_keeps_its_lists():
    lists = [episode(1, 0, 3)], [], [[]]
    alone = World(0, 1, 0, torch.device("cpu"))
    assert all(a is b for a, b in zip(balance_ranks(*lists, alone), lists))
