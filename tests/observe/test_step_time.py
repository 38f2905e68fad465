"""The time of one step on the device's clock, with and without offload, and what it reserves."""

from __future__ import annotations

import pytest
from virtual_clock import RUN, VirtualJob

from megatron_offload.engine.learning import Learner
from megatron_offload.errors import StateError
from megatron_offload.observe.measure import measure_step
from megatron_offload.observe.recorder import profile_step

SLOW = 0.05
"""A bandwidth that compute has to wait for, in GB/s."""


def test_a_step_takes_what_its_compute_and_its_stalls_take():
    job = VirtualJob(SLOW).warmed_up()
    with measure_step(job.manager) as moved:
        job.step()
    with measure_step(job.manager, moves=False) as bare:
        job.step()
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    # 6 microbatches of 4 blocks of 2 groups, 20 us forward and 40 us backward each
    assert bare.step_us == pytest.approx(6 * 4 * 2 * 60.0)
    assert bare.step_us == pytest.approx(recorded.profile.step_us)
    assert moved.step_us == pytest.approx(job.step_us())
    assert moved.step_us > 1.5 * bare.step_us


def test_what_comes_behind_the_step_is_no_part_of_it():
    job = VirtualJob(SLOW).warmed_up()
    with measure_step(job.manager, moves=False) as timed:
        job.step()
        job.backend.advance_compute(1000.0)
        job.step()
    assert timed.step_us == pytest.approx(2880.0)


def test_nothing_is_learned_from_a_step_that_moves_nothing(monkeypatch):
    job = VirtualJob(SLOW).warmed_up()
    learned = []
    learn = Learner.learn

    def note(self, profile):
        learned.append(len(job.moved_bytes))
        learn(self, profile)

    monkeypatch.setattr(Learner, "learn", note)
    with measure_step(job.manager, moves=False):
        job.step()
    assert job.moved_bytes == [0]
    with measure_step(job.manager):
        job.step()
    job.step()
    assert learned == [1, 2]
    assert job.moved_bytes[1] == job.moved_bytes[2] > 0


def test_an_error_leaves_the_manager_as_it_was_and_no_time():
    job = VirtualJob(SLOW).warmed_up()
    with pytest.raises(ZeroDivisionError), measure_step(job.manager, moves=False) as timed:
        raise ZeroDivisionError
    assert timed.step_us == 0
    job.step()
    assert job.moved_bytes[-1] > 0
    with measure_step(job.manager) as timed:
        job.step()
    assert timed.step_us > 0


def test_a_block_without_a_step_is_an_error():
    job = VirtualJob(SLOW)
    with pytest.raises(StateError, match="call the manager's reset"):
        with measure_step(job.manager):
            pass


def test_what_is_reserved_is_the_most_at_both_ends():
    job = VirtualJob(SLOW).warmed_up()
    for said, most in (((5, 3), 5), ((4, 9), 9)):
        job.backend.reserved_bytes = iter(said).__next__
        with measure_step(job.manager) as measured:
            job.step()
        assert measured.reserved_bytes == most


def test_where_the_device_says_nothing_the_meter_does_and_its_peak_is_put_back():
    job = VirtualJob(SLOW).warmed_up()
    job.meter.restore_peak(10**9)
    with measure_step(job.manager) as measured:
        job.step()
    assert 0 < measured.reserved_bytes < 10**6
    assert job.meter.peak_bytes == 10**9
    with pytest.raises(ZeroDivisionError), measure_step(job.manager):
        raise ZeroDivisionError
    assert job.meter.peak_bytes == 10**9
