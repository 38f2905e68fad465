"""The search for the budget that keeps a process within its device memory."""

from __future__ import annotations

import random

import pytest

from megatron_offload.planning.target import MemoryTarget

TARGET = 21 << 30
MOST = 22 << 30
LEAST = 1 << 30


def search(reserved_of, *, start=6 << 30, least=LEAST, most=MOST):
    """Return the search, the budgets it tried, and the one it ended with."""
    target, budget, tried = MemoryTarget(TARGET), start, []
    for _ in range(30):
        if target.is_settled:
            return target, tried, budget
        tried.append(budget)
        budget = target.propose(reserved_of(budget), budget, least, most)
        assert least <= budget <= most
    pytest.fail("it does not end")


@pytest.mark.parametrize("start", [LEAST, 3 << 30, 6 << 30, MOST])
@pytest.mark.parametrize("fixed_gib", [0.5, 12.0, 17.3, 19.9])
def test_it_ends_close_below_the_target(start, fixed_gib):
    target, tried, budget = search(lambda b: int(fixed_gib * 2**30) + b, start=start)
    assert target.is_met
    reserved = int(fixed_gib * 2**30) + budget
    assert TARGET - TARGET // 32 <= reserved <= TARGET or budget == MOST
    assert len(tried) <= 3


@pytest.mark.parametrize("seed", range(50))
def test_what_the_allocator_adds_may_jump(seed):
    def reserved_of(budget):
        noise = random.Random(seed * 7919 + budget // (64 << 20)).uniform(0.0, 1.5)
        return int((13.0 + noise) * 2**30) + budget

    target, tried, budget = search(reserved_of)
    assert target.is_met
    assert reserved_of(budget) <= TARGET
    assert len(tried) <= 10


def test_a_target_that_can_not_be_met_gets_the_least():
    target, _, budget = search(lambda b: (30 << 30) + b)
    assert not target.is_met
    assert budget == LEAST


def test_a_target_with_plenty_of_room_keeps_everything():
    target, _, budget = search(lambda b: 2**30 + b, start=4 << 30, most=5 << 30)
    assert target.is_met
    assert budget == 5 << 30


def test_memory_that_does_not_follow_the_budget_ends_the_search():
    target, tried, _ = search(lambda b: 25 << 30)
    assert not target.is_met
    assert len(tried) <= 10


def test_a_budget_that_misses_later_comes_down_a_few_times():
    target, _, budget = search(lambda b: (13 << 30) + b)
    assert target.correct(TARGET, budget, LEAST) == budget, "kept"
    corrected = target.correct(TARGET + (1 << 30), budget, LEAST)
    assert budget - (1 << 30) - TARGET // 64 <= corrected < budget - (1 << 30)
    assert target.correct(TARGET + (900 << 30), budget, LEAST) == LEAST
    for _ in range(20):
        budget = target.correct(TARGET + 1, budget, LEAST)
    assert target.correct(TARGET + (1 << 30), budget, LEAST) == budget, "it ends"
