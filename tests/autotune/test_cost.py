"""What a plan has cost the step as a whole, by what each rank has lost in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_offload.autotune.loop import cost_of
from megatron_offload.observe.measure import MeasuredStep
from megatron_offload.planning.description import load_description
from megatron_offload.planning.job import NO_OFFLOAD, RankSettings
from megatron_offload.planning.schedule import PassKind
from megatron_offload.planning.simulate import simulate

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
