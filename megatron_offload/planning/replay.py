"""What the engine does in a steady step on one rank, call by call: no times, only the order.

Owns the replay of `PipelineOffloadManager`'s three boundaries (commit, backward enters, backward
leaves) and of the release window of `Transfers`, over the passes of a schedule. The budget, the
prefetch order and the state table are the engine's own. Must not know torch, bandwidths or times.

The engine decides by counts and by the order of the program alone, never by what a stream has
already done. So what moves, where the compute stream waits, and every peak of memory follow from
here, whatever the copies cost; `megatron_offload.planning.simulate` adds the times.

Memory is counted as the allocator sees it: in the order of the compute stream's program. A source
counts until the compute stream has waited for its copy, a reload's target from its issue on, host
memory from the issue of the offload to that of the reload. What a split backward needs stays until
its part for weights has run, although the engine has left the group by then.

Invariants: what left the device comes back or was kept in time; all counts are zero at the end.
Read next: `megatron_offload.planning.simulate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from megatron_offload.planning.budget import DeviceBudget
from megatron_offload.planning.job import GroupWork, Job, RankSettings
from megatron_offload.planning.prefetch import Prefetcher
from megatron_offload.planning.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.planning.schedule import Pass, PassKind
from megatron_offload.planning.states import MOVES, GroupState

__all__ = ["MemoryCounts", "OpKind", "RankProgram", "message_of", "replay", "step_profile"]


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


def message_of(one: Pass, num_stages: int) -> int:
    """Return the number of what a pass sends to the stage behind it, or back to the one before."""
    is_forward = one.kind is PassKind.FORWARD
    return (one.microbatch * num_stages + one.stage) * 2 + is_forward


class MemoryCounts(NamedTuple):
    """Bytes from an op on."""

    position: int
    """Of the op; the counts hold from its beginning."""
    device_bytes: int
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
    copy_labels: list[str] = field(default_factory=list)
    """Likewise."""
    peak_device_bytes: int = 0
    peak_temp_bytes: int = 0
    """The largest temporaries of any group, buffers included."""
    peak_host_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    returned_bytes: int = 0
    """Copied to the host for nothing: backward came, or was near, before the release."""
    num_late: int = 0
    moved: list[GroupKey] = field(default_factory=list)
    """Groups whose copy to the host was issued, in that order."""
    memory: list[MemoryCounts] = field(default_factory=list)
    """Likewise."""


class _Chunk:
    """One microbatch on one stage: its groups in the order of the forward."""

    __slots__ = ("committed", "groups")

    def __init__(self) -> None:
        self.groups: list[_Group] = []
        self.committed: list[_Group] = []


class _Group:
    """A group as the prefetcher wants it, with what the replay has to remember."""

    __slots__ = (
        "budget",
        "chunk",
        "held_bytes",
        "is_alive",
        "is_in_window",
        "is_resident",
        "key",
        "num_bytes",
        "offload",
        "reload",
        "state",
        "work",
    )

    def __init__(self, chunk: _Chunk, key: GroupKey, work: GroupWork, budget: DeviceBudget) -> None:
        self.chunk = chunk
        self.key = key
        self.work = work
        self.num_bytes = work.num_bytes
        self.budget = budget
        self.state = GroupState.RECORDING
        self.held_bytes = 0
        self.is_resident = False
        self.is_alive = True
        self.is_in_window = False
        self.offload = self.reload = -1

    def advance(self, to: GroupState) -> None:
        assert to in MOVES[self.state], (self.key, self.state, to)
        self.state = to

    def hold(self) -> None:
        if self.held_bytes == 0 and self.is_alive:
            self.held_bytes = self.num_bytes
            self.budget.held_bytes += self.num_bytes

    def let_go(self) -> None:
        self.budget.held_bytes -= self.held_bytes
        self.held_bytes = 0

    @property
    def label(self) -> str:
        """The engine's own label of a group, so that traces of both read alike."""
        if not self.work.is_marked:
            return ""
        return f"{self.work.name}[chunk {self.key.chunk}, group {self.key.order}]"


class _Transfers:
    """The engine's `Transfers` as far as counts go: what is in flight, and when it is released."""

    def __init__(self, replay: _Replay, budget: DeviceBudget) -> None:
        self.replay = replay
        self.budget = budget
        self.step_bytes = 0
        self.window: deque[tuple[_Group, int]] = deque()

    def offload(self, group: _Group) -> None:
        replay, budget = self.replay, self.budget
        group.advance(GroupState.OFFLOADING)
        group.offload = replay.issue(OpKind.OFFLOAD, group)
        replay.program.offloaded_bytes += group.num_bytes
        replay.program.moved.append(group.key)
        replay.count_host(group.num_bytes)
        budget.inflight_bytes += group.num_bytes
        group.is_in_window = True
        self.window.append((group, self.step_bytes + budget.limit_bytes))

    def pass_boundary(self, num_bytes: int) -> None:
        self.step_bytes += num_bytes
        window = self.window
        while window and window[0][1] < self.step_bytes:
            self._release_oldest()
        self.release_over_budget()

    def release_over_budget(self) -> None:
        while self.window and self.budget.is_exceeded():
            self._release_oldest()

    def drain_window(self) -> None:
        while self.window:
            self._release_oldest()

    def _release_oldest(self) -> None:
        group, _ = self.window.popleft()
        group.is_in_window = False
        self.replay.wait_for(group.offload, group)
        if group.state is GroupState.OFFLOADING:
            self.budget.inflight_bytes -= group.num_bytes
            group.advance(GroupState.ON_HOST)
            self.replay.count_device(-group.num_bytes)
        elif not group.is_alive:
            self.replay.count_device(-group.num_bytes)

    def keep_resident(self, group: _Group) -> None:
        group.advance(GroupState.RESIDENT)
        self.budget.inflight_bytes -= group.num_bytes
        self.replay.count_host(-group.num_bytes)
        self.replay.program.returned_bytes += group.num_bytes

    def reload(self, group: _Group, *, may_fail: bool = False) -> bool:
        replay = self.replay
        group.advance(GroupState.RELOADING)
        replay.count_device(group.num_bytes)
        group.reload = replay.issue(OpKind.RELOAD, group)
        replay.program.reloaded_bytes += group.num_bytes
        replay.count_host(-group.num_bytes)
        return True


class _Replay:
    """One rank's step, pass by pass."""

    def __init__(self, job: Job, rank: int, settings: RankSettings, records: bool) -> None:
        self.job = job
        self.rank = rank
        self.settings = settings
        self.program = RankProgram()
        self._records = records
        self._own_stages = frozenset(job.schedule.stages_of(rank))
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._num_chunks = 0
        self._device_bytes = job.static_bytes[rank]
        self._host_bytes = 0
        self.budget = DeviceBudget(settings.max_inflight_bytes, settings.prefetch_bytes)
        self.transfers = _Transfers(self, self.budget)
        self.prefetcher: Prefetcher[_Group] = Prefetcher(self.transfers, self.budget)

    def run(self) -> RankProgram:
        program = self.program
        program.peak_device_bytes = self._device_bytes
        if self.settings.offloads:
            profile = _learn(self.job, self.rank, self.budget)
            self.budget.warmup_extra_bytes = self.settings.warmup_extra_bytes
            self.budget.begin_step()
            self.prefetcher.begin_step(profile)
        for one in self.job.schedule.ranks[self.rank]:
            self._receive(one)
            if one.kind is PassKind.FORWARD:
                self._forward(one)
            else:
                self._backward(one)
            self._send(one)
        self.transfers.drain_window()
        left = (self._host_bytes, self.budget.inflight_bytes, self.budget.held_bytes)
        assert left == (0, 0, 0), left
        assert self._device_bytes == self.job.static_bytes[self.rank]
        return program

    # Passes

    def _forward(self, one: Pass) -> None:
        stage = self.job.stages[one.stage]
        chunk = self._chunks[one.stage, one.microbatch] = _Chunk()
        for group in _groups_of(chunk, stage.groups, self._num_chunks, self.budget):
            work = group.work
            is_marked = work.is_marked and self.settings.offloads
            if is_marked:
                self.prefetcher.register(group)
            self.count_device(work.num_bytes + work.kept_bytes)
            self._compute(group, work.forward_us, work.forward_temp_bytes + stage.buffer_bytes)
            if is_marked:
                self._commit(group)
        self._num_chunks += any(work.is_marked for work in stage.groups)

    def _backward(self, one: Pass) -> None:
        stage = self.job.stages[one.stage]
        chunk = self._chunks[one.stage, one.microbatch]
        for group in reversed(chunk.groups):
            work = group.work
            is_marked = work.is_marked and self.settings.offloads
            us = work.backward_us
            if one.kind is PassKind.WEIGHT:
                us = work.weight_us
            elif one.kind is PassKind.INPUT:
                us -= work.weight_us
            if is_marked and one.kind is not PassKind.WEIGHT:
                self._enter_backward(group)
            temp_bytes = work.backward_temp_bytes + stage.buffer_bytes
            self._compute(group, us, temp_bytes, is_backward=True)
            if one.kind is not PassKind.INPUT:
                self._drop(group)
            if is_marked and one.kind is not PassKind.WEIGHT:
                self._leave_backward(group)
        if one.kind is not PassKind.INPUT:
            del self._chunks[one.stage, one.microbatch]

    def _drop(self, group: _Group) -> None:
        """Let the graph of a group go, and its memory unless a copy still reads it."""
        group.is_alive = False
        self.count_device(-group.work.kept_bytes - (0 if group.is_in_window else group.num_bytes))

    # The manager's boundaries, in the order of its own lines

    def _commit(self, group: _Group) -> None:
        budget, settings = self.budget, self.settings
        group.chunk.committed.append(group)
        budget.add_saved(group.num_bytes, is_learned=True)
        if group.num_bytes == 0 or group.key in settings.kept:
            group.advance(GroupState.RESIDENT)
        elif group.key in settings.residents:
            group.advance(GroupState.RESIDENT)
            budget.resident_bytes += group.num_bytes
            group.is_resident = True
        elif self.prefetcher.is_needed_soon(group):
            group.advance(GroupState.RESIDENT)
            group.hold()
        else:
            self.transfers.offload(group)
        self.transfers.pass_boundary(group.num_bytes)
        self.prefetcher.advance()

    def _enter_backward(self, group: _Group) -> None:
        transfers = self.transfers
        if self.budget.end_warmup():
            transfers.release_over_budget()
        has_moved = self.prefetcher.enter_backward(group)
        if group.state is GroupState.ON_HOST:
            self.program.num_late += 1
            transfers.reload(group)
            group.hold()
        elif group.state is GroupState.OFFLOADING:
            transfers.keep_resident(group)
        if has_moved:
            self.prefetcher.advance()
        if group.state is GroupState.RELOADING:
            self.wait_for(group.reload, group)  # where the first tensor is unpacked
            group.advance(GroupState.RELOADED)

    def _leave_backward(self, group: _Group) -> None:
        group.advance(GroupState.DONE)
        group.let_go()
        self.budget.drop_saved(group.num_bytes)
        if group.is_resident:
            self.budget.resident_bytes -= group.num_bytes
        self.transfers.pass_boundary(group.num_bytes)
        self.prefetcher.advance()

    # Streams

    def issue(self, kind: OpKind, group: _Group) -> int:
        """Issue a copy; return its index."""
        program = self.program
        copy = len(program.copy_bytes)
        program.copy_bytes.append(group.num_bytes)
        if self._records:
            program.copy_labels.append(group.label)
        self._add(kind, copy, group)
        return copy

    def wait_for(self, copy: int, group: _Group) -> None:
        """Make the compute stream wait for a copy."""
        self._add(OpKind.AWAIT, copy, group)

    def _compute(
        self, group: _Group, us: float, temp_bytes: int, *, is_backward: bool = False
    ) -> None:
        program = self.program
        if temp_bytes > program.peak_temp_bytes:
            program.peak_temp_bytes = temp_bytes
        if self._device_bytes + temp_bytes > program.peak_device_bytes:
            program.peak_device_bytes = self._device_bytes + temp_bytes
        if us > 0:
            self._add(OpKind.COMPUTE, us, group, is_backward=is_backward)

    def _receive(self, one: Pass) -> None:
        self._exchange(OpKind.RECEIVE, one, -1)

    def _send(self, one: Pass) -> None:
        self._exchange(OpKind.SEND, one, 1)

    def _exchange(self, kind: OpKind, one: Pass, step: int) -> None:
        """Receive from the stage before, or send to the one behind, as a pass goes."""
        if one.kind is PassKind.WEIGHT:
            return
        num_stages = self.job.schedule.num_stages
        other = one.stage + (step if one.kind is PassKind.FORWARD else -step)
        if not 0 <= other < num_stages or other in self._own_stages:
            return
        sender = one if kind is OpKind.SEND else Pass(other, one.kind, one.microbatch)
        self._add(kind, message_of(sender, num_stages))

    def _add(
        self,
        kind: OpKind,
        argument: float,
        group: _Group | None = None,
        *,
        is_backward: bool = False,
    ) -> None:
        program = self.program
        program.kinds.append(kind)
        program.arguments.append(argument)
        if self._records:
            program.labels.append(("" if group is None else group.label, is_backward))

    # Memory

    def count_device(self, num_bytes: int) -> None:
        """Count device memory that was taken, or given back."""
        self._device_bytes += num_bytes
        if self._device_bytes > self.program.peak_device_bytes:
            self.program.peak_device_bytes = self._device_bytes
        self._note_memory()

    def count_host(self, num_bytes: int) -> None:
        """The same of host memory."""
        self._host_bytes += num_bytes
        self.program.peak_host_bytes = max(self.program.peak_host_bytes, self._host_bytes)
        self._note_memory()

    def _note_memory(self) -> None:
        if self._records:
            budget, position = self.budget, len(self.program.kinds)
            counts = (self._device_bytes, budget.inflight_bytes, budget.held_bytes)
            self.program.memory.append(MemoryCounts(position, *counts, self._host_bytes))


def _groups_of(
    chunk: _Chunk, works: tuple[GroupWork, ...], position: int, budget: DeviceBudget
) -> Iterator[_Group]:
    """Yield a chunk's groups as its forward comes to them; marked ones are numbered."""
    order = 0
    for work in works:
        group = _Group(chunk, GroupKey(position, order if work.is_marked else -1), work, budget)
        order += work.is_marked
        chunk.groups.append(group)
        yield group


def _learn(job: Job, rank: int, budget: DeviceBudget) -> StepProfile:
    """Return the rank's profile, and let a budget follow the step as one that came before."""
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
                groups.append(GroupProfile(key, work.name, work.num_bytes, passed_bytes))
                budget.add_saved(work.num_bytes, is_learned=True)
                passed_bytes += work.num_bytes
        elif one.kind in (PassKind.BACKWARD, PassKind.INPUT) and marked:
            position = positions[one.stage, one.microbatch]
            for index in reversed(range(len(marked))):
                order.append(GroupKey(position, index))
                at_bytes.append(passed_bytes)
                budget.drop_saved(marked[index].num_bytes)
                passed_bytes += marked[index].num_bytes
    budget.learn()
    return StepProfile(tuple(groups), tuple(order), tuple(at_bytes))


def step_profile(job: Job, rank: int) -> StepProfile:
    """Return what the engine would learn from a step of one rank: groups, and the order of needs.

    It depends on the schedule and on sizes alone, not on what moves.
    """
    return _learn(job, rank, DeviceBudget(None, None))


def replay(job: Job, rank: int, settings: RankSettings, *, records: bool = False) -> RankProgram:
    """Return what one rank's streams do in a steady step.

    Args:
        job: the step.
        rank: pipeline rank.
        settings: what the rank keeps and may hold.
        records: keep labels, and memory over the program.
    """
    return _Replay(job, rank, settings, records).run()
