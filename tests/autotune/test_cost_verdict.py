"""The verdict on a plan by measured steps: it comes, in time, and never over the limit."""

from __future__ import annotations

import random
import statistics

import pytest

from megatron_offload.autotune.cost import CostCheck, Next, most_steps
from megatron_offload.planning.plan import MeasuredCost

STEPS = (Next.WITHOUT, Next.WITH)
MOVED = 1_000_000
"""Bytes that the first plan moves; each later one moves what it may."""


def run(check, plans, step_us):
    """Feed a check until its verdict.

    Args:
        check: a new one.
        plans: true slowdown in percent of each plan that would be made.
        step_us: tells the time of a step, from its true slowdown in percent.

    Returns:
        For each plan the kinds of its steps and their times.
    """
    followed = [[]]
    while check.next in (*STEPS, Next.PLAN):
        if check.next is Next.PLAN:
            assert check.follow_next_plan(check.most_bytes)
            followed.append([])
            continue
        kind = check.next
        time_us = step_us(plans[len(followed) - 1] if kind is Next.WITH else 0.0)
        followed[-1].append((kind, time_us))
        check.note(time_us)
    return followed


def run_one(check, percent):
    """Take the steps of one plan."""
    while check.next in STEPS:
        check.note(exact(percent if check.next is Next.WITH else 0.0))


def counted(steps, num_pairs):
    """Return the times that count, of steps without and with offload."""
    assert [kind for kind, _ in steps[-2 * num_pairs :]] == [*STEPS] * num_pairs
    times = [time_us for _, time_us in steps[-2 * num_pairs :]]
    return times[::2], times[1::2]


def exact(percent):
    return 1000.0 * (1 + percent / 100)


def test_a_plan_that_is_fast_enough_is_kept_at_once():
    check = CostCheck(0.5, 3, MOVED)
    (steps,) = run(check, [0.4], exact)
    assert check.next is Next.KEEP
    assert [kind for kind, _ in steps] == [*STEPS] * 4
    (cost,) = check.costs
    assert (cost.without_us, cost.with_us) == (1000.0, pytest.approx(1004.0))
    assert (cost.slowdown_percent, cost.noise_percent) == (pytest.approx(0.4), 0.0)
    assert cost.num_pairs == 3


def test_the_limit_itself_is_kept_and_a_hair_above_is_not():
    for percent, verdict in ((25.0, Next.KEEP), (25.1, Next.GIVE_UP)):
        check = CostCheck(25.0, 1, MOVED)
        run(check, [percent] * 4, exact)
        assert check.next is verdict


def test_plans_that_are_too_slow_are_made_again_until_one_is_fast_enough():
    check = CostCheck(0.5, 2, MOVED)
    steps = run(check, [3.0, 0.7, 0.49, 0.6], exact)
    assert check.next is Next.KEEP
    assert check.best == 2
    assert [cost.slowdown_percent for cost in check.costs] == pytest.approx([3.0, 0.7, 0.49, 0.6])
    kinds = [[kind for kind, _ in each] for each in steps]
    assert kinds == [[*STEPS] * 3, *[[Next.WITH, *STEPS * 2]] * 3]


def test_between_a_slow_plan_and_a_quick_one_there_may_be_a_better_one():
    check, asked = CostCheck(0.5, 1, MOVED), []
    for percent in (9.0, 0.1, 0.2, 0.6):
        while check.next in STEPS:
            check.note(exact(percent if check.next is Next.WITH else 0.0))
        asked.append(check.most_bytes)
        if check.next is Next.PLAN:
            assert check.follow_next_plan(check.most_bytes)
    assert asked == [MOVED // 2, 3 * MOVED // 4, 7 * MOVED // 8, 7 * MOVED // 8]
    assert (check.next, check.best) == (Next.KEEP, 2)


@pytest.mark.parametrize(
    ("limit", "slowdown", "share"),
    [
        (0.5, 0.51, 0.75),
        (0.5, 2.0, 0.6299605),
        (0.5, 3.1, 0.5443381),
        (0.5, 9, 0.5),
        (0, 0.01, 0.5),
    ],
)
def test_a_next_plan_moves_less_the_more_so_the_slower_the_last_was(limit, slowdown, share):
    check = CostCheck(limit, 1, MOVED)
    run_one(check, slowdown)
    assert check.next is Next.PLAN
    assert check.most_bytes == pytest.approx(share * MOVED, rel=1e-4)


def test_after_the_fourth_plan_nothing_moves():
    check = CostCheck(0.5, 3, MOVED)
    steps = run(check, [3.0, 2.0, 1.0, 0.6], exact)
    assert check.next is Next.GIVE_UP
    assert sum(map(len, steps)) == most_steps(3) == 29
    assert most_steps(0) == 0


def test_first_steps_behind_a_change_do_not_count():
    check = CostCheck(0.5, 3, MOVED)
    slow = iter([True, True] + [False] * 99)  # the memory of both kinds is taken anew
    run(check, [0.1], lambda percent: 9e9 if next(slow) else exact(percent))
    assert check.next is Next.KEEP
    check = CostCheck(0.5, 3, MOVED)
    slow = iter([False] * 8 + [True] + [False] * 99)  # the second plan's first step
    run(check, [3.0, 0.1, 9, 9], lambda percent: 9e9 if next(slow) else exact(percent))
    assert (check.next, check.best) == (Next.KEEP, 1)


def test_noise_is_that_of_the_steps_without_offload():
    cost = MeasuredCost.of([100.0, 101.0, 99.0], [103.0, 104.03, 101.97])
    assert cost.slowdown_percent == pytest.approx(3.0)
    # sqrt(pi / 3) * 1.4826 * 1 of 100
    assert cost.noise_percent == pytest.approx(1.51717, rel=1e-4)
    assert MeasuredCost.of([100.0], [103.0]).noise_percent == 0.0
    assert str(cost) == "+3.00 % (standard error 1.52 %) of 0.1 ms, by 3 steps of each kind"


def test_the_noise_is_the_error_of_the_measured_slowdown():
    """Of a thousand measurements of the same plan, two thirds err by at most what they say."""
    rng = random.Random(7)
    errors, claims = [], []
    for _ in range(1000):
        times = [[rng.gauss(1000.0, 10.0) for _ in range(21)] for _ in STEPS]
        cost = MeasuredCost.of(*times)
        errors.append(cost.slowdown_percent)
        claims.append(cost.noise_percent)
    assert statistics.stdev(errors) == pytest.approx(statistics.mean(claims), rel=0.1)


@pytest.mark.parametrize("seed", range(100))
def test_random_plans_end_in_time_and_never_over_the_limit(seed):
    rng = random.Random(seed)
    limit, num_pairs = rng.choice([0.0, 0.5, 5.0]), rng.randint(1, 6)
    noise = rng.choice([0.0, 0.0, 0.1, 3.0])
    plans = [rng.choice([-1.0, 0.0, rng.uniform(0, 2), rng.uniform(0, 20)]) for _ in range(4)]
    check = CostCheck(limit, num_pairs, MOVED)
    steps = run(check, plans, lambda percent: exact(percent) * rng.uniform(1, 1 + noise / 100))
    assert sum(map(len, steps)) <= most_steps(num_pairs)
    assert len(check.costs) == len(steps) <= 4
    costs = [MeasuredCost.of(*counted(each, num_pairs)) for each in steps]
    assert costs == check.costs, "what was measured, and nothing else"
    fast = [cost.slowdown_percent - cost.noise_percent <= limit for cost in costs]
    assert check.next is (Next.KEEP if any(fast) else Next.GIVE_UP)
    if any(fast):
        assert check.best == max(index for index, each in enumerate(fast) if each)
        assert not fast[0] or len(costs) == 1, "one that is fast enough at once stays"
    else:
        assert check.best is None
        assert len(costs) == 4
    if noise == 0.0:
        first = next((index for index, each in enumerate(plans) if each <= limit), None)
        assert (check.next is Next.KEEP) == (first is not None)
