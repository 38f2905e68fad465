"""Between plans and the simulator: settings of a plan, its prediction, profiles without a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from megatron_offload.core.machine import Machine
from megatron_offload.core.profile import GroupKey, GroupTimes, MemorySample, RunShape, StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.planning.auto import Prediction, Predictor
from megatron_offload.planning.footprint import Footprint
from megatron_offload.planning.job import GroupWork, Job, RankSettings
from megatron_offload.planning.pending import PendingMessages
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.profiled_job import job_from_profiles
from megatron_offload.planning.replay import step_profile
from megatron_offload.planning.schedule import Pass, PassKind, Schedule
from megatron_offload.planning.simulate import RankResult, settings_of, simulate

_DEFAULT = RankSettings()

_SLOW_LINK_SHARE = 0.8
"""Of the bandwidth of copies, what a plan has to do with. One that was to cost four H200s 0.5 % at
most, with all of it, cost them 3.6 % (docs/planning.md)."""


def predictor_of(
    job: Job,
    peak_bytes_of: Callable[[RankResult], int] = attrgetter("peak_reserved_bytes"),
    default: RankSettings = _DEFAULT,
) -> Predictor:
    """Return what predicts plans for a job: it simulates a step, and one with a slower link."""
    slow_job = replace(job, machine=_with_slow_link(job.machine))

    def predict(plan: OffloadPlan) -> Prediction:
        if plan.pp_size != job.schedule.num_ranks:
            raise ConfigError(
                f"the plan is for {plan.pp_size} pipeline ranks, the job has "
                f"{job.schedule.num_ranks}"
            )
        settings = settings_of(plan, default)
        step, slow_step = simulate(job, settings), simulate(slow_job, settings)
        return Prediction(step.step_us, tuple(map(peak_bytes_of, step.ranks)), slow_step.step_us)

    return predict


def _with_slow_link(machine: Machine) -> Machine:
    """Return a machine whose copies have less; messages between ranks keep what they have."""
    copies = ("d2h_gbps", "h2d_gbps", "both_gbps", "node_gbps", "node_d2h_gbps", "node_h2d_gbps")
    rates = {name: getattr(machine, name) for name in copies}
    slow = {name: rate and rate * _SLOW_LINK_SHARE for name, rate in rates.items()}
    return machine.model_copy(update=slow)


def job_of(
    profiles: Sequence[StepProfile], schedule: Schedule, machine: Machine, *, gpus_per_rank: int = 1
) -> Job:
    """Return the step of the profiles, with peaks without offload as they were measured.

    What groups don't save (weights, temporaries, what the allocator can't use) is always there.
    """
    peaks = [Footprint.of(profile).peak_bytes for profile in profiles]
    static = [0] * len(profiles)
    job = job_from_profiles(profiles, schedule, machine, static, gpus_per_rank=gpus_per_rank)
    explained = [rank.peak_device_bytes for rank in simulate(job).ranks]
    static = [max(0, peak - own) for peak, own in zip(peaks, explained, strict=True)]
    return replace(job, static_bytes=tuple(static), unused_bytes=0)


def profiles_of(job: Job) -> list[StepProfile]:
    """Return what each pipeline rank would see in a step without offload."""
    step = simulate(job, None, record=True)
    return [_profile(job, rank, result, step.step_us) for rank, result in enumerate(step.ranks)]


def _profile(job: Job, rank: int, result: RankResult, step_us: float) -> StepProfile:
    profile = step_profile(job, rank)
    walk = _Walk(job, rank, result)
    for one in job.schedule.ranks[rank]:
        walk.go(one)
    walk.look()
    num_virtual = len(job.schedule.stages_of(rank))
    run = RunShape(job.schedule.num_microbatches, rank, job.schedule.num_ranks, num_virtual, rank)
    times = tuple(GroupTimes(*walk.times_us[group.key]) for group in profile.groups)
    return replace(profile, times=times, step_us=step_us, memory=tuple(walk.samples), run=run)


class _Walk:
    """Goes through a rank's passes beside the spans of its work, and looks at each boundary.

    Peaks count what was freed and can't be used yet, which PyTorch's don't.
    """

    def __init__(self, job: Job, rank: int, result: RankResult) -> None:
        assert result.trace is not None
        self._stages = job.stages
        self._spans = iter(
            span for span in result.trace.spans if span.stream == "compute" and span.kind != "stall"
        )
        self._reserved_bytes = result.peak_reserved_bytes
        self._held_bytes = self._peak_bytes = job.static_bytes[rank]
        self._pending = PendingMessages(job, rank)
        self._now_us = 0.0
        self._chunks: dict[tuple[int, int], int] = {}
        self.times_us: dict[GroupKey, list[float]] = {}
        self.samples: list[MemorySample] = []

    def go(self, one: Pass) -> None:
        """Take in the next pass."""
        stage = self._stages[one.stage]
        place = (one.stage, one.microbatch)
        if place not in self._chunks and any(work.is_marked for work in stage.groups):
            self._chunks[place] = len(self._chunks)
        marked = [work.is_marked for work in stage.groups]
        keys = [
            GroupKey(self._chunks[place], sum(marked[:index])) if is_marked else None
            for index, is_marked in enumerate(marked)
        ]
        steps = list(zip(stage.groups, keys, strict=True))
        for work, key in steps if one.kind is PassKind.FORWARD else reversed(steps):
            self._go(one.kind, work, key, stage.buffer_bytes)
        self._pending.add_pass(one)

    def _go(self, kind: PassKind, work: GroupWork, key: GroupKey | None, buffer_bytes: int) -> None:
        is_forward = kind is PassKind.FORWARD
        work_us, temp_bytes = work.backward_us, work.backward_temp_bytes
        if is_forward:
            work_us, temp_bytes = work.forward_us, work.forward_temp_bytes
        elif kind is PassKind.WEIGHT:
            work_us, key = work.weight_us, None  # the engine has left the group before
        elif kind is PassKind.INPUT:
            work_us -= work.weight_us
        saved_bytes = work.num_bytes + work.kept_bytes
        span = next(self._spans) if work_us > 0 else None
        if span is not None:
            self._now_us = span.start_us
        if key is not None:
            self.look(key)
        self._hold(saved_bytes if is_forward else 0, temp_bytes + buffer_bytes)
        if span is not None:
            self._now_us = span.start_us + span.duration_us
        if kind in (PassKind.BACKWARD, PassKind.WEIGHT):
            self._hold(-saved_bytes)
        if key is not None:
            self.look(key)

    def _hold(self, more_bytes: int, temp_bytes: int = 0) -> None:
        self._held_bytes += more_bytes
        taken_bytes = self._held_bytes + self._pending.num_bytes
        self._peak_bytes = max(self._peak_bytes, taken_bytes + temp_bytes)

    def look(self, key: GroupKey | None = None) -> None:
        """Note time and memory at a boundary of a group, or at the end."""
        if key is not None:
            self.times_us.setdefault(key, []).append(self._now_us)
        self.samples.append(
            MemorySample(self._now_us, self._held_bytes, self._reserved_bytes, self._peak_bytes)
        )
        self._peak_bytes = self._held_bytes
