"""What the engine does in a steady step on one rank, call by call: no times, only the order.

`core.step.StepDecisions` decides here as in the engine, over the passes of a schedule; what it asks
for is written down. `planning.simulate` adds the times.

Memory is counted as the allocator sees it: in the order of the compute stream's program. A source
takes device memory until the compute stream has waited for its copy, a reload's target from its
issue on, and host memory is taken from the issue of the offload to that of the reload.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import Group, GroupState
from megatron_offload.core.profile import GroupKey
from megatron_offload.core.step import StepDecisions
from megatron_offload.core.trace import ByteCount, StepTrace
from megatron_offload.core.window import InFlightWindow
from megatron_offload.planning.job import GroupWork, Job, RankSettings, message_bytes
from megatron_offload.planning.schedule import Pass

_SEGMENT_BYTES = 2 * 1024**2
"""PyTorch's caching allocator takes large memory from the device in multiples of this."""


class OpKind(IntEnum):
    """What the compute stream comes by, and what its argument is."""

    COMPUTE = 0  # so many microseconds
    OFFLOAD = 1  # the copy, which may begin once all before is done
    RELOAD = 2  # likewise
    AWAIT = 3  # the copy
    SEND = 4  # the message's number
    RECEIVE = 5  # likewise
    CYCLE = 6  # the begin, and then the end, of what repeats; 0


@dataclass(slots=True, kw_only=True)
class RankStep:
    """What one rank's streams have to do, what memory that needs and, once simulated, its times."""

    peak_device_bytes: int = 0
    peak_taken_bytes: int = 0
    """The most that is allocated, or was freed with a message and can't be used yet."""
    peak_reserved_bytes: int = 0
    """What the allocator reserves: ``peak_taken_bytes`` and an estimate of what it can't use."""
    peak_host_bytes: int = 0
    """The most that lies on the host, from the issue of an offload to that of its reload."""
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    num_late: int = 0
    """Reloads that were issued only when their backward had begun."""
    recomputed_bytes: int = 0
    """Recomputed in backward, and so neither kept nor offloaded."""
    recompute_us: float = 0.0
    """What that takes, as a part of the compute."""
    host_us: float = 0.0
    """What of it is waiting for the host (`StageWork.slowness`)."""

    # What the compute stream comes by, in two flat sequences: a large job has millions of them.
    kinds: bytearray = field(default_factory=bytearray)
    arguments: list[float] = field(default_factory=list)
    copy_bytes: list[int] = field(default_factory=list)  # by the copy's number, as it was issued

    # Only where it was asked for.
    labels: list[tuple[str, bool]] = field(default_factory=list)
    """The group of each op, and whether its pass is a backward."""
    memory: list[tuple[int, dict[ByteCount, int]]] = field(default_factory=list)
    """Bytes that hold from the beginning of an op on, and its position."""

    # Of a simulation.
    end_us: float = 0.0
    """When its last pass and its last release were over."""
    compute_us: float = 0.0
    stall_us: dict[str, float] = field(default_factory=dict)
    """What the compute stream lost, by cause: waiting for another stage, for a release, for a
    reload. Waiting for the end of the step's last rank isn't in it."""
    cycle: list[tuple[float, ...]] = field(default_factory=list)
    """At the begin and the end of what repeats: the time, ``compute_us`` and ``stall_us``."""
    trace: StepTrace | None = None


_COUNTS = (
    *("offloaded_bytes", "reloaded_bytes", "recomputed_bytes"),
    *("num_late", "recompute_us", "host_us"),
)
"""Of a `RankStep`, that go on with each cycle that repeats."""


class WorkGroup(Group):
    """A group with the numbers of its copies, and the groups whose bytes its backward needs."""

    is_spent = is_in_window = False
    offload = reload = -1
    parents: tuple[WorkGroup, ...] = ()


_Part: TypeAlias = tuple[GroupWork, WorkGroup | None]
"""What a pass has of a work; no group where the engine doesn't see it."""


class _Replay:
    """One rank's steps, one pass after another; the `Actions` of `StepDecisions`, on paper."""

    def __init__(self, job: Job, rank: int, settings: RankSettings | None, records: bool) -> None:
        self._job, self._rank, self._records = job, rank, records
        self._has_engine = settings is not None
        self._slowness = [one.slowness(has_engine=self._has_engine) for one in job.stages]
        limits = settings or RankSettings()
        self._budget = DeviceBudget(limits.max_inflight_bytes, limits.prefetch_bytes)
        self._window: InFlightWindow[WorkGroup] = InFlightWindow(self._release, self._budget)
        self._decisions = StepDecisions(self, self._window, self._budget)

    def run(self) -> RankStep:
        """Run a step as it is once the engine has seen one; no other where nothing is offloaded."""
        self._learn()
        profile = None
        if sizes := [group.num_bytes for group in self._decisions.committed]:
            self._budget.learn(max(sizes))
            profile = self._decisions.profile()
        job, static_bytes = self._job, self._job.static_bytes[self._rank]
        self.step = step = RankStep(peak_device_bytes=static_bytes, peak_taken_bytes=static_bytes)
        self._host_bytes = self._peak_temp_bytes = self._layers_temp_bytes = self._num_chunks = 0
        self._static_bytes = self._device_bytes = static_bytes
        self._decisions.begin_step(profile)
        chunks: dict[tuple[int, int], list[_Part]] = {}
        schedule = job.schedule
        passes = schedule.ranks[self._rank]
        messages = message_bytes(job, self._rank, passes)
        cycle = schedule.cycles[self._rank] if schedule.num_repeats else ()
        counts: list[list[float]] = []
        for index, (one, self._messages) in enumerate(zip(passes, messages, strict=True)):
            if index in cycle:
                self._add(OpKind.CYCLE, 0)
                counts.append([getattr(step, name) for name in _COUNTS])
            self._stage, self._is_backward = one.stage, one.kind == "B"
            self._message(one, sends=False)
            if self._is_backward:
                self._backward(chunks.pop((one.stage, one.microbatch)))
            else:
                chunks[one.stage, one.microbatch] = parts = self._parts(one.stage)
                self._forward(parts)
            self._message(one, sends=True)
        for name, before, after in zip(_COUNTS, *counts, strict=True) if counts else ():
            count = getattr(step, name) + schedule.num_repeats * (after - before)
            setattr(step, name, count)
        self._window.drain()
        if job.replicas_us:
            self._add(OpKind.COMPUTE, job.replicas_us[self._rank])
        left = (self._budget.inflight_bytes, self._budget.held_bytes, self._host_bytes)
        assert (*left, self._device_bytes) == (0, 0, 0, static_bytes), left
        # What it can't use is taken to be as much as the largest temporaries of a forward, beside
        # what waits for messages, or of any pass.
        reserved_bytes = step.peak_taken_bytes
        if not job.expandable_segments:
            reserved_bytes += self._layers_temp_bytes
            reserved_bytes = max(reserved_bytes, step.peak_device_bytes + self._peak_temp_bytes)
        reserved_bytes += job.unused_bytes[self._rank] if job.unused_bytes else 0
        step.peak_reserved_bytes = -(-reserved_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES
        del self._window, self._decisions  # which hold this: no circle of so many groups
        return step

    def _learn(self) -> None:
        """Let a step be decided of which nothing is known, and in which so nothing is offloaded."""
        self._num_chunks = 0
        chunks: dict[tuple[int, int], list[WorkGroup]] = {}
        for one in self._job.schedule.ranks[self._rank]:
            if one.kind == "F":
                parts = (group for _, group in self._parts(one.stage))
                chunks[one.stage, one.microbatch] = own = [x for x in parts if x is not None]
                for group in own:
                    self._decisions.start(group)
                    self._decisions.commit(group, "its order is yet to be learned")
            else:
                for group in reversed(chunks.pop((one.stage, one.microbatch))):
                    self._decisions.enter_backward(group)
                    self._decisions.leave_backward(group)

    def _parts(self, stage: int) -> list[_Part]:
        parts: list[_Part] = []
        named: dict[tuple[int | None, str], WorkGroup] = {}
        order = 0
        for work in self._job.stages[stage].groups:
            group = None
            if work.is_marked and self._has_engine:
                group = WorkGroup(GroupKey(self._num_chunks, order), work.name, self._budget)
                group.num_bytes = work.num_bytes
                places = {(work.layer, name) for unit in work.recomputed for name in unit.parents}
                if places:
                    group.parents = tuple(one for place, one in named.items() if place in places)
                    group.needs = tuple(one.key for one in group.parents)
                named[work.layer, work.name], order = group, order + 1
            parts.append((work, group))
        self._num_chunks += order > 0
        return parts

    def _message(self, one: Pass, *, sends: bool) -> None:
        """Write what a pass sends to another rank, or receives, if it does."""
        schedule, is_forward = self._job.schedule, one.kind == "F"
        other = one.stage + (1 if sends == is_forward else -1)
        if 0 <= other < schedule.num_stages and other not in schedule.stages_of(self._rank):
            place = one.microbatch * schedule.num_stages + (one.stage if sends else other)
            self._add(OpKind.SEND if sends else OpKind.RECEIVE, 2 * place + is_forward)

    def _forward(self, chunk: list[_Part]) -> None:
        for work, group in chunk:
            if group is not None:
                self._decisions.start(group)
            self._count(work.saved_bytes)  # what it leaves there
            temp_bytes, layers_bytes = work.forward_temp_bytes, self._layers_temp_bytes
            if work.is_apart:
                self._peak_temp_bytes = max(self._peak_temp_bytes, temp_bytes + layers_bytes)
            else:
                self._layers_temp_bytes = max(layers_bytes, temp_bytes)
            self._compute(group, work.forward_us, temp_bytes)
            if group is not None:
                self._decisions.commit(group)

    def _backward(self, chunk: list[_Part]) -> None:
        for work, group in reversed(chunk):
            if group is not None:
                self._decisions.enter_backward(group)
                for needed in (group, *group.parents):
                    self._await_reload(needed)
            for unit in work.recomputed:
                self.step.recomputed_bytes += unit.num_bytes
                self.step.recompute_us += unit.us
            sizes = work.backward_temp_bytes, work.backward_block_bytes
            self._compute(group, work.backward_us, *sizes)
            # Its memory goes with its graph, unless a copy still reads it.
            is_read = group is not None and group.is_in_window
            self._count(-work.kept_bytes - (0 if is_read else work.num_bytes))
            if group is not None:
                self._decisions.leave_backward(group)

    def _compute(
        self, group: WorkGroup | None, us: float, temp_bytes: int, block_bytes: int = 0
    ) -> None:
        temp_bytes += self._job.stages[self._stage].buffer_bytes
        self._peak_temp_bytes = max(self._peak_temp_bytes, temp_bytes)
        self._note_peaks(temp_bytes + block_bytes)
        self.step.host_us += us * (self._slowness[self._stage] - 1)
        us *= self._slowness[self._stage]
        if us > 0:
            self._add(OpKind.COMPUTE, us, group)

    def _add(self, kind: OpKind, argument: float, group: WorkGroup | None = None) -> None:
        step = self.step
        if self._records:
            step.labels.append((group.label if group else "", self._is_backward))
        elif kind is OpKind.COMPUTE and step.kinds and step.kinds[-1] == kind:
            step.arguments[-1] += argument  # there is no observer in between
            return
        step.kinds.append(kind)
        step.arguments.append(argument)

    # Actions

    def keep(self, group: WorkGroup, reason: str) -> None:
        group.advance(GroupState.RESIDENT)

    def offload(self, group: WorkGroup) -> None:
        group.offload = self._issue(OpKind.OFFLOAD, group)
        self.step.offloaded_bytes += group.num_bytes
        self._count(host_bytes=group.num_bytes)
        group.is_in_window = True
        self._window.add(group, group.num_bytes)

    def _release(self, group: WorkGroup) -> None:
        """Write the wait for a copy to the host, whose source is free then."""
        group.is_in_window = False
        self._add(OpKind.AWAIT, group.offload, group)
        is_cancelled = group.state is GroupState.RESIDENT  # and backward is still to use it
        self._count(0 if is_cancelled else -group.num_bytes)

    def cancel(self, group: WorkGroup, *, is_late: bool) -> None:
        group.advance(GroupState.RESIDENT)
        group.land(group.num_bytes)
        self._count(host_bytes=-group.num_bytes)

    def reload(self, group: WorkGroup, *, is_late: bool) -> bool:
        self.step.num_late += is_late
        group.advance(GroupState.RELOADING)
        self._count(group.num_bytes)
        self._note_peaks(0)
        group.reload = self._issue(OpKind.RELOAD, group)
        self.step.reloaded_bytes += group.num_bytes
        self._count(host_bytes=-group.num_bytes)
        return True

    def _await_reload(self, group: WorkGroup) -> None:
        """Write the wait for what is reloaded, where its first tensor is unpacked."""
        if group.reload >= 0:
            self._add(OpKind.AWAIT, group.reload, group)
            group.reload = -1

    # Counts

    def _issue(self, kind: OpKind, group: WorkGroup) -> int:
        copies = self.step.copy_bytes
        copies.append(group.num_bytes)
        self._add(kind, len(copies) - 1, group)
        return len(copies) - 1

    def _count(self, device_bytes: int = 0, host_bytes: int = 0) -> None:
        """Take memory; below 0 free it."""
        self._device_bytes += device_bytes
        self._host_bytes += host_bytes
        self.step.peak_host_bytes = max(self.step.peak_host_bytes, self._host_bytes)
        if self._records:
            counts = {
                ByteCount.HELD: self._device_bytes - self._static_bytes,
                ByteCount.INFLIGHT: self._budget.inflight_bytes,
                ByteCount.PREFETCHED: self._budget.held_bytes,
                ByteCount.HOST: self._host_bytes,
            }
            self.step.memory.append((len(self.step.kinds), counts))

    def _note_peaks(self, temp_bytes: int) -> None:
        """Look at what is taken; not where it only falls."""
        step, (held_bytes, pending_bytes) = self.step, self._messages
        device_bytes = self._device_bytes + temp_bytes + held_bytes
        step.peak_device_bytes = max(step.peak_device_bytes, device_bytes)
        step.peak_taken_bytes = max(step.peak_taken_bytes, device_bytes + pending_bytes)


def replay(
    job: Job, rank: int, settings: RankSettings | None, *, records: bool = False
) -> RankStep:
    """Return what a rank's streams do in a steady step; nothing is offloaded without settings.

    With ``records`` labels are kept, and memory over the program.
    """
    return _Replay(job, rank, settings, records).run()
