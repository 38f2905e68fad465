"""What one step takes on the device's clock, what of it is waiting, and what it reserves."""

from __future__ import annotations

import pytest
from virtual_clock import RUN, VirtualJob

from megatron_offload.observe.measure import StepTimer
from megatron_offload.observe.recorder import profile_step

SLOW = 0.05
"""A bandwidth that compute has to wait for, in GB/s."""

COMPUTE_US = 6 * 4 * 2 * 60.0
"""6 microbatches of 4 blocks of 2 groups, 20 us forward and 40 us backward each."""


def measured(job, *between):
    timer = StepTimer(job.manager)
    with job.manager.observed_by(timer):
        job.step()
        for each in between:
            each()
    return timer.read()


def lost_us(step):
    return sum(map(sum, step.lost_us))


def test_a_step_takes_what_its_compute_and_its_waits_take():
    job = VirtualJob(SLOW).warmed_up()
    before_us = sum(job.backend.stall_us.values())
    found = measured(job)
    assert lost_us(found) == pytest.approx(sum(job.backend.stall_us.values()) - before_us)
    assert found.step_us == pytest.approx(COMPUTE_US + lost_us(found))
    assert lost_us(found) > 0.5 * COMPUTE_US


def test_what_comes_before_and_behind_the_step_is_no_part_of_it():
    job = VirtualJob(SLOW).warmed_up()
    expected = measured(job)
    job.backend.advance_compute(1000.0)
    found = measured(job, lambda: job.backend.advance_compute(1000.0), job.step)
    assert found.step_us == pytest.approx(expected.step_us)
    assert lost_us(found) == pytest.approx(lost_us(expected))


@pytest.mark.parametrize("gbps", [10.0, SLOW])
def test_a_profile_of_a_step_that_moved_is_that_of_one_that_did_not(gbps):
    job = VirtualJob(gbps).warmed_up()
    with profile_step(job.manager, run=RUN) as moved:
        job.step()
    with profile_step(job.manager, run=RUN, moves=False) as bare:
        job.step()
    profile = moved.profile
    assert profile.offloaded_bytes > 0
    assert (profile.d2h_gbps, profile.h2d_gbps) == (pytest.approx(gbps), pytest.approx(gbps))
    assert (profile.waited_us > 0) == (gbps == SLOW)
    assert bare.profile.waited_us == 0.0
    assert profile.step_us == pytest.approx(bare.profile.step_us) == pytest.approx(COMPUTE_US)
    for times, expected in zip(profile.times, bare.profile.times, strict=True):
        assert tuple(times) == pytest.approx(tuple(expected))


def test_where_the_device_says_nothing_the_meter_does_and_its_peak_is_put_back():
    job = VirtualJob(SLOW).warmed_up()
    job.meter.peak_bytes = 10**9
    assert 0 < measured(job).reserved_bytes < 10**6
    assert job.meter.peak_bytes == 10**9
    job.backend.reserved_bytes = lambda: 7
    assert measured(job).reserved_bytes == 7
    job.manager.observers.remove(job.meter)
    job.backend.reserved_bytes = lambda: None
    assert measured(job).reserved_bytes is None


def test_the_device_waits_for_the_host_where_it_has_come_to_the_boundary_before():
    job = VirtualJob(1.0).warmed_up()
    points, asked = [], []
    timestamp = job.backend.timestamp

    def note(stream):
        point = timestamp(stream), len(points)
        points.append(point)
        return point

    job.backend.timestamp = note
    job.backend.sync_elapsed_us = lambda start, end: end[0] - start[0]
    job.backend.has_passed = lambda point: asked.append(point) or len(asked) % 4 == 0
    step = measured(job)
    num_passes, num_boundaries = 6 * 2, 4 * 2 * 2
    assert len(asked) == num_passes * (num_boundaries - 1)
    assert [number for _, number in asked] == sorted({number for _, number in asked})
    assert step.idle_share == pytest.approx(1 / 4, abs=0.01)
    assert measured(VirtualJob(1.0).warmed_up()).idle_share == 0, "virtual time knows no host"
