"""Planning ends when its time is up, in the middle of a simulation, too."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from problems import make_job, random_job

from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.profiled_job import profiles_of
from megatron_offload.planning.replay import OutOfTimeError, ending_after, replay
from megatron_offload.planning.simulate import simulate_programs


def test_a_simulation_ends_in_its_middle_when_the_time_is_up(monkeypatch):
    job = make_job(microbatches=8)
    programs = [replay(job, rank, RankSettings()) for rank in range(2)]
    step = simulate_programs(job, programs)
    looks = []

    def clock():
        looks.append(1)
        return float(len(looks))  # a second from one look to the next

    monkeypatch.setattr(time, "thread_time", clock)
    for one in (lambda: replay(job, 0, RankSettings()), lambda: simulate_programs(job, programs)):
        looks.clear()
        with pytest.raises(OutOfTimeError), ending_after(2.0):
            one()
        assert len(looks) == 4
        with ending_after(1e9):
            one()
    assert simulate_programs(job, programs) == step, "no time is set any more"


def test_changes_of_a_plan_end_with_half_of_the_time_and_leave_a_plan(monkeypatch):
    job = random_job(random.Random(4))
    some = Chooser(profiles_of(job), job)
    target = (some.lowest_bytes + some.highest_bytes) // 2
    targets = (target,) * job.schedule.num_ranks
    clock, changes_at = itertools.count(), []
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))
    theirs = Chooser._changes

    def noted(self, *args, **kwargs):
        changes_at.append(next(clock))
        return theirs(self, *args, **kwargs)

    monkeypatch.setattr(Chooser, "_changes", noted)

    def ticks_of(limit):
        chooser = Chooser(profiles_of(job), job)
        changes_at.clear()
        begins = next(clock)
        with ending_after(limit):
            plan = chooser.under(targets)
        return plan, changes_at[0] - begins, next(clock) - begins

    free, ticks_before, ticks = ticks_of(1e9)
    assert ticks > 3 * ticks_before, "else there is nothing to cut short"
    plan, _, fewer_ticks = ticks_of(ticks_before + (ticks - ticks_before) // 3)
    assert fewer_ticks < ticks
    peaks = [rank.predicted_peak_bytes for rank in plan.ranks]
    assert max(peaks) <= target
    assert plan.ranks[0].predicted_step_us >= free.ranks[0].predicted_step_us
