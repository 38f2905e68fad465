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


@pytest.mark.parametrize("kind", ["under", "within"])
def test_a_plan_is_the_best_that_was_found_in_time(kind, monkeypatch):
    job = random_job(random.Random(4))
    some = Chooser(profiles_of(job), job)
    target = (some.lowest_bytes + some.highest_bytes) // 2
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))

    def planned(seconds):
        chooser = Chooser(profiles_of(job), job)
        began = time.thread_time()
        with ending_after(seconds):
            if kind == "within":
                plan = chooser.within(2.0)
            else:
                plan = chooser.under((target,) * job.schedule.num_ranks)
        return plan, time.thread_time() - began

    best, all_the_time = planned(1e9)
    plan, needed = planned(all_the_time / 2)
    assert needed < all_the_time / 2
    assert max(rank.predicted_peak_bytes for rank in plan.ranks) <= some.highest_bytes
    if kind == "within":
        assert plan.ranks[0].predicted_step_us <= 1.02 * some.without.step_us
    else:
        assert max(rank.predicted_peak_bytes for rank in plan.ranks) <= target
        assert plan.ranks[0].predicted_step_us >= best.ranks[0].predicted_step_us
