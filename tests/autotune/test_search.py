"""Which plan is asked for next, by what the steps of the last have shown: no engine, no clock.

And what a plan has cost the step as a whole, by what each rank has lost in it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_offload.autotune.loop import cost_of
from megatron_offload.autotune.search import search_of
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.profile import GroupKey
from megatron_offload.errors import TargetError
from megatron_offload.observe.measure import MeasuredStep
from megatron_offload.planning.description import load_description
from megatron_offload.planning.job import NO_OFFLOAD, RankSettings
from megatron_offload.planning.plan import GroupChoice, MeasuredCost, OffloadPlan, RankPlan
from megatron_offload.planning.schedule import PassKind
from megatron_offload.planning.simulate import simulate

FULL = 64_000
"""Peak without offload; what is offloaded is the rest of it to a plan's peak."""


def plan_for(peaks):
    ranks = []
    for peak in peaks:
        moved = FULL - peak
        choices = [
            GroupChoice(GroupKey(0, 0), "a", moved, bool(moved), "as planned"),
            GroupChoice(GroupKey(0, 1), "b", FULL - moved, False, "stays"),
        ]
        ranks.append(RankPlan(tuple(choices), moved, moved, peak))
    return OffloadPlan("any", 1, 1, tuple(ranks))


class FakeChooser:
    """Plans in grains, and predicts that so much of the memory can go for the cost that is wanted.

    Args:
        free: that much.
        grain: what plans differ by.
        num_ranks: pipeline ranks.
    """

    lowest_bytes, highest_bytes = FULL // 8, FULL

    def __init__(self, *, free=FULL // 2, grain=1, num_ranks=1):
        self.free, self.grain = free, grain
        self.without = SimpleNamespace(ranks=[None] * num_ranks)
        self.asked = []

    def plan(self, config):
        return plan_for([self.lowest_bytes] * len(self.without.ranks))

    def slowdown_percent(self, plan):
        return max(0.0, 40 * (plan.moved_bytes - self.free) / FULL)

    def within(self, percent):
        moved = min(FULL - self.lowest_bytes, self.free + int(FULL * percent / 40))
        return plan_for([FULL - moved // self.grain * self.grain])

    def under(self, targets):
        if min(targets) < self.lowest_bytes:
            raise TargetError("too low")
        self.asked.append(tuple(targets))
        grain = self.grain
        return plan_for([FULL if each >= FULL else each // grain * grain for each in targets])


def play(search, show, **seen):
    """Be the machine until a plan stays; return how many were measured."""
    num_plans = 0
    while not search.is_converged:
        num_plans += 1
        search.note(*show(search.plan), **seen)
    return num_plans


def cost(percent):
    return MeasuredCost(1000.0 + 10.0 * percent, 10.0 * percent)


def auto(percent=1.0, plans=3):
    return AutoConfig(kind="auto", most_slowdown_percent=percent, measured_plans=plans)


def costing(policy=None, chooser=None, capacity=None):
    """Return a search behind the step that moves nothing."""
    search = search_of(chooser or FakeChooser(), policy or auto(), capacity)
    assert not search.plan.does_something
    search.note(cost(0.0), [None])
    return search


@pytest.mark.parametrize("seed", range(40))
def test_whatever_moving_costs_the_limit_is_kept_and_little_memory_is_missed(seed):
    rng = random.Random(seed)
    free, power = rng.randrange(FULL * 7 // 8), rng.uniform(1, 3)
    limit, grain = rng.choice([0.5, 1.0, 5.0]), rng.choice([1, 100, 700])
    chooser = FakeChooser(free=rng.randrange(FULL // 8, FULL * 7 // 8), grain=grain)

    def percent(plan):
        return max(0.0, (plan.moved_bytes - free) / FULL) ** power * 40

    search = costing(auto(limit), chooser)
    assert play(search, lambda plan: (cost(percent(plan)), [None])) <= 3
    assert percent(search.plan) <= limit
    # The most that could have gone at this cost, where the prediction was about right.
    best = min(FULL * 7 / 8, free + FULL * (limit / 40) ** (1 / power))
    if abs(chooser.free - best) < FULL / 8:
        assert best - search.plan.moved_bytes <= 0.45 * FULL


def test_of_plans_that_are_quick_enough_the_final_one_is_what_reserves_least():
    search = costing(chooser=FakeChooser(free=FULL // 3))
    followed, reserved = [], iter([FULL // 8, FULL, FULL])
    play(search, lambda plan: followed.append(plan) or (cost(0.2), [next(reserved)]))
    assert followed[0].moved_bytes < followed[1].moved_bytes
    assert search.plan.is_like(followed[0])


def test_where_no_plan_is_quick_enough_nothing_moves_unless_that_does_not_fit():
    for capacity, moves in ((None, False), (FULL, False), (FULL * 3 // 4, True)):
        search = costing(capacity=capacity)
        play(search, lambda plan: (cost(30.0 * plan.moved_bytes / FULL + 3), [None]))
        assert (search.plan.moved_bytes > 0) == moves
        assert search.is_kept != moves


def test_where_nothing_moves_it_is_said_what_the_least_costly_plan_costs():
    search = costing()
    assert play(search, lambda plan: (cost(50.0), [None]), is_host_bound=True) <= 3
    assert not search.plan.does_something
    assert not search.is_kept or search.plan.measured.slowdown_percent == 0
    assert search.least_cost().startswith("the least costly plan that was tried costs 50.00 % of")
    assert "a CUDA graph of the whole step is not" in search.said
    settled = costing(chooser=FakeChooser(free=0, grain=FULL))
    assert settled.is_converged
    assert settled.least_cost() == "a plan that frees a little is predicted to cost 40 %"


@pytest.mark.parametrize("plans", [0, 1])
def test_a_plan_is_trusted_where_none_may_be_measured_and_tried_where_one_may(plans):
    search = costing(auto(plans=plans))
    assert search.plan.does_something
    assert search.is_converged == search.said.endswith("as predicted") == (plans == 0)
    assert play(search, lambda plan: (cost(0.5), [None])) == plans
    assert search.plan.does_something


# Memory.

WANTED = 40_000


def memory(*wanted, chooser=None):
    policy = MemoryTargetConfig(kind="memory_target", memory_target=list(wanted), measured_plans=3)
    chooser = chooser or FakeChooser(num_ranks=len(wanted))
    search = search_of(chooser, policy, None)
    search.note(cost(0.0), [10**9] * len(wanted))
    return search


@pytest.mark.parametrize(
    ("wanted", "shown", "asked", "kept"),
    [
        # The targets themselves, and what keeps them.
        ([WANTED] * 2, [[WANTED, WANTED * 48 // 49]], [], 0),
        # Missed: lower by as much and a 96th. Who keeps the target is left alone.
        ([WANTED] * 2, [[WANTED + 100, WANTED], [WANTED] * 2], [(WANTED - 516, WANTED)], 1),
        # Much room: higher, but for a 96th.
        ([WANTED] * 2, [[WANTED - 8000, WANTED], [WANTED] * 2], [(WANTED + 7584, WANTED)], 1),
        # What was seen to miss is not asked for again.
        (
            [WANTED],
            [[WANTED + 20_000], [WANTED - 25_000], [WANTED]],
            [(WANTED - 20_416,), (WANTED - 10_208,)],
            2,
        ),
        # Of those that keep their targets the quickest, else the nearest one.
        ([WANTED], [[WANTED - 8000], [WANTED + 2], [WANTED + 2]], [None, None], 0),
        ([WANTED], [[WANTED + 9], [WANTED + 5], [WANTED + 7]], [None, None], 1),
    ],
)
def test_targets_follow_what_ranks_reserve(wanted, shown, asked, kept):
    chooser = FakeChooser(num_ranks=len(wanted))
    search = memory(*wanted, chooser=chooser)
    followed, steps = [], iter(shown)
    play(search, lambda plan: followed.append(plan) or (cost(0.5), next(steps)))
    assert len(chooser.asked) == 2 + len(asked)
    for one, other in zip(chooser.asked[2:], asked, strict=True):
        assert other in (None, one)
    assert search.plan.is_like(followed[kept])
    assert [rank.measured_peak_bytes for rank in search.plan.ranks] == shown[kept]
    assert search.is_kept == all(map(int.__le__, shown[kept], wanted))


def test_a_target_below_what_there_can_be_is_gone_for_as_far_as_that_goes():
    search = memory(5000)
    assert play(search, lambda plan: (cost(0.5), [plan.ranks[0].predicted_peak_bytes])) <= 1
    assert search.plan.ranks[0].predicted_peak_bytes == FULL // 8
    assert not search.is_kept


def test_where_unknown_what_is_reserved_a_plan_is_trusted():
    search = memory(WANTED)
    assert play(search, lambda plan: (cost(0.5), [None])) == 1
    assert "unknown sizes are reserved" in search.said


@pytest.mark.parametrize("seed", range(40))
def test_ranks_whose_memory_follows_their_plans_come_under_their_targets(seed):
    rng = random.Random(seed)
    wanted = [rng.randrange(20_000, 60_000) for _ in range(4)]
    shares = [rng.uniform(0.85, 1.15) for _ in wanted]
    offsets = [rng.randrange(-1000, 1000) for _ in wanted]
    search = memory(*wanted)

    def show(plan):
        each = zip([rank.predicted_peak_bytes for rank in plan.ranks], shares, offsets, strict=True)
        return cost(0.5), [int(share * peak + offset) for peak, share, offset in each]

    assert play(search, show) <= 3
    for rank, target in zip(search.plan.ranks, wanted, strict=True):
        assert rank.measured_peak_bytes <= target
        assert rank.measured_peak_bytes >= target - target // 10 or not rank.moved_bytes


# What a plan has cost.


STEP_US = 1e6


@pytest.fixture(scope="module")
def job():
    """Return a job of four ranks with two virtual stages each."""
    return load_description("configs/models/gpt_16x8192_pp4_vpp2.yaml").job()


def remaking(job, rank, copied_bytes=0):
    """Return what a rank measures that recomputes all, and has just that to lose."""
    lost_us = []
    for one in job.schedule.ranks[rank]:
        if one.kind is PassKind.FORWARD:
            units = [unit for work in job.stages[one.stage].groups for unit in work.units]
            lost_us.append([0.0, sum(unit.us for unit in units)])
    return MeasuredStep(STEP_US, lost_us, copied_bytes, None, 0.0, 50.0)


@pytest.mark.parametrize("ranks", [(0,), (3,), (0, 1, 2, 3)])
def test_a_step_loses_what_it_is_longer_whatever_its_ranks_lose(job, ranks):
    shown = {rank: [remaking(job, rank)] for rank in ranks}
    everything = RankSettings(offloads=False)
    settings = [everything if rank in ranks else NO_OFFLOAD for rank in range(4)]
    longer_us = simulate(job, settings).step_us - simulate(job).step_us
    cost = cost_of(job, shown)
    assert cost.lost_us == pytest.approx(longer_us)
    assert cost.slowdown_percent == pytest.approx(100 * longer_us / (STEP_US - longer_us))


def test_a_loss_costs_less_where_a_rank_would_have_waited_anyway(job):
    costs = []
    for chunk in range(16):
        for is_backward in (False, True):
            lost_us = [[0.0, 0.0] for _ in range(16)]
            lost_us[chunk][is_backward] = 100.0
            costs.append(
                cost_of(job, {0: [MeasuredStep(STEP_US, lost_us, 0, None, 0.0, 0.0)]}).lost_us
            )
    assert min(costs) == pytest.approx(0, abs=1e-6)
    assert max(costs) == pytest.approx(100)


def test_of_processes_that_do_the_same_the_slowest_counts_and_copies_slow_kernels(job):
    slow, quick = remaking(job, 0), remaking(job, 0)._replace(lost_us=[[0.0, 0.0]] * 16)
    alone = cost_of(job, {0: [slow]})
    assert cost_of(job, {0: [quick, slow, quick]}) == alone
    copying = cost_of(
        replace(job, copies_gbps=10_000.0), {0: [remaking(job, 0, copied_bytes=40 * 10**9)]}
    )
    assert alone.lost_us < copying.lost_us <= alone.lost_us + 4000 + 1e-6


def test_where_steps_are_cpu_bound_what_it_gives_the_engine_is_lost(job):
    step = remaking(job, 0)
    lost_us = [cost_of(job, {0: [step._replace(idle_share=x)]}).lost_us for x in (0.25, 0.3)]
    assert lost_us[1] == pytest.approx(lost_us[0] + step.host_us)
