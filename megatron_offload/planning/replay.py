"""What the engine does in a steady step on one rank, call by call: no times, only the order.

`core.step.StepDecisions` decides here as in the engine, over the passes of a schedule; what it asks
for is written down. So what moves, where the compute stream waits, and every peak of memory follow
from here, whatever the copies cost; `megatron_offload.planning.streams` adds the times.

Memory is counted as the allocator sees it: in the order of the compute stream's program. A source
takes device memory until the compute stream has waited for its copy, a reload's target from its
issue on, and host memory is taken from the issue of the offload to that of the reload. What a split
backward needs stays until its part for weights has run, although the engine has left the group by
then. As with torch's pipelining that is all that was saved up to the last group with weights, for
autograd holds the whole graph in front of it, and the gradients of the outputs; not the loss.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import Group, GroupState
from megatron_offload.core.profile import GroupKey, GroupProfile, RemadeUnit, StepProfile
from megatron_offload.core.step import StepDecisions
from megatron_offload.core.window import InFlightWindow
from megatron_offload.planning.job import GroupWork, Job, PendingMessages, RankSettings
from megatron_offload.planning.schedule import Pass, PassKind, Schedule


class OpKind(IntEnum):
    """What the compute stream comes by, and what its argument is."""

    COMPUTE = 0
    """Works for so many microseconds."""
    OFFLOAD = 1
    """This copy, to the host, may begin once all before is done."""
    RELOAD = 2
    """Likewise, to the device."""
    AWAIT = 3
    """Waits for this copy."""
    SEND = 4
    """This message leaves; see `message_of`."""
    RECEIVE = 5
    """Waits for this message."""
    HAND_OVER = 6
    """As `SEND`, but it leaves when the other rank has asked for it, and what comes behind it, but
    for a `RECEIVE`, waits until it is there."""
    ASK = 7
    """Asks for this message; whoever hasn't by then does so where it waits for it."""


def message_of(one: Pass, num_stages: int) -> int:
    """Return the number of what a pass sends to the stage behind it, or back to the one before."""
    is_forward = one.kind is PassKind.FORWARD
    return (one.microbatch * num_stages + one.stage) * 2 + is_forward


class MemoryCounts(NamedTuple):
    """Bytes from an op on."""

    position: int
    """Of the op; the counts hold from its beginning."""
    saved_bytes: int
    """On the device, beyond what is there all the time."""
    inflight_bytes: int
    held_bytes: int
    host_bytes: int


@dataclass(slots=True)
class RankProgram:
    """What one rank's streams have to do, and what that takes."""

    kinds: bytearray = field(default_factory=bytearray)
    """What the compute stream comes by, an `OpKind` each. Two flat sequences, because a large job
    has millions of them."""
    arguments: list[float] = field(default_factory=list)
    labels: list[tuple[str, bool]] = field(default_factory=list)
    """The group of each, and whether it is in backward. Only where it was asked for."""
    copy_bytes: list[int] = field(default_factory=list)
    """By the index of the copy, in the order of issue."""
    after: dict[int, int] = field(default_factory=dict)
    """For copies to the host whose place another group had before: the reload that empties it."""
    copy_labels: list[str] = field(default_factory=list)
    """Only where it was asked for."""
    peak_device_bytes: int = 0
    peak_taken_bytes: int = 0
    """The same with what was freed and can't be used yet."""
    peak_temp_bytes: int = 0
    """The largest temporaries of any group, buffers included."""
    peak_host_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    returned_bytes: int = 0
    """Copied to the host for nothing: backward came, or was near, before the release."""
    num_late: int = 0
    remade_bytes: int = 0
    remade_us: float = 0.0
    moved: list[GroupKey] = field(default_factory=list)
    """Groups whose copy to the host was issued, in that order."""
    memory: list[MemoryCounts] = field(default_factory=list)
    """Only where it was asked for."""


class WorkGroup(Group):
    """A group with its work, and the indices of its copies in the program."""

    is_alive = True
    is_in_window = False
    offload = reload = -1

    def __init__(self, key: GroupKey, work: GroupWork, budget: DeviceBudget) -> None:
        super().__init__(key, work.name, budget)
        self.num_bytes = work.num_bytes
        self.needs = _needs(key, work)
        self.work = work

    @property
    def is_spent(self) -> bool:
        """Whether its graph is gone."""
        return not self.is_alive


class _Replay:
    """One rank's step, pass by pass; the `Actions` of `StepDecisions`, on paper."""

    def __init__(
        self,
        job: Job,
        rank: int,
        settings: RankSettings,
        records: bool,
        profile: StepProfile | None,
    ) -> None:
        static_bytes = job.static_bytes[rank]
        self.program = RankProgram(peak_device_bytes=static_bytes, peak_taken_bytes=static_bytes)
        job = job.making_again(rank, settings.recompute)
        self._job = job
        self._settings = settings
        self._records = records
        self._passes = job.schedule.ranks[rank]
        self._slowness = {
            stage: job.stages[stage].slowness(has_engine=settings.offloads)
            for stage in job.schedule.stages_of(rank)
        }
        self._own_stages = frozenset(job.schedule.stages_of(rank))
        self._chunks: dict[tuple[int, int], list[WorkGroup]] = {}
        self._num_chunks = 0
        self._has_gone_back = False
        self._pending = PendingMessages(job, rank)
        self._static_bytes = self._device_bytes = static_bytes
        self._host_bytes = 0
        # Bytes taken with the copy that takes them, and bytes freed (below 0) with the copy that
        # empties them.
        self._host_uses: list[tuple[int, int]] = []
        self._budget = DeviceBudget(settings.max_inflight_bytes, settings.prefetch_bytes)
        self._window: InFlightWindow[WorkGroup] = InFlightWindow(self._release, self._budget)
        self._decisions = StepDecisions(self, self._window, self._budget)
        if settings.offloads:
            profile = profile or step_profile(job, rank, self._budget, settings.kept)
            self._decisions.begin_step(profile)

    def run(self) -> RankProgram:
        asked = _asked_ahead(self._job.schedule, self._passes)
        kinds = [one.kind is PassKind.FORWARD for one in self._passes]
        first_back = (*kinds, False).index(False)
        received: set[Pass] = set()
        for index, one in enumerate(self._passes):
            self._has_gone_back |= index >= first_back
            if one not in received:
                self._exchange(OpKind.RECEIVE, one)
            if index >= first_back - 1:
                for other in asked.get(one, ()):
                    self._exchange(OpKind.ASK, other)
            if one.kind is PassKind.FORWARD:
                self._forward(one)
            else:
                self._backward(one)
            self._exchange(OpKind.SEND, one)
            self._pending.add_pass(one)
            if index < first_back - 1:
                for other in asked.get(one, ()):
                    self._exchange(OpKind.RECEIVE, other)
                    received.add(other)
        return self._finish(self._settings.host_slab_bytes)

    def _forward(self, one: Pass) -> None:
        stage = self._job.stages[one.stage]
        chunk = self._chunks[one.stage, one.microbatch] = []
        order = 0
        for work in stage.groups:
            key = GroupKey(self._num_chunks, order if work.is_marked else -1)
            group = WorkGroup(key, work, self._budget)
            chunk.append(group)
            order += work.is_marked
            self._count_device(work.num_bytes + work.kept_bytes)  # what it leaves there
            temp_bytes = work.forward_temp_bytes + stage.buffer_bytes
            us = work.forward_us * self._slowness[one.stage]
            self._compute(us, temp_bytes, group, is_backward=False)
            if work.is_marked and self._settings.offloads:
                self._decisions.start(group)
                is_kept = key in self._settings.kept
                self._decisions.commit(group, "the plan keeps it" if is_kept else "")
        self._num_chunks += order > 0

    def _backward(self, one: Pass) -> None:
        stage = self._job.stages[one.stage]
        chunk = self._chunks[one.stage, one.microbatch]
        is_needed = False
        for group in reversed(chunk):
            work = group.work
            if not group.is_alive:
                continue
            is_needed |= work.is_marked or work.weight_us > 0
            us = work.backward_us
            if one.kind is PassKind.WEIGHT:
                us = work.weight_us
            elif one.kind is PassKind.INPUT:
                us -= work.weight_us
            us *= self._slowness[one.stage]
            is_seen = work.is_marked and self._settings.offloads
            is_seen &= one.kind is not PassKind.WEIGHT
            if is_seen:
                self._decisions.enter_backward(group)
                self._await_reload(group)
            if work.remade and one.kind is not PassKind.WEIGHT:
                self._make_again(group, chunk)
            # A part for weights begins at the last group that has some: a loss behind is done with.
            is_last = one.kind is not PassKind.INPUT or not is_needed
            temp_bytes = work.backward_temp_bytes + stage.buffer_bytes
            block_bytes = 0 if one.kind is PassKind.WEIGHT else work.backward_block_bytes
            self._compute(us, temp_bytes, group, is_backward=True, block_bytes=block_bytes)
            if one.kind is PassKind.WEIGHT:
                self._count_device(-work.gradient_bytes)
            elif not is_last:
                self._count_device(work.gradient_bytes)
            if is_last:  # its memory goes with its graph, unless a copy still reads it
                group.is_alive = False
                self._count_device(-work.kept_bytes - (0 if group.is_in_window else work.num_bytes))
            if is_seen:
                self._decisions.leave_backward(group)
        if one.kind is not PassKind.INPUT:
            del self._chunks[one.stage, one.microbatch]

    def _make_again(self, group: WorkGroup, chunk: Sequence[WorkGroup]) -> None:
        """Count what a backward makes again, and wait for what other groups hold of its inputs."""
        for unit in group.work.remade:
            self.program.remade_bytes += unit.num_bytes
            self.program.remade_us += unit.us
        if group.needs:
            for needed in chunk:
                if needed.key in group.needs:
                    self._await_reload(needed)

    def _exchange(self, kind: OpKind, one: Pass) -> None:
        """Receive from the stage before, or send to the one behind, as a pass goes.

        As megatron-core's interleaved schedule does (0.16 to 0.19): until its first backward a rank
        sends an output and asks for the next input in one, and goes on when both are there. Later
        messages are under way beside compute, and inputs are asked for a forward ahead.
        """
        if one.kind is PassKind.WEIGHT:
            return
        num_stages = self._job.schedule.num_stages
        goes_up = (kind is OpKind.SEND) == (one.kind is PassKind.FORWARD)
        other = one.stage + (1 if goes_up else -1)
        if 0 <= other < num_stages and other not in self._own_stages:
            sender = one if kind is OpKind.SEND else Pass(other, one.kind, one.microbatch)
            if kind is OpKind.SEND and not self._has_gone_back:
                kind = OpKind.HAND_OVER
            self._add(kind, message_of(sender, num_stages))

    def _add(
        self, kind: OpKind, argument: float, label: str = "", *, is_backward: bool = False
    ) -> None:
        """Write what the compute stream comes by next."""
        self.program.kinds.append(kind)
        self.program.arguments.append(argument)
        if self._records:
            self.program.labels.append((label, is_backward))

    def _finish(self, host_slab_bytes: int) -> RankProgram:
        """Return the program, now that all of it is written."""
        self._window.drain()
        budget = self._budget
        left = (budget.inflight_bytes, budget.held_bytes, self._host_bytes)
        assert (*left, self._device_bytes) == (0, 0, 0, self._static_bytes), left
        num_slabs = -(-self.program.peak_host_bytes // host_slab_bytes)
        self.program.after = _reused(self._host_uses, num_slabs * host_slab_bytes)
        return self.program

    # Actions

    def stay(self, group: WorkGroup, reason: str) -> None:
        """Leave a group on the device."""
        group.advance(GroupState.RESIDENT)

    def offload(self, group: WorkGroup) -> None:
        """Write the issue of a copy to the host."""
        group.advance(GroupState.OFFLOADING)
        group.offload = self._issue(OpKind.OFFLOAD, group)
        self.program.offloaded_bytes += group.num_bytes
        self.program.moved.append(group.key)
        self._use_host(group.num_bytes, group.offload)
        self._budget.inflight_bytes += group.num_bytes
        group.is_in_window = True
        self._window.add(group)

    def _release(self, group: WorkGroup) -> None:
        """Write the wait for a copy to the host, whose source is free then."""
        group.is_in_window = False
        self._add(OpKind.AWAIT, group.offload, self._label(group))
        if group.state is GroupState.OFFLOADING:
            self._budget.inflight_bytes -= group.num_bytes
            group.advance(GroupState.ON_HOST)
            self._count_device(-group.num_bytes)
        elif not group.is_alive:
            self._count_device(-group.num_bytes)

    def cancel(self, group: WorkGroup, *, is_late: bool) -> None:
        """Leave a group on the device whose copy is under way; its place on the host is free."""
        group.advance(GroupState.RESIDENT)
        self._budget.inflight_bytes -= group.num_bytes
        self._use_host(-group.num_bytes, -1)
        self.program.returned_bytes += group.num_bytes

    def reload(self, group: WorkGroup, *, is_late: bool) -> bool:
        """Write the issue of a copy to the device, behind which its place on the host is free."""
        self.program.num_late += is_late
        group.advance(GroupState.RELOADING)
        self._count_device(group.num_bytes)
        group.reload = self._issue(OpKind.RELOAD, group)
        self.program.reloaded_bytes += group.num_bytes
        self._use_host(-group.num_bytes, group.reload)
        return True

    def _await_reload(self, group: WorkGroup) -> None:
        """Write the wait for what comes back, where its first tensor is unpacked."""
        if group.state is GroupState.RELOADING:
            self._add(OpKind.AWAIT, group.reload, self._label(group))
            group.advance(GroupState.RELOADED)

    # Counts

    def _label(self, group: WorkGroup) -> str:
        """Name a group as the engine does, where someone reads it."""
        return group.label if self._records and group.work.is_marked else ""

    def _compute(
        self,
        us: float,
        temp_bytes: int,
        group: WorkGroup,
        *,
        is_backward: bool,
        block_bytes: int = 0,
    ) -> None:
        program = self.program
        if temp_bytes > program.peak_temp_bytes:
            program.peak_temp_bytes = temp_bytes
        self._note_peaks(temp_bytes + block_bytes)
        if us > 0:
            self._add(OpKind.COMPUTE, us, self._label(group), is_backward=is_backward)

    def _issue(self, kind: OpKind, group: WorkGroup) -> int:
        copies, label = self.program.copy_bytes, self._label(group)
        copies.append(group.num_bytes)
        if self._records:
            self.program.copy_labels.append(label)
        self._add(kind, len(copies) - 1, label)
        return len(copies) - 1

    def _count_device(self, num_bytes: int) -> None:
        self._device_bytes += num_bytes
        self._note_peaks(0)
        self._note_memory()

    def _use_host(self, num_bytes: int, copy: int) -> None:
        """Take memory for a copy; below 0 give it back, behind a reload or, with -1, at once."""
        self._host_uses.append((num_bytes, copy))
        self._host_bytes += num_bytes
        if self._host_bytes > self.program.peak_host_bytes:
            self.program.peak_host_bytes = self._host_bytes
        self._note_memory()

    def _note_peaks(self, temp_bytes: int) -> None:
        program, device_bytes = self.program, self._device_bytes + temp_bytes
        if device_bytes > program.peak_device_bytes:
            program.peak_device_bytes = device_bytes
        if device_bytes + self._pending.num_bytes > program.peak_taken_bytes:
            program.peak_taken_bytes = device_bytes + self._pending.num_bytes

    def _note_memory(self) -> None:
        if self._records:
            budget, position = self._budget, len(self.program.kinds)
            saved_bytes = self._device_bytes - self._static_bytes
            counts = (saved_bytes, budget.inflight_bytes, budget.held_bytes, self._host_bytes)
            self.program.memory.append(MemoryCounts(position, *counts))


def _reused(uses: list[tuple[int, int]], pinned_bytes: int) -> dict[int, int]:
    """Return for each copy that takes reused host memory the last reload that empties it.

    Places are lent out in the order in which they were freed. The engine's pool looks for one of
    the same size first, and for the best fit else, which this leaves out.
    """
    free: deque[tuple[int, int]] = deque([(pinned_bytes, -1)])
    after: dict[int, int] = {}
    for num_bytes, copy in uses:
        if num_bytes < 0:
            free.append((-num_bytes, copy))
            continue
        while num_bytes > 0:
            free_bytes, emptied_by = free.popleft()
            taken_bytes = min(free_bytes, num_bytes)
            num_bytes -= taken_bytes
            if free_bytes > taken_bytes:
                free.appendleft((free_bytes - taken_bytes, emptied_by))
            if emptied_by >= 0:
                after[copy] = emptied_by  # reloads run in order, and so are places freed
    return after


def _asked_ahead(schedule: Schedule, passes: Sequence[Pass]) -> dict[Pass, list[Pass]]:
    """Return with which forward a rank asks for the inputs of which later ones.

    With a forward it asks for the input of the next one; the first rank, as megatron-core's, for
    what the last rank has made by then, which it may need only later.
    """
    forwards = [one for one in passes if one.kind is PassKind.FORWARD]
    sent_at = {}
    if len({one.stage for one in forwards}) > 1:
        last = [one for one in schedule.ranks[-1] if one.kind is PassKind.FORWARD]
        sent_at = {(one.stage + 1, one.microbatch): index for index, one in enumerate(last)}
    asked: dict[Pass, list[Pass]] = defaultdict(list)
    for index, one in enumerate(forwards[1:]):
        made = sent_at.get((one.stage, one.microbatch), index) + schedule.num_ranks - 1
        asked[forwards[min(index, made)]].append(one)
    return asked


def _needs(key: GroupKey, work: GroupWork) -> tuple[GroupKey, ...]:
    """Return the other groups that hold what a group makes its own from."""
    return tuple(GroupKey(key.chunk, key.order - distance) for distance in work.needs)


def forward_stages(job: Job, rank: int) -> list[int]:
    """Return the stage of each chunk of a rank: of its forwards that have a group."""
    return [
        one.stage
        for one in job.schedule.ranks[rank]
        if one.kind is PassKind.FORWARD and any(g.is_marked for g in job.stages[one.stage].groups)
    ]


def step_profile(
    job: Job, rank: int, budget: DeviceBudget | None = None, kept: Collection[GroupKey] = ()
) -> StepProfile:
    """Return what the engine would learn from a step of one rank: groups, and the order of needs.

    It depends on the schedule and on sizes alone, not on what moves.

    Args:
        job: the step.
        rank: pipeline rank.
        budget: one that is to know the step, as if it had come by.
        kept: groups that never move, for that.
    """
    budget = budget or DeviceBudget()
    budget.begin_step()
    groups: list[GroupProfile] = []
    order: list[GroupKey] = []
    at_bytes: list[int] = []
    positions: dict[tuple[int, int], int] = {}
    passed_bytes = 0
    for one in job.schedule.ranks[rank]:
        marked = [work for work in job.stages[one.stage].groups if work.is_marked]
        if one.kind is PassKind.FORWARD and marked:
            position = positions[one.stage, one.microbatch] = len(positions)
            for index, work in enumerate(marked):
                key = GroupKey(position, index)
                units = tuple(
                    RemadeUnit(unit.unit, unit.num_bytes, unit.us, _needs(key, work))
                    for unit in work.remade
                )
                groups.append(
                    GroupProfile(key, work.name, work.num_bytes, passed_bytes, remade=units)
                )
                moving_bytes = 0 if key in kept else work.num_bytes
                budget.add_saved(work.num_bytes, moving_bytes, is_learned=True)
                passed_bytes += work.num_bytes
        elif one.kind in (PassKind.BACKWARD, PassKind.INPUT) and marked:
            position = positions[one.stage, one.microbatch]
            for index in reversed(range(len(marked))):
                order.append(GroupKey(position, index))
                at_bytes.append(passed_bytes)
                budget.drop_saved(marked[index].num_bytes)
                passed_bytes += marked[index].num_bytes
    return StepProfile(tuple(groups), tuple(order), tuple(at_bytes))


def replay(
    job: Job,
    rank: int,
    settings: RankSettings,
    *,
    records: bool = False,
    profile: StepProfile | None = None,
) -> RankProgram:
    """Return what one rank's streams do in a steady step.

    Args:
        job: the step.
        rank: pipeline rank.
        settings: what the rank keeps and may hold.
        records: keep labels, and memory over the program.
        profile: what `step_profile` says of the job with its units made again, for whoever asks
            often; only where the settings have both limits.
    """
    return _Replay(job, rank, settings, records, profile).run()
