"""How long a step takes, where it stalls, and what memory it needs, with no GPU at all.

Same input, same result to the last bit; the work is linear in passes times groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megatron_offload.core.trace import ByteCount, Counter, StepTrace
from megatron_offload.errors import ConfigError
from megatron_offload.planning.job import NO_OFFLOAD, Job, RankSettings
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.replay import RankProgram, StepCounts, replay
from megatron_offload.planning.streams import RankStreams, run_streams

SEGMENT_BYTES = 2 * 1024**2
"""PyTorch's caching allocator takes large memory from the device in multiples of this."""


@dataclass(slots=True, kw_only=True)
class RankResult(StepCounts):
    """What a step was on one rank."""

    end_us: float
    """When its last pass and its last release were over."""
    compute_us: float
    stall_us: dict[str, float]
    """What the compute stream lost, by cause: `PIPELINE`, `RELEASE`, `RELOAD`. Waiting for the end
    of the step's last rank isn't in it."""
    peak_reserved_bytes: int
    """What the allocator reserves: ``peak_taken_bytes`` and what it can't use, see `Job`."""
    trace: StepTrace | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step was."""

    step_us: float
    """Until the last rank is done."""
    ranks: tuple[RankResult, ...]


def simulate(
    job: Job, settings: Sequence[RankSettings] | RankSettings | None = None, *, record: bool = False
) -> Simulation:
    """Predict one steady training step.

    Args:
        job: the step.
        settings: of each pipeline rank, or the same for all; None offloads nothing.
        record: keep the spans of all streams and the bytes over time; see `RankResult.trace`.

    Raises:
        ConfigError: settings are too many or too few, or the schedule's ranks wait in a circle.
    """
    num_ranks = job.schedule.num_ranks
    if settings is None or isinstance(settings, RankSettings):
        settings = [settings or NO_OFFLOAD] * num_ranks
    if len(settings) != num_ranks:
        raise ConfigError(f"the schedule has {num_ranks} ranks, settings are for {len(settings)}")
    programs = [replay(job, rank, one, records=record) for rank, one in enumerate(settings)]
    return simulate_programs(job, programs, record=record)


def simulate_programs(
    job: Job, programs: Sequence[RankProgram], *, record: bool = False
) -> Simulation:
    """Predict a step of which each rank's program is known, and recorded if that is asked for."""
    ranks = run_streams(job, programs, records=record)
    return Simulation(
        step_us=max(one.end_us for one in ranks),
        ranks=tuple(_result(job, one) for one in ranks),
    )


_DEFAULT = RankSettings()


def settings_of(plan: OffloadPlan, default: RankSettings = _DEFAULT) -> list[RankSettings]:
    """Return what each rank of a plan does; the limits that ``default`` sets go over the plan's."""
    names = ("max_inflight_bytes", "prefetch_bytes")
    free = [name for name in names if getattr(default, name) is None]
    found = []
    for rank in plan.ranks:
        recompute = default.recompute if rank.recompute is None else rank.recompute
        if rank.moved_bytes:
            limits = {name: getattr(rank, name) for name in free}
            kept = frozenset(rank.kept)
            found.append(replace(default, kept=kept, recompute=recompute, **limits))
        else:
            found.append(replace(NO_OFFLOAD, recompute=recompute))
    return found


def reserved_bytes(job: Job, program: RankProgram) -> int:
    """Return what a rank reserves: what it takes and, where that was measured, what is unused.

    Else it is an estimate, in segments of the allocator.
    """
    if job.unused_bytes is not None:
        return program.peak_taken_bytes + job.unused_bytes
    num_bytes = program.peak_taken_bytes + program.peak_temp_bytes
    return -(-num_bytes // SEGMENT_BYTES) * SEGMENT_BYTES


def _result(job: Job, rank: RankStreams) -> RankResult:
    program = rank.program
    if rank.trace is not None:
        began_us = [*rank.began_us, rank.end_us]
        for position, *counts in program.memory:
            names = (ByteCount.HELD, ByteCount.INFLIGHT, ByteCount.PREFETCHED, ByteCount.HOST)
            for name, num_bytes in zip(names, counts, strict=True):
                rank.trace.counters.append(Counter(name, began_us[position], num_bytes))
    own = {one.name: getattr(program, one.name) for one in fields(StepCounts)}
    return RankResult(
        **own,
        end_us=rank.end_us,
        compute_us=rank.compute_us,
        stall_us=rank.stall_us,
        peak_reserved_bytes=reserved_bytes(job, program),
        trace=rank.trace,
    )
