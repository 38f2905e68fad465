"""Rows of described jobs: within a limit, under a target, or said to be neither."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from problems import PIPELINE

from megatron_offload.config import OffloadConfig
from megatron_offload.errors import TargetError
from megatron_offload.files.strict_model import validate
from megatron_offload.planning import job_search
from megatron_offload.planning.description import JobDescription
from megatron_offload.planning.job import UNLIMITED, RankSettings, node_bytes
from megatron_offload.planning.job_choice import JobChoice
from megatron_offload.planning.job_judge import SLOW_LINK_SHARE
from megatron_offload.planning.job_rows import with_rows
from megatron_offload.planning.simulate import simulate, simulate_ranks

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
CHECK = runpy.run_path(str(BENCHMARKS / "check_choice.py"))
GIB = 1 << 30


def described(**changes):
    model = {**PIPELINE, "hidden": 4096, "ffn": 16384, "heads": 32}
    return validate(JobDescription, {"model": model | changes}, "job")


@pytest.fixture(scope="module", autouse=True)
def little_work():
    """Search for a short time; what holds by construction holds then too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_search, "_MOST_WORK_US", 3e5)
        yield


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
    again = simulate(with_rows(described().job(), rows), UNLIMITED)
    assert (again.step_us, peaks(again)) == (planned.step.step_us, peaks(planned.step))
    (stage,) = planned.found.stages
    assert stage.needed_bytes()[stage.followed] == max(peaks(planned.step))
    assert stage.under(target) == stage.followed
    assert stage.plans[0].rows == ()


@pytest.mark.parametrize("percent", [0.5, 1.0, 20.0])
def test_a_plan_costs_no_more_than_it_may_with_a_slower_link_too(choice, percent):
    planned = choice.within(percent)
    most_us = choice.without.step_us * (1 + percent / 100 + 1e-6)
    job = described().job()
    rates = {n: x for n, x in job.machine if "gbps" in n and x and "p2p" not in n}
    slow = {name: rate * SLOW_LINK_SHARE for name, rate in rates.items()}
    slow_job = replace(job, machine=job.machine.model_copy(update=slow))
    slow_us = simulate_ranks(slow_job, planned.step.ranks).step_us
    assert max(planned.step.step_us, slow_us) <= most_us
    assert max(peaks(planned.step)) < max(peaks(choice.without))


def test_each_rank_keeps_its_own_target(choice):
    first, second = peaks(choice.without)
    planned = choice.under((first, second * 4 // 5))
    assert peaks(planned.step)[1] <= second * 4 // 5
    assert {row.site for row in planned.rows if row.layers != "all"}
    assert planned.step.ranks[0].offloaded_bytes == 0


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


def test_a_node_s_host_memory_is_a_limit_that_plans_keep():
    job = described().job()
    target = int(0.6 * max(peaks(simulate(job))))
    free = JobChoice(job).under([target] * 2)
    needed = node_bytes(job, [rank.peak_host_bytes for rank in free.step.ranks])
    for share in (0.5, 0.0):
        machine = job.machine.model_copy(update={"host_bytes": int(share * needed)})
        less = replace(job, machine=machine)
        under, within = JobChoice(less).under([target] * 2), JobChoice(less).within(30.0)
        for step in (under.step, within.step):
            pinned = [rank.peak_host_bytes for rank in step.ranks]
            assert node_bytes(less, pinned) <= share * needed
            assert step.step_us > free.step.step_us
        assert max(peaks(under.step)) <= target


def test_a_long_job_keeps_its_target_and_its_limit():
    choice = JobChoice(described(num_microbatches=24).job())
    target = int(0.6 * max(peaks(choice.without)))
    planned = choice.under((target, target))
    assert planned.step.ranks[0].offloaded_bytes > 0
    assert max(peaks(planned.step)) <= target
    assert choice.within(1.0).step.step_us <= 1.01 * choice.without.step_us


ONE_GPU = {"pipeline_parallel": 1, "virtual_stages": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**ONE_GPU, "num_microbatches": 1},
        {"gated_mlp": True, "virtual_stages": 1, "sequence": 8192},
        {"experts": 4, "num_microbatches": 16},
    ],
)
def test_more_is_never_worse_and_no_written_plan_is_better(changes):
    choice = JobChoice(described(**changes).job())
    bare = max(peaks(choice.without))
    steps = [choice.within(percent).step for percent in (0.0, 0.5, 2.0, 5.0, 15.0, 40.0)]
    needs = [max(peaks(step)) for step in steps]
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] < needs[0]
    least = needs[-1] - bare // 20
    for target in range(bare, least, (least - bare) // 6):
        try:
            steps.append(choice.under([target] * len(choice.without.ranks)).step)
        except TargetError:
            break
        assert max(peaks(steps[-1])) <= target
    times = [step.step_us for step in steps[6:]]
    assert len(times) >= 5
    for before, after in pairwise(times):
        assert before <= after + 2e-4 * choice.without.step_us  # times count to a hundredth percent
    nothing, *written = choice.alternatives.values()
    assert nothing.step_us == pytest.approx(choice.without.step_us)
    assert len(written) >= 5
    for step in steps:
        for other in (one for one in written if step.step_us > 1.0001 * nothing.step_us):
            is_as_small = max(peaks(other)) <= max(peaks(step))
            assert not is_as_small or other.step_us >= step.step_us * (1 - 1e-4)
            is_as_quick = other.step_us <= step.step_us * (1 - 1e-4)
            assert not is_as_quick or max(peaks(other)) > max(peaks(step))


def test_an_answer_does_not_depend_on_what_was_asked_before():
    job = described(virtual_stages=1).job()
    targets = [int(share * max(peaks(simulate(job)))) for share in (0.65, 0.7, 0.8)]
    first, second = JobChoice(job), JobChoice(job)
    steps = [first.under([target] * 2).step.step_us for target in targets]
    second.within(2.0)
    assert [second.under([target] * 2).step.step_us for target in targets[::-1]] == steps[::-1]


@pytest.mark.parametrize("percent", [2.0, 20.0])
def test_plans_need_less_and_less_and_say_what_the_step_takes(choice, percent):
    (stage,) = choice.within(percent).found.stages
    needs = [plan.reserved_bytes for plan in stage.plans]
    assert needs == sorted({*needs}, reverse=True)
    assert stage.within(percent) == stage.followed
    for plan in stage.plans[1::4]:
        step = simulate(with_rows(described().job(), plan.rows), UNLIMITED)
        percent = 100 * (step.step_us / choice.without.step_us - 1)
        assert (max(peaks(step)), percent) == (
            plan.reserved_bytes,
            pytest.approx(plan.predicted_percent),
        )


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["16 x 8192, PP=4, VPP=2", "6 x 8192, one GPU"])
def test_no_search_over_the_same_rows_finds_a_step_one_percent_quicker(name, monkeypatch):
    monkeypatch.setattr(job_search, "_MOST_WORK_US", 4.8e6)
    found = list(CHECK["search"](1.0, name))
    assert len(found) == 3
    assert sum("steps_searched" in row for row in found) >= 2
    assert all(row.get("found_quicker_percent", 0.0) <= 1.0 for row in found)
