"""Planning ends when its time is up, in the middle of a simulation, too."""

from __future__ import annotations

import time

import pytest
from problems import make_job

from megatron_offload.planning.job import RankSettings
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
