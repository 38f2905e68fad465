"""From a profile to rows of memory, and to intervals in which groups may be away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_offload.core.profile import (
    GroupKey,
    GroupProfile,
    GroupTimes,
    MemorySample,
    StepProfile,
)
from megatron_offload.errors import ConfigError
from megatron_offload.planning.footprint import Footprint

A, B = GroupKey(0, 0), GroupKey(0, 1)


def make_profile(memory=()):
    """Two groups, one within the other: A begins, B begins, B's backward, A's."""
    return StepProfile(
        groups=(GroupProfile(A, "a", 10), GroupProfile(B, "b", 4)),
        backward_order=(B, A),
        times=(GroupTimes(0, 1, 4, 5), GroupTimes(1, 2, 3, 4)),
        step_us=5.0,
        memory=tuple(memory),
    )


def samples(allocated, *, reserved=0, peaks=None):
    peaks = peaks or [0] * len(allocated)
    return [
        # The host runs ahead: its clock says nothing of the device's.
        MemorySample(0.001 * index, each, max(each, reserved), peak)
        for index, (each, peak) in enumerate(zip(allocated, peaks, strict=True))
    ]


# Boundaries: A starts, A commits, B starts, B commits, B backward, B done, A backward, A done.
ALLOCATED = [100, 110, 110, 114, 114, 110, 110, 100]


def test_rows_lie_between_boundaries_and_take_the_larger_of_both_ends():
    rank = Footprint.of(make_profile(samples(ALLOCATED)))
    assert rank.memory_bytes == (100, 110, 110, 114, 114, 114, 110, 110, 100)
    assert rank.keys == (A, B)
    assert [item[1:3] for item in rank.items] == [(2, 7), (4, 5)]
    assert [item[3:] for item in rank.items] == [(1, 4), (2, 3)]
    assert (rank.peak_bytes, rank.saved_peak_bytes, rank.largest_bytes) == (114, 14, 10)


def test_a_peak_between_two_boundaries_counts_there_and_nowhere_else():
    peaks = [103, 112, 110, 119, 114, 114, 110, 150]
    rank = Footprint.of(make_profile(samples(ALLOCATED, peaks=peaks)))
    assert rank.memory_bytes == (103, 112, 110, 119, 114, 114, 110, 150, 100)


def test_a_last_sample_may_stand_at_the_end_of_the_step():
    rank = Footprint.of(make_profile(samples([*ALLOCATED, 90], peaks=[0] * 8 + [120])))
    assert rank.memory_bytes == (100, 110, 110, 114, 114, 114, 110, 110, 120, 90)


def test_what_is_reserved_beyond_is_always_there():
    rank = Footprint.of(make_profile(samples(ALLOCATED, reserved=130)))
    assert rank.waste_bytes == 16
    assert rank.peak_bytes == 130
    assert rank.problem(120, 0, 1.0).target_bytes == 104


def test_without_samples_memory_is_what_groups_save():
    rank = Footprint.of(make_profile())
    assert rank.memory_bytes == (0, 10, 10, 14, 14, 14, 10, 10, 0)
    assert rank.waste_bytes == 0


def test_groups_that_are_empty_or_have_no_backward_are_no_items():
    profile = make_profile()
    empty = (profile.groups[0]._replace(num_bytes=0), profile.groups[1])
    assert Footprint.of(replace(profile, groups=empty)).keys == (B,)
    assert Footprint.of(replace(profile, backward_order=(A,))).keys == (A,)


def test_a_step_without_groups_has_no_rows():
    rank = Footprint.of(StepProfile((), ()))
    assert rank.memory_bytes == (0,)
    assert rank.items == ()
    assert rank.peak_bytes == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"times": ()}, "holds no times"),
        ({"step_us": 0.0}, "holds no times"),
        ({"offloaded_bytes": 9}, "moved 9 bytes"),
        ({"memory": tuple(samples(ALLOCATED[:-1]))}, "7 samples of memory for 8 boundaries"),
    ],
)
def test_a_profile_that_can_not_be_planned_with_is_refused(changes, message):
    with pytest.raises(ConfigError, match=f"pipeline rank 0.*{message}"):
        Footprint.of(replace(make_profile(), **changes))
