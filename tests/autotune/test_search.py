"""What is planned next and which plan stays, from times and peaks alone."""

from __future__ import annotations

import random
import statistics

import pytest

from megatron_offload.autotune.search import MemorySearch, Next, TimeSearch
from megatron_offload.core.profile import GroupKey
from megatron_offload.planning.plan import GroupChoice, MeasuredCost, OffloadPlan, RankPlan

PAIR = [Next.WITHOUT, Next.WITH]
FULL = 64_000
"""What a rank takes where nothing moves."""


def plan_for(targets):
    """Return the plan that keeps such targets, to the byte, on ranks of ``FULL`` bytes."""
    ranks = []
    for target in targets:
        moved_bytes = max(0, FULL - target)
        choice = GroupChoice(GroupKey(0, 0), "fc", moved_bytes, moved_bytes > 0, "as planned")
        ranks.append(RankPlan((choice,), predicted_peak_bytes=FULL - moved_bytes))
    return OffloadPlan("any", 1, 1, tuple(ranks))


def play(search, show, make=plan_for):
    """Be the machine until a plan stays; return what was asked for, and the steps of each plan.

    ``show`` tells what a step shows, from the plan that it follows, or None: what ranks reserve, or
    its time as well.
    """
    asked, steps = [], [[]]
    while search.next is not Next.NOTHING:
        if search.next is Next.PLAN:
            asked.append(search.targets)
            search.answer(make(search.targets))
            steps.append([])
        else:
            steps[-1].append(search.next)
            shown = show(search.plan if search.next is Next.WITH else None)
            search.note(*(shown if isinstance(shown, tuple) else (1000.0, shown)))
    return asked, steps


# Time.


def times(*percents):
    """Tell times of steps whose plans cost this much, one after the other."""
    costs = {}

    def show(plan):
        if plan is None:
            return 1000.0, [0]
        percent = percents[costs.setdefault(id(plan), len(costs))]
        return 1000.0 * (1 + percent / 100), [0]

    return show


def time_search(most_plans=4, percent=0.5, peak=FULL // 2):
    return TimeSearch(plan_for([peak]), FULL, percent, most_plans)


def test_a_plan_that_is_quick_enough_stays_after_eight_steps():
    search = time_search()
    assert play(search, times(0.4)) == ([], [PAIR * 4])
    cost = search.plan.measured
    assert (cost.without_us, cost.with_us) == (1000.0, pytest.approx(1004.0))
    assert (cost.slowdown_percent, cost.noise_percent) == (pytest.approx(0.4), 0.0)
    assert search.is_kept
    assert search.said == f"the plan costs {cost}, at most 0.5 % is wanted: kept"


@pytest.mark.parametrize(
    ("percents", "asked", "kept"),
    [
        ([0.5], [], FULL // 2),  # the limit itself
        ([9, 9, 0.1, 0.6], [48_000, 56_000, 52_000], 56_000),
        ([9, 0.1, 0.2, 0.3], [48_000, 40_000, 36_000], 36_000),
        ([9, 0.1, 9, 0.4], [48_000, 40_000, 44_000], 44_000),
        ([9, 9, 9, 9], [48_000, 56_000, 60_000], None),
    ],
)
def test_the_range_between_slow_and_quick_is_halved(percents, asked, kept):
    search = time_search()
    found, steps = play(search, times(*percents))
    assert found == [(target,) for target in asked]
    assert steps == [PAIR * 4, *[[Next.WITH, *PAIR * 3]] * len(asked)]
    peaks = [rank.predicted_peak_bytes for rank in search.plan.ranks]
    assert peaks == [kept]
    assert search.is_kept == (kept is not None)


def test_where_no_plan_is_quick_enough_nothing_moves_and_the_numbers_are_said():
    search = time_search(most_plans=2)
    play(search, times(3, 2))
    assert (search.plan.moved_bytes, search.plan.measured) == (0, None)
    (choice,) = search.plan.ranks[0].choices
    assert choice.reason == (
        "moving costs too much time: +3.00, +2.00 % of the step was measured, at most 0.5 % is "
        "wanted"
    )
    assert search.said.endswith("; nothing moves from here on: no plan was fast enough")


def test_an_earlier_plan_that_is_followed_again_is_said():
    search = time_search()
    play(search, times(9, 0.1, 9, 9))
    assert search.said.endswith("; an earlier plan is followed again: kept")
    assert search.plan.measured.slowdown_percent == pytest.approx(0.1)


@pytest.mark.parametrize("answer", ["none", "moves nothing", "known"])
def test_where_there_is_no_other_plan_none_is_measured(answer):
    search = time_search()
    first = search.plan
    found = {"none": None, "moves nothing": plan_for([FULL]), "known": first}[answer]
    asked, steps = play(search, times(9), lambda targets: found)
    assert len(asked) == 1
    assert steps == [PAIR * 4, []]
    assert search.plan.moved_bytes == 0


def test_what_is_hardly_less_is_not_tried():
    search = time_search(peak=FULL - FULL // 65)
    assert play(search, times(9))[0] == []


@pytest.mark.parametrize(("peak", "most_plans"), [(FULL, 4), (FULL // 2, 0)])
def test_a_plan_that_moves_nothing_or_is_trusted_needs_no_steps(peak, most_plans):
    search = time_search(most_plans, peak=peak)
    assert search.next is Next.NOTHING
    assert search.plan == plan_for([peak])


def test_steps_behind_a_change_do_not_count():
    starred, count = {1, 2, 9}, iter(range(1, 99))
    search = time_search(most_plans=2)
    show = times(9, 0.1)
    play(search, lambda plan: (9e9, [0]) if next(count) in starred else show(plan))
    assert search.plan.measured.slowdown_percent == pytest.approx(0.1)


def test_the_noise_is_the_error_of_the_measured_slowdown():
    """Of a thousand measurements of the same plan, two thirds err by at most what they say."""
    rng = random.Random(7)
    costs = [
        MeasuredCost.of(*([rng.gauss(1000.0, 10.0) for _ in range(21)] for _ in PAIR))
        for _ in range(1000)
    ]
    claimed = statistics.mean(cost.noise_percent for cost in costs)
    assert statistics.stdev(cost.slowdown_percent for cost in costs) == pytest.approx(claimed, 0.1)
    cost = MeasuredCost.of([100.0, 101.0, 99.0], [103.0, 104.03, 101.97])
    assert cost.noise_percent == pytest.approx(
        1.51717, rel=1e-4
    )  # sqrt(pi / 3) * 1.4826 * 1 of 100
    assert str(cost) == "+3.00 % (standard error 1.52 %) of 0.1 ms, by 3 steps of each kind"


@pytest.mark.parametrize("seed", range(100))
def test_whatever_moving_costs_the_limit_is_kept_and_little_memory_is_missed(seed):
    rng = random.Random(seed)
    peak, limit = rng.randrange(FULL // 8, FULL * 7 // 8), rng.choice([0.0, 0.5, 5.0])
    free_bytes, power, grain = rng.randrange(FULL), rng.uniform(0.5, 3), rng.choice([1, 100, 700])
    spread = rng.choice([0.0, 0.0, 0.002])

    def percent(plan):
        return max(0, plan.moved_bytes - free_bytes) ** power / 50

    def show(plan):
        cost = 1 + percent(plan) / 100 if plan else 1.0
        return 1000.0 * cost * rng.uniform(1, 1 + spread), [0]

    search = TimeSearch(plan_for([peak]), FULL, limit, 4)
    asked, steps = play(search, show, lambda targets: plan_for([targets[0] // grain * grain]))
    assert len(asked) <= 3
    assert sum(map(len, steps)) <= 1 + 4 * 7
    if spread:
        return
    assert not search.plan.moved_bytes or percent(search.plan) <= limit
    best = max(peak, FULL - free_bytes - int((50 * limit) ** (1 / power)))
    missed_bytes = FULL - search.plan.moved_bytes - best
    assert missed_bytes <= (FULL - peak) / 8 + FULL / 64 + 4 * grain


# Memory.

WANTED = 64_000


def memory_search(*wanted, most_plans=4):
    return MemorySearch(plan_for_memory(wanted), wanted, most_plans)


def plan_for_memory(targets):
    """Return a plan of ranks that take twice as much as is wanted."""
    return plan_for([target - WANTED for target in targets])


def test_a_plan_that_keeps_its_targets_and_uses_them_stays_after_four_steps():
    search = memory_search(WANTED, WANTED)
    shown = iter([[10**9] * 2, [WANTED, 1], [1, WANTED * 15 // 16], [1, 1]])
    assert play(search, lambda plan: next(shown)) == ([], [[Next.WITH] * 4])
    assert [rank.measured_peak_bytes for rank in search.plan.ranks] == [WANTED, WANTED * 15 // 16]
    assert search.is_kept
    assert search.said.endswith("at most 62.50 KiB is wanted: kept")


@pytest.mark.parametrize(
    ("wanted", "plans", "asked", "kept"),
    [
        # Missed: lower by as much and a 64th. Who keeps the target is left alone.
        ([WANTED] * 2, [[WANTED + 100, WANTED], [WANTED] * 2], [(WANTED - 1100, WANTED)], 1),
        # Much room: higher, but for a 32nd.
        ([WANTED] * 2, [[WANTED - 8000, WANTED], [WANTED] * 2], [(WANTED + 6000, WANTED)], 1),
        # What was seen to miss is not asked for again.
        (
            [WANTED],
            [[WANTED + 20_000], [WANTED - 30_000], [WANTED]],
            [(WANTED - 21_000,), (WANTED - 10_500,)],
            2,
        ),
        # Of those that keep their targets the one that moves least, else the nearest one.
        ([WANTED], [[WANTED - 8000], *[[WANTED + 2]] * 3], [(70_000,), None, None], 0),
        ([WANTED], [[WANTED + 9], [WANTED + 5], [WANTED + 7], [WANTED + 6]], [None] * 3, 1),
    ],
)
def test_targets_follow_what_ranks_reserve(wanted, plans, asked, kept):
    search = memory_search(*wanted)
    made = [search.plan]

    def make(targets):
        made.append(plan_for_memory(targets))
        return made[-1]

    found, _ = play(search, lambda plan: plans[len(made) - 1], make)
    assert len(found) == len(asked)
    for one, other in zip(found, asked, strict=True):
        assert other in (None, one)
    assert search.plan.ranks[0].choices == made[kept].ranks[0].choices
    most = [rank.measured_peak_bytes for rank in search.plan.ranks]
    assert most == plans[kept]
    assert search.is_kept == all(map(int.__le__, most, wanted))
    is_earlier = kept < len(made) - 1
    assert ("an earlier plan is followed again" in search.said) == (is_earlier and search.is_kept)
    assert ("more than wanted stay reserved" in search.said) != search.is_kept


def test_a_rank_that_moves_nothing_is_given_no_more():
    search = MemorySearch(plan_for([FULL, 1]), [WANTED] * 2, 4)
    assert play(search, lambda plan: [1, WANTED])[0] == []


def test_where_no_plan_can_be_made_less_is_asked_for_down_to_next_to_nothing():
    search = memory_search(WANTED)
    asked, _ = play(search, lambda plan: [WANTED + 3000], lambda targets: None)
    assert asked == [(WANTED - less,) for less in (4000, 2000, 1000, 500)]
    assert not search.is_kept


@pytest.mark.parametrize("seed", range(60))
def test_ranks_whose_memory_follows_their_plans_come_under_their_targets(seed):
    rng = random.Random(seed)
    wanted = [rng.randrange(10_000, 100_000) for _ in range(4)]
    shares = [rng.uniform(0.8, 1.2) for _ in wanted]
    offsets = [rng.randrange(-2000, 2000) for _ in wanted]
    targets = list(wanted)

    def make(asked):
        targets[:] = asked
        return plan_for([target - 2 * WANTED for target in asked])

    def show(plan):
        each = zip(targets, shares, offsets, strict=True)
        return [int(share * target + offset) for target, share, offset in each]

    search = MemorySearch(make(wanted), wanted, 4)
    _, steps = play(search, show, make)
    assert len(steps) <= 4
    assert search.is_kept
    for rank, target in zip(search.plan.ranks, wanted, strict=True):
        assert target - target // 16 <= rank.measured_peak_bytes <= target
