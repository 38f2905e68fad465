"""What a plan costs the step as a whole, by what each rank has lost in it.

A rank that waits for a copy, or makes something again, often loses what it would have waited for
another rank anyway. So what each pass has lost is put into the simulated step without offload: as
much longer as that becomes, the plan has made the step. No step without offload is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_offload.observe.measure import MeasuredStep
from megatron_offload.planning.job import NO_OFFLOAD, Job
from megatron_offload.planning.plan import MeasuredCost
from megatron_offload.planning.schedule import Pass, PassKind
from megatron_offload.planning.simulate import simulate

_COPIES_GBPS = 10_000.0
"""What copies take of the device's memory bandwidth, kernels lack: so many bytes copied cost them
a second, which no wait shows."""


def cost_of(job: Job, shown: Mapping[int, Sequence[MeasuredStep]]) -> MeasuredCost:
    """Return what a step has cost.

    Args:
        job: the step.
        shown: by pipeline rank, what each of its processes has measured.
    """
    settings = []
    for rank, passes in enumerate(job.schedule.ranks):
        steps = shown.get(rank)
        lost_us: tuple[float, ...] = ()
        if steps and all(step.lost_us for step in steps):
            slowest = max(steps, key=lambda step: sum(map(sum, step.lost_us)))
            slowed_us = slowest.copied_bytes / _COPIES_GBPS / 1e3 / len(passes)
            lost_us = tuple(us + slowed_us for us in _by_pass(passes, slowest.lost_us))
        settings.append(replace(NO_OFFLOAD, lost_us=lost_us))
    step_us = max(step.step_us for steps in shown.values() for step in steps)
    return MeasuredCost(step_us, simulate(job, settings).step_us - simulate(job).step_us)


def _by_pass(passes: Sequence[Pass], lost_us: Sequence[Sequence[float]]) -> Iterator[float]:
    """Yield what each pass has lost; the chunks of a step are its forwards, in their order."""
    chunks: dict[tuple[int, int], Sequence[float]] = {}
    by_chunk = iter(lost_us)
    for one in passes:
        place = one.stage, one.microbatch
        is_forward = one.kind is PassKind.FORWARD
        if is_forward:
            chunks[place] = next(by_chunk)
        yield chunks[place][not is_forward]
