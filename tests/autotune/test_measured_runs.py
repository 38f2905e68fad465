"""Runs that measure their plans by their own steps, on the virtual clock: promises hold."""

from __future__ import annotations

import logging

import pytest
from programs import KIB, make_config
from virtual_clock import RUN, SCHEDULE, VirtualJob

from megatron_offload.autotune.plan_run import check_plan, plan_run
from megatron_offload.errors import ConfigError
from megatron_offload.observe.measure import measure_step, tells_reserved
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.plan_file import parse_plan, plan_to_json

GBPS = 1.0
"""What plans are made with."""
LINK = {"d2h_gbps": GBPS, "h2d_gbps": GBPS, "both_gbps": GBPS, "node_gbps": 2 * GBPS}
WITHOUT_US = 2880.0
TARGET = 110 * KIB
"""Something over half of what the step takes without offload."""


def policy_of(**keys):
    return make_config(policy={"machine": {"gpus_per_node": 1, **LINK}, **keys}).policy


def auto(job, **keys):
    policy = policy_of(kind="auto", **keys)
    return plan_run(job.manager, job.step, RUN, policy=policy, schedule=SCHEDULE)


def target(job, **keys):
    policy = policy_of(kind="memory_target", target_bytes=TARGET, **keys)
    return plan_run(job.manager, job.step, RUN, policy=policy, schedule=SCHEDULE)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="megatron_offload.autotune.plan_run")
    return caplog


# Time.


def usual_slowdown_percent(job):
    """Return what the steps from here on cost."""
    with measure_step(job.manager, moves=False) as bare:
        job.step()
    job.step()
    return 100 * (job.step_us() / bare.step_us - 1)


def test_a_plan_that_costs_what_was_predicted_stays(log, monkeypatch):
    job, trims = VirtualJob(GBPS).warmed_up(), []
    monkeypatch.setattr(job.backend, "trim_device", lambda: trims.append(len(job.moved_bytes)))
    plan = auto(job)
    assert plan.policy == "auto"
    assert plan.moved_bytes > 0
    # The profiled step, one of each kind that doesn't count, and three pairs.
    assert job.moved_bytes == [0] + [0, plan.moved_bytes] * 4
    assert trims == [1, 9], "behind the profile, and behind the last pair; not between"
    cost = plan.measured
    assert cost.without_us == pytest.approx(WITHOUT_US)
    assert cost.with_us == pytest.approx(plan.ranks[0].predicted_step_us, rel=1e-3)
    assert usual_slowdown_percent(job) == pytest.approx(cost.slowdown_percent)
    assert job.manager.learner.kept == plan.ranks[0].kept
    assert log.messages == [f"the plan costs {cost}, at most 1 % is wanted: kept"]
    assert parse_plan(plan_to_json(plan), "it") == plan


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("share", "percent"), [(0.15, 0.5), (0.1, 0.5), (0.02, 0.5), (0.3, 0.0), (0.1, 10.0)]
)
def test_the_limit_holds_whatever_the_link_gives(share, percent, log):
    job = VirtualJob(share * GBPS).warmed_up()
    plan = auto(job, most_slowdown_percent=percent)
    assert len(job.moved_bytes) <= 1 + 1 + 4 * 7
    said = [text.rpartition(": ")[2] for text in log.messages]
    assert usual_slowdown_percent(job) <= percent + 1e-9
    assert job.moved_bytes[-1] == plan.moved_bytes
    if share == 0.15:
        first_bytes, *later = [moved for moved in job.moved_bytes if moved][::4][:-1]
        assert said == ["planned again"] * len(later) + ["kept"]
        assert first_bytes > max(later) >= plan.moved_bytes > 0
        assert plan.measured.slowdown_percent <= 0.5
        trusting = VirtualJob(share * GBPS).warmed_up()
        assert auto(trusting, measured_plans=0).measured is None
        assert usual_slowdown_percent(trusting) > 0.5, "the prediction was wrong"


def test_where_every_plan_is_too_slow_nothing_moves_with_a_warning(log):
    job = VirtualJob(0.001 * GBPS).warmed_up()
    plan = auto(job, measured_plans=1)
    assert plan.moved_bytes == 0
    assert log.records[-1].levelno == logging.WARNING
    assert parse_plan(plan_to_json(plan), "it") == plan
    assert set(job.manager.learner.kept.values()) == {
        choice.reason for choice in plan.ranks[0].choices
    }
    job.step()
    assert job.moved_bytes[-1] == 0


# Memory.


class WeighedJob(VirtualJob):
    """The same on a device with an allocator, which takes so much of what is live.

    The profile of the step without offload is what the meter counts, so that plans know nothing of
    the share.
    """

    def __init__(self, share):
        super().__init__(GBPS)
        self.share = share
        self.trims = []
        self.backend.reserved_bytes = self.reserved_bytes
        self.backend.trim_device = self.trim_device

    def reserved_bytes(self):
        return int(self.share * self.meter.peak_bytes)

    def trim_device(self):
        self.trims.append(len(self.moved_bytes))
        self.meter.reset_peak()

    def most_reserved_bytes(self, num_steps=3):
        """Return what later steps reserve."""
        self.trim_device()
        for _ in range(num_steps):
            self.step()
        return self.reserved_bytes()


def test_a_plan_that_keeps_its_target_stays(log):
    job = WeighedJob(1.0).warmed_up()
    job.trims.clear()
    plan = target(job)
    assert job.moved_bytes == [0] + [plan.moved_bytes] * 4
    assert job.trims == [1, 2, 5], "behind the profile, before the first that counts, in the end"
    (rank,) = plan.ranks
    assert rank.measured_peak_bytes == job.most_reserved_bytes() <= TARGET
    assert rank.measured_peak_bytes > 15 / 16 * TARGET
    assert job.manager.learner.kept == rank.kept
    assert [text.rpartition(": ")[2] for text in log.messages] == ["kept"]
    assert parse_plan(plan_to_json(plan), "it") == plan


@pytest.mark.sampled
@pytest.mark.parametrize("share", [1.08, 0.4, 0.7, 0.85, 1.02, 1.3])
def test_the_target_holds_whatever_the_allocator_takes(share):
    trusting, job = WeighedJob(share).warmed_up(), WeighedJob(share).warmed_up()
    first, plan = target(trusting, measured_plans=0), target(job)
    assert first.ranks[0].measured_peak_bytes is None
    assert len(job.moved_bytes) <= 1 + 4 * 4
    assert job.most_reserved_bytes() <= TARGET
    assert job.moved_bytes[-1] == plan.moved_bytes
    if share > 1.05:
        assert trusting.most_reserved_bytes() > TARGET, "the prediction was wrong"
        assert plan.moved_bytes > first.moved_bytes
    if share < 0.9:
        assert plan.moved_bytes < first.moved_bytes


def test_where_nobody_tells_what_is_reserved_a_plan_is_trusted():
    job = VirtualJob(GBPS).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    job.manager.observers.remove(job.meter)
    assert not tells_reserved(job.manager)
    policy = policy_of(kind="memory_target", target_bytes=TARGET)
    assert check_plan(job.manager, recorded.profile, policy, schedule=SCHEDULE).is_over


# Both.


@pytest.mark.parametrize("kind", ["auto", "memory_target"])
def test_a_measured_step_that_fails_may_be_taken_again(kind):
    job = VirtualJob(GBPS).warmed_up()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    policy = policy_of(kind=kind, **({} if kind == "auto" else {"target_bytes": TARGET}))
    check = check_plan(job.manager, recorded.profile, policy, schedule=SCHEDULE)
    while not check.is_over:
        with pytest.raises(ZeroDivisionError), check.step():
            raise ZeroDivisionError
        with check.step():
            job.step()
        check.note()
    assert len(job.moved_bytes) in (1 + 4, 1 + 8)
    assert check.plan.measured or check.plan.ranks[0].measured_peak_bytes


def test_a_plan_that_sets_the_distances_is_refused_where_a_target_looks_for_them():
    job = VirtualJob(GBPS, device_target_bytes=2**30).warmed_up()
    with pytest.raises(ConfigError, match="leave device_target_bytes out"):
        auto(job)
