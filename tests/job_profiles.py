"""Profiles that the ranks of a simulated job would record."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megatron_offload.core.profile import GroupKey, GroupTimes, RunShape
from megatron_offload.planning.replay import RankWork
from megatron_offload.planning.simulate import simulate


def profiles_of(job):
    """Return what each pipeline rank would see in a step without offload."""
    step, schedule = simulate(job, record=True), job.schedule
    profiles = []
    for rank, result in enumerate(step.ranks):
        work = RankWork(job, rank)
        times = _times_us(result)
        sizes = schedule.num_ranks, len(schedule.stages_of(rank))
        profiles.append(
            replace(
                work.profile,
                times=tuple(GroupTimes(*times[group.key]) for group in work.profile.groups),
                step_us=step.step_us,
                peak_allocated_bytes=result.peak_reserved_bytes,
                peak_reserved_bytes=result.peak_reserved_bytes,
                run=RunShape(schedule.num_microbatches, rank, *sizes, rank),
            )
        )
    return profiles


def _times_us(result):
    """Return of each group its start, commit, and backward's begin and end, as recorded."""
    assert result.trace is not None
    spans = (span for span in result.trace.of("compute") if span.kind != "stall")
    times = defaultdict[GroupKey, list[float]](list)
    end_us = 0.0
    for piece in result.pieces:
        start_us = end_us
        if piece.us > 0:
            span = next(spans)
            start_us, end_us = span.start_us, span.end_us
        times[piece.key] += (start_us, end_us)
    return times
