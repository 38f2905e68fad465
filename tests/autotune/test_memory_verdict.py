"""From what ranks were measured to reserve to the targets of the next plan."""

from __future__ import annotations

import random

import pytest

from megatron_offload.autotune.memory import TargetCheck

T = 64_000


def test_what_is_kept_and_used_stays():
    check = TargetCheck([T, T], 4)
    assert not check.wants_another([T, T - T // 16], [1, 1])
    assert check.planned_bytes == (T, T)
    assert check.missed_bytes([T, T - 1]) == 0


def test_a_miss_is_answered_by_more_than_it_was_missed_by():
    check = TargetCheck([T, 2 * T], 4)
    assert check.missed_bytes([T + 100, 2 * T + 10]) == 110
    assert check.wants_another([T + 100, T + 1], [1, 0])
    assert check.planned_bytes == (T - 100 - 1000, 2 * T)


def test_a_rank_with_much_room_may_reserve_more_unless_it_moves_nothing():
    check = TargetCheck([T, T], 4)
    assert check.wants_another([T - 8000, T - 8000], [1, 0])
    assert check.planned_bytes == (T + 8000 - 2000, T)


def test_what_was_seen_to_miss_is_not_planned_for_again():
    check = TargetCheck([T], 9)
    assert check.wants_another([T + 20_000], [1])
    (lower,) = check.planned_bytes
    assert check.wants_another([T - 30_000], [1])
    assert check.planned_bytes == ((lower + T) // 2,)


def test_where_no_plan_can_be_made_less_is_asked_for_down_to_next_to_nothing():
    check = TargetCheck([T, T, T], 9)
    assert check.wants_another([T + 3000, T - 30_000, T], [1, 1, 1])
    down, up, same = check.planned_bytes
    assert (down, same) == (T - 4000, T)
    assert up > T
    asked = []
    while check.give_way():
        asked.append(check.planned_bytes)
    assert asked == [(T - less, up, T) for less in (2000, 1000, 500)]


@pytest.mark.parametrize("most_plans", [1, 2, 5])
def test_it_ends_after_so_many_plans(most_plans):
    check = TargetCheck([T], most_plans)
    answers = [check.wants_another([T + 1], [1]) for _ in range(most_plans)]
    assert answers == [True] * (most_plans - 1) + [False]


@pytest.mark.parametrize("seed", range(30))
def test_ranks_whose_memory_follows_their_plans_come_under_their_targets(seed):
    rng = random.Random(seed)
    targets = [rng.randrange(10_000, 100_000) for _ in range(4)]
    shares = [rng.uniform(0.8, 1.2) for _ in targets]
    offsets = [rng.randrange(-2000, 2000) for _ in targets]
    check, history = TargetCheck(targets, 9), []

    def reserve():
        each = zip(check.planned_bytes, shares, offsets, strict=True)
        return [int(share * planned + offset) for planned, share, offset in each]

    history.append(reserve())
    while check.wants_another(history[-1], [1] * 4):
        history.append(reserve())
    assert check.missed_bytes(history[-1]) == 0
    for reserved, target in zip(history[-1], targets, strict=True):
        assert reserved >= target - target // 16
    assert len(history) <= 4
