"""A step as the profiles of all its ranks have shown it.

Times of a group, and of what lies between two, are medians over the microbatches, the lower of two:
what disturbs one makes it longer. Between two passes of a rank, other stages may have been waited
for: there the least of all microbatches counts, as the work in front of the later pass.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_offload.core.machine import Machine
from megatron_offload.core.profile import (
    GroupProfile,
    GroupTimes,
    StepProfile,
)
from megatron_offload.errors import ConfigError
from megatron_offload.planning.job import GroupWork, Job, StageWork, UnitWork
from megatron_offload.planning.replay import RankWork
from megatron_offload.planning.schedule import Pass, PassKind, Schedule, make_schedule
from megatron_offload.planning.simulate import simulate

_Timed = list[tuple[GroupProfile, GroupTimes]]
"""The groups of one chunk, in order."""


def check_profiles(profiles: Collection[StepProfile]) -> tuple[StepProfile, ...]:
    """Return the profiles by pipeline rank; `ConfigError` unless they are one run's, all of it."""
    in_order = tuple(sorted(profiles, key=lambda profile: profile.run.pp_rank))
    first = in_order[0].run
    ranks = [profile.run.pp_rank for profile in in_order]
    if ranks != list(range(first.pp_size)):
        raise ConfigError(
            f"one profile of each of {first.pp_size} pipeline ranks is needed, got those of "
            f"{', '.join(map(str, ranks))}"
        )
    for run in (profile.run for profile in in_order):
        for name in ("num_microbatches", "pp_size", "vp_size", "modules", "versions"):
            ours, others = getattr(first, name), getattr(run, name)
            if ours != others:
                raise ConfigError(
                    f"the profiles of pipeline ranks 0 and {run.pp_rank} are of different runs: "
                    f"{name} {ours} and {others}"
                )
    return in_order


def job_from_profiles(profiles: Sequence[StepProfile], schedule: Schedule, machine: Machine) -> Job:
    """Return the step that measured profiles show, one of each pipeline rank.

    Profile steps without stalls (no offload, or little of it): what a group waited for a copy
    is part of what it computed. What lies on each rank all the time and temporaries are in
    no profile; where the peak matters, `job_of` counts them into ``static_bytes``.

    Raises:
        ConfigError: a profile has no times, or other chunks than the schedule.
    """
    stages: dict[int, StageWork] = {}
    for rank, profile in enumerate(profiles):
        stages |= _stages_of(rank, profile, schedule)
    ordered = tuple(stages[stage] for stage in range(schedule.num_stages))
    return Job(schedule, ordered, (0,) * schedule.num_ranks, machine)


def _stages_of(rank: int, profile: StepProfile, schedule: Schedule) -> dict[int, StageWork]:
    chunks = _chunks_of(rank, profile, schedule)
    before_us = _least_before(schedule.ranks[rank], chunks)
    stages = {}
    for stage in schedule.stages_of(rank):
        alike = [chunk for one, chunk in chunks.items() if one[0] == stage]
        shapes = {tuple(group.name for group, _ in chunk) for chunk in alike}
        if len(shapes) != 1:
            raise ConfigError(
                f"rank {rank}: the microbatches of stage {stage} have other groups each"
            )
        works = [_between("before the stage", before_us[stage, True], 0.0)]
        for index in range(len(alike[0])):
            if index:
                pairs = [(chunk[index - 1][1], chunk[index][1]) for chunk in alike]
                forward_us = statistics.median_low(b.started_us - a.committed_us for a, b in pairs)
                backward_us = statistics.median_low(a.backward_us - b.done_us for a, b in pairs)
                works.append(_between("between groups", forward_us, backward_us))
            works.append(_work(alike, index))
        works.append(_between("behind the stage", 0.0, before_us[stage, False]))
        timed = [work for work in works if work.is_marked or work.forward_us or work.backward_us]
        stages[stage] = StageWork(tuple(timed))
    return stages


def _chunks_of(
    rank: int, profile: StepProfile, schedule: Schedule
) -> dict[tuple[int, int], _Timed]:
    if len(profile.times) != len(profile.groups):
        raise ConfigError(
            f"the profile of pipeline rank {rank} holds no times; profile a step with times and "
            "memory"
        )
    by_chunk = _by_chunk(profile)
    chunks = schedule.chunks_of(rank)
    if by_chunk.keys() != set(chunks.values()):
        raise ConfigError(
            f"rank {rank}: the profile has {len(by_chunk)} chunks, the schedule {len(chunks)}"
        )
    return {place: by_chunk[chunk] for place, chunk in chunks.items()}


def _least_before(
    passes: Sequence[Pass], chunks: dict[tuple[int, int], _Timed]
) -> dict[tuple[int, bool], float]:
    """Return for each stage, forward and backward, the least time in front of its passes."""
    least: dict[tuple[int, bool], float] = {}
    end_us = 0.0
    for one in passes:
        chunk = chunks[one.stage, one.microbatch]
        is_forward = one.kind is PassKind.FORWARD
        start_us = chunk[0][1].started_us if is_forward else chunk[-1][1].backward_us
        gap_us = max(0.0, start_us - end_us)
        key = (one.stage, is_forward)
        least[key] = min(gap_us, least.get(key, gap_us))
        end_us = chunk[-1][1].committed_us if is_forward else chunk[0][1].done_us
    return least


def _between(name: str, forward_us: float, backward_us: float) -> GroupWork:
    return GroupWork(name, 0, max(0.0, forward_us), max(0.0, backward_us), is_marked=False)


def _work(chunks: Sequence[_Timed], index: int) -> GroupWork:
    groups = [chunk[index][0] for chunk in chunks]
    times = [chunk[index][1] for chunk in chunks]
    recompute_us = [sum(one.us for one in each.recomputed if one.is_recomputed) for each in groups]
    bare = [group.with_recompute(()) for group in groups]
    pairs = zip(times, recompute_us, strict=True)
    backward_us = [max(0.0, one.done_us - one.backward_us - us) for one, us in pairs]
    return GroupWork(
        groups[0].name,
        statistics.median_high(group.num_bytes for group in bare),
        forward_us=statistics.median_low(one.committed_us - one.started_us for one in times),
        backward_us=statistics.median_low(backward_us),
        kept_bytes=statistics.median_high(group.externally_referenced_bytes for group in groups),
        units=tuple(_units(bare)),
    )


def _units(groups: Sequence[GroupProfile]) -> Iterator[UnitWork]:
    """Yield what could be recomputed of groups in the same place of several microbatches.

    What was not timed takes a second for each terabyte.
    """
    names = dict.fromkeys(unit.unit for group in groups for unit in group.recomputed)
    for name in names:
        alike = [unit for group in groups for unit in group.recomputed if unit.unit == name]
        num_bytes = statistics.median_low(unit.num_bytes for unit in alike)
        us = statistics.median_low(unit.us for unit in alike)
        chunk, order = groups[0].key
        own = [key.order for key in alike[0].needs if key.chunk == chunk]
        yield UnitWork(name, num_bytes, us or num_bytes / 1e6, tuple(order - at for at in own))


def job_of(profiles: Sequence[StepProfile], schedule: Schedule, machine: Machine) -> Job:
    """Return the step of the profiles, with peaks without offload as they were measured.

    What groups don't save (weights, temporaries, what the allocator can't use) is always there.
    """
    peaks = list(map(measured_peak_bytes, profiles))
    job = job_from_profiles(profiles, schedule, machine)
    dropped: list[set[str]] = [set() for _ in job.stages]
    for rank, profile in enumerate(profiles):
        own_stages, vp_stages = schedule.stages_of(rank), RankWork(job, rank).vp_stages
        for group in profile.groups:
            units = {unit.unit for unit in group.recomputed if unit.is_recomputed}
            dropped[own_stages[vp_stages[group.key.chunk]]] |= units
    stages = zip(job.stages, dropped, strict=True)
    as_seen = replace(job, stages=tuple(stage.with_recompute(units) for stage, units in stages))
    explained = [rank.peak_device_bytes for rank in simulate(as_seen).ranks]
    static = [max(0, peak - own) for peak, own in zip(peaks, explained, strict=True)]
    return replace(job, static_bytes=tuple(static), unused_bytes=0)


def _by_chunk(profile: StepProfile) -> dict[int, _Timed]:
    by_chunk: defaultdict[int, _Timed] = defaultdict(list)
    for group, times in zip(profile.groups, profile.times, strict=True):
        by_chunk[group.key.chunk].append((group, times))
    return by_chunk


FROM_COPIES = "what copies got in the profiled step, on the slowest rank"
"""Where the bandwidths of `slowest_link` come from."""


def slowest_link(profiles: Iterable[StepProfile]) -> Machine | None:
    """Return links that every rank has to itself, one way each, by what copies of each have got.

    None where in no profile both ways were timed.
    """
    rates = [(one.d2h_gbps, one.h2d_gbps) for one in profiles if one.d2h_gbps and one.h2d_gbps]
    if not rates:
        return None
    d2h_gbps, h2d_gbps = (min(gbps) for gbps in zip(*rates, strict=True))
    return Machine(
        d2h_gbps=d2h_gbps,
        h2d_gbps=h2d_gbps,
        both_gbps=min(d2h_gbps, h2d_gbps),
        node_gbps=d2h_gbps + h2d_gbps,
        node_d2h_gbps=None,
        gpus_per_node=1,
    )


def schedule_of(profiles: Sequence[StepProfile]) -> Schedule:
    """Return the schedule of the profiles, in the order of ranks.

    It is what they have seen. No profile says which virtual stage a chunk is of, so with virtual
    stages it is interleaved 1F1B.

    Raises:
        ConfigError: the passes of a run with virtual stages came in another order, or one rank has
            seen more microbatches than another.
    """
    run = profiles[0].run
    seen = [_passes_seen(profile) for profile in profiles]
    if run.vp_size > 1:
        num_first = [kind for _, kind in seen[-1]].index(PassKind.BACKWARD) if all(seen) else 0
        size = (num_first - 1) // (run.vp_size - 1)  # so the last rank warms up
        size = max(run.pp_size, min(size, run.num_microbatches))
        shape = run.pp_size, run.num_microbatches, run.vp_size
        schedule = make_schedule("interleaved", *shape, size)
        for rank, (found, passes) in enumerate(zip(seen, schedule.ranks, strict=True)):
            chunks = schedule.chunks_of(rank)
            wanted = [(chunks[one.stage, one.microbatch], one.kind) for one in passes]
            if found and found != wanted:
                raise ConfigError(
                    f"pipeline rank {rank} runs its virtual stages in another order than "
                    "interleaved 1F1B, and no other is simulated"
                )
        return schedule
    if not all(seen):
        return make_schedule("1f1b", run.pp_size, run.num_microbatches)
    if len(set(map(len, seen))) > 1:
        raise ConfigError("pipeline ranks have seen different numbers of microbatches")
    ranks = (
        tuple(Pass(stage, kind, chunk) for chunk, kind in passes)
        for stage, passes in enumerate(seen)
    )
    return Schedule("as profiled", run.pp_size, len(seen[0]) // 2, tuple(ranks))


def _passes_seen(profile: StepProfile) -> list[tuple[int, PassKind]]:
    begins_us: dict[tuple[int, PassKind], float] = {}
    seen = set(profile.backward_order)
    for group, times in zip(profile.groups, profile.times, strict=False):
        chunk = group.key.chunk
        begins_us.setdefault((chunk, PassKind.FORWARD), times.started_us)
        backward = chunk, PassKind.BACKWARD
        backward_us = times.backward_us if group.key in seen else math.inf
        begins_us[backward] = min(begins_us.get(backward, math.inf), backward_us)
    return sorted(begins_us, key=begins_us.__getitem__)


def measured_peak_bytes(profile: StepProfile) -> int:
    """Return the most that a step reserved without offload; 0 where unknown."""
    if profile.offloaded_bytes and not profile.counts_what_moved:
        raise ConfigError(
            f"the profile of pipeline rank {profile.run.pp_rank} is of a step that moved "
            f"{profile.offloaded_bytes} bytes, which its memory doesn't count; profile another"
        )
    return profile.peak_reserved_bytes
