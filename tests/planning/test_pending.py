"""What the allocator can't allocate again yet, counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_offload.planning.job import (
    QUEUED_LAUNCHES,
    GroupWork,
    Job,
    StageWork,
    message_bytes,
)
from megatron_offload.planning.replay import replay
from megatron_offload.planning.schedule import Pass, make_schedule
from megatron_offload.planning.simulate import simulate

SIZES = (100, 10, 1)
"""What the first three of four stages send."""


def pipeline(num_launches, *, name="1f1b", num_ranks=4, num_virtual=1, num_bytes=0):
    work = GroupWork("g", num_bytes, 1.0, 2.0)
    stages = tuple(StageWork((work,), size, 0, num_launches) for size in (*SIZES, 999))
    schedule = make_schedule(name, num_ranks, 4, num_virtual)
    return Job(schedule, stages, (0,) * num_ranks)


def counts(job, rank, *passes):
    """Return what is pending behind each pass."""
    return [pending for _, pending in message_bytes(job, rank, [*passes, passes[-1]])][1:]


def passes_of(stage, kinds):
    return [Pass(stage, kind, number) for number, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, [100, 200]), (1, [10, 10 + 210]), (2, [1, 1 + 21]), (3, [0, 2])]
)
def test_a_pass_frees_the_messages_that_nothing_behind_it_needs(stage, expected):
    # A forward its output; a backward its input, the gradient that came and that which it sends.
    assert counts(pipeline(1.0), stage, *passes_of(stage, "FB")) == expected


def test_what_was_freed_is_back_when_the_host_can_be_no_further_ahead():
    job = pipeline(QUEUED_LAUNCHES / 2)
    assert counts(job, 0, *passes_of(0, "FFFF")) == [100, 200, 200, 200]
    assert counts(job, 3, *passes_of(3, "BBB")) == [2, 4, 4]
    job = pipeline(QUEUED_LAUNCHES - 1.0)
    assert counts(job, 0, *passes_of(0, "FFF")) == [100, 200, 200], "a launch less is not enough"


def test_stages_of_one_rank_send_each_other_nothing():
    job = pipeline(1.0, name="interleaved", num_ranks=1, num_virtual=4)
    assert counts(job, 0, *(one for stage in range(4) for one in passes_of(stage, "FB"))) == [0] * 8


def test_pending_memory_is_reserved_and_not_allocated():
    job = pipeline(1.0, num_bytes=1000)
    known = replay(job, 0, None)
    unknown = replay(pipeline(math.inf, num_bytes=1000), 0, None)
    assert known.peak_device_bytes == unknown.peak_device_bytes == unknown.peak_taken_bytes == 4000
    # The first backward finds four microbatches saved, and four outputs pending.
    assert known.peak_taken_bytes == 4000 + 400


def test_the_reserved_estimate_counts_it_when_it_is_there_and_not_the_most_of_it():
    # The first of two ranks saves two microbatches until the backward before the last, which
    # begins with four outputs and two gradients pending. All eight are so only in the end.
    large = 2 * 1024**2
    stage = StageWork((GroupWork("g", 3 * large, 1.0, 2.0),), large, 0, 0.0)
    job = Job(make_schedule("1f1b", 2, 4), (stage,) * 2, (0, 0))
    first = simulate(job).ranks[0]
    assert first.peak_device_bytes == 2 * 3 * large
    assert first.peak_taken_bytes == first.peak_reserved_bytes == (2 * 3 + 4 + 2) * large


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (1, "F0 " * 8 + "F0 B0 " * 8 + "B0 B0 B0 B0 B2 B4 B4 B4"),
        (2, "F0 " * 6 + "F0 B0 " * 3 + "F2 B2 F4 B4 F4 B4 " + "F2 B2 " * 4 + "B2 B2 B4 B4 B4 B4"),
    ],
)
def test_a_stage_holds_its_last_input_and_the_schedule_that_of_its_warmup(rank, expected):
    # As megatron-core 0.16.1's interleaved schedule did on four processes: of ranks 0 and 1 four
    # tensors more than inputs were alive, of ranks 2 and 3 eight.
    schedule = make_schedule("interleaved", 4, 8, 2)
    job = Job(schedule, (StageWork((), 1),) * 8, (0,) * 4)
    held = message_bytes(job, rank, schedule.ranks[rank])
    pairs = zip(schedule.ranks[rank], held, strict=True)
    assert [f"{one.kind}{size}" for one, (size, _) in pairs] == expected.split()


def test_gaps_are_those_of_all_temporaries_or_of_a_forward_s_beside_messages():
    large = 2 * 1024**2
    work = GroupWork("g", 0, 1.0, 2.0, forward_temp_bytes=large, backward_temp_bytes=5 * large)
    apart = replace(work, name="loss", forward_temp_bytes=7 * large, is_apart=True)

    def reserved(*groups, num_ranks=1, **more):
        stage = StageWork(groups, 3 * large, 0, 0.0)
        job = Job(make_schedule("1f1b", num_ranks, 4), (stage,) * num_ranks, (0,) * num_ranks)
        return replay(replace(job, **more), 0, None).peak_reserved_bytes // large

    assert reserved(work) == 5 + 5
    assert reserved(work, expandable_segments=True) == 5
    assert reserved(work, unused_bytes=(large,)) == 5 + 5 + 1
    assert reserved(work, apart) == 7 + 7 + 1, "whose tensors fit into none of a layer's"
    pending = 4 * 3 + 3 * 3  # outputs, and gradients, behind which the last backward runs
    assert reserved(work, num_ranks=2) == 5 + pending + 1
