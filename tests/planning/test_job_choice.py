"""Rows of described jobs: within a limit, under a target, or said to be neither."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from problems import PIPELINE

from megatron_offload.config import OffloadConfig
from megatron_offload.errors import TargetError
from megatron_offload.files.strict_model import validate
from megatron_offload.planning.description import JobDescription
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.job_choice import SLOW_LINK_SHARE, JobChoice
from megatron_offload.planning.simulate import simulate_ranks

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
CHECK = runpy.run_path(str(BENCHMARKS / "check_choice.py"))
GIB = 1 << 30


def described(**changes):
    model = {**PIPELINE, "hidden": 4096, "ffn": 16384, "heads": 32}
    return validate(JobDescription, {"model": model | changes}, "job")


@pytest.fixture(scope="module")
def choice():
    return JobChoice(described().job())


def peaks(step):
    return [rank.peak_reserved_bytes for rank in step.ranks]


@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_a_target_is_kept_by_rows_that_read_back_as_the_same_step(choice, share):
    target = int(share * max(peaks(choice.without)))
    planned = choice.under((target, target))
    assert max(peaks(planned.step)) <= target
    text = f"[{', '.join(map(str, planned.rows))}]"
    rows = OffloadConfig(rows=text).rows
    assert rows == planned.rows
    again = choice.step(rows)
    assert (again.step_us, peaks(again)) == (planned.step.step_us, peaks(planned.step))
    for rank, stage in enumerate(planned.found.stages):
        assert stage.needed_bytes()[stage.followed] == peaks(planned.step)[rank]
        assert bool(stage.plans[0].rows) == (stage.plans[0].freed_bytes > 0)
        assert bool(stage.plans[0].rows) == (stage.plans[0].predicted_percent > 0)


@pytest.mark.parametrize("percent", [0.5, 1.0, 20.0])
def test_a_plan_costs_no_more_than_it_may_with_a_slower_link_too(choice, percent):
    planned = choice.within(percent)
    most_us = choice.without.step_us * (1 + percent / 100)
    job = described().job()
    rates = {n: x for n, x in job.machine if "gbps" in n and x and "p2p" not in n}
    slow = {name: rate * SLOW_LINK_SHARE for name, rate in rates.items()}
    slow_job = replace(job, machine=job.machine.model_copy(update=slow))
    slow_us = simulate_ranks(slow_job, planned.step.ranks).step_us
    assert max(planned.step.step_us, slow_us) <= most_us
    assert max(peaks(planned.step)) < max(peaks(choice.without))


def test_more_time_brings_less_memory(choice):
    least = [max(peaks(choice.within(percent).step)) for percent in (0.0, 5.0, 40.0)]
    assert least[0] > least[1] > least[2]


def test_where_all_fits_there_are_no_rows(choice):
    assert choice.under((100 * GIB,) * 2).rows == ()


def test_each_rank_keeps_its_own_target(choice):
    first, second = peaks(choice.without)
    planned = choice.under((first, second * 4 // 5))
    assert peaks(planned.step)[1] <= second * 4 // 5
    assert {row.site for row in planned.rows if row.layers != "all"}
    assert not planned.found.stages[0].plans[planned.found.stages[0].followed].rows


def test_a_target_out_of_reach_says_by_how_much(choice):
    with pytest.raises(TargetError, match=r"rank 0 can't be brought under 1\.00 GiB") as caught:
        choice.under((GIB, 100 * GIB))
    least, more = re.search(r"takes (\S+) GiB, (\S+) [GM]iB more", str(caught.value)).groups()
    assert float(least) > 1
    assert float(more) > 0


def test_only_what_may_be_is_recomputed_and_limits_of_a_user_are_kept():
    job = described().job()
    bare = JobChoice(job, settings=RankSettings(recompute=()))
    target = int(0.75 * max(peaks(bare.without)))
    assert not any(row.recompute for row in bare.under((target, target)).rows)
    limits = ({"max_inflight_bytes": 1 << 20, "prefetch_bytes": 1 << 20}, {})
    settings = (RankSettings(recompute=(), **one) for one in limits)
    waits, free = (JobChoice(job, settings=one).within(1000) for one in settings)
    assert max(peaks(waits.step)) < max(peaks(free.step))


def test_a_long_job_is_planned_by_a_short_one_and_keeps_its_target():
    long = described(num_microbatches=24)
    short = long.short_job()
    assert short.schedule.num_microbatches == 4
    choice = JobChoice(long.job(), short)
    target = int(0.6 * max(peaks(choice.without)))
    planned = choice.under((target, target))
    assert planned.step.ranks[0].offloaded_bytes > 0
    assert max(peaks(planned.step)) <= target
    assert choice.within(1.0).step.step_us <= 1.01 * choice.without.step_us
    for same in ({"schedule": "gpipe", "virtual_stages": 1}, {"num_microbatches": 8}):
        assert described(**{"num_microbatches": 24, **same}).short_job() is None


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["16 x 8192, PP=4, VPP=2", "6 x 8192, one GPU"])
def test_no_search_over_the_same_rows_finds_a_step_one_percent_quicker(name):
    found = list(CHECK["search"](1.0, name))
    assert len(found) == 3
    assert sum("steps_searched" in row for row in found) >= 2
    assert all(row.get("found_quicker_percent", 0.0) <= 1.0 for row in found)
