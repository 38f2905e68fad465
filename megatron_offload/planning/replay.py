"""What the engine does in a steady step on one rank, call by call: no times, only the order.

Owns the replay of the three boundaries of `engine.step.Step` (commit, backward enters, backward
leaves) and of `InFlightWindow`, over the passes of a schedule. The budget, the prefetch order and
the state table are the engine's own. Must not know torch, bandwidths or times.

The engine decides by counts and by the order of the program alone, never by what a stream has
already done. So what moves, where the compute stream waits, and every peak of memory follow from
here, whatever the copies cost; `megatron_offload.planning.streams` adds the times.

A source takes device memory until the compute stream has waited for its copy, a reload's target
from its issue on, and host memory is taken from the issue of the offload to that of the reload.
What a split backward needs stays until its part for weights has run, although the engine has left
the group by then.

Invariants: what left the device comes back or was kept in time; all counts are zero at the end.
Read next: `megatron_offload.planning.streams`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.prefetch import Prefetcher
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.core.states import MOVES, GroupState
from megatron_offload.planning.job import GroupWork, Job, RankSettings
from megatron_offload.planning.pending import PendingMessages
from megatron_offload.planning.program import OpKind, ProgramWriter, RankProgram, message_of
from megatron_offload.planning.schedule import Pass, PassKind

__all__ = ["replay", "step_profile"]


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
    """The engine's `Transfers` and `InFlightWindow` as far as counts go."""

    def __init__(self, writer: ProgramWriter, budget: DeviceBudget) -> None:
        self.writer = writer
        self.budget = budget
        self.step_bytes = 0
        self.window: deque[tuple[_Group, int]] = deque()

    def offload(self, group: _Group) -> None:
        writer, budget, num_bytes = self.writer, self.budget, group.num_bytes
        group.advance(GroupState.OFFLOADING)
        group.offload = writer.issue(OpKind.OFFLOAD, num_bytes, self.label(group))
        writer.program.offloaded_bytes += num_bytes
        writer.program.moved.append(group.key)
        writer.take_host(num_bytes, group.offload)
        budget.inflight_bytes += num_bytes
        group.is_in_window = True
        self.window.append((group, self.step_bytes + budget.limit_bytes))

    def pass_boundary(self, num_bytes: int) -> None:
        self.step_bytes += num_bytes
        window = self.window
        if self.budget.clock_runs:
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
        self.writer.add(OpKind.AWAIT, group.offload, self.label(group))
        if group.state is GroupState.OFFLOADING:
            self.budget.inflight_bytes -= group.num_bytes
            group.advance(GroupState.ON_HOST)
            self.writer.count_device(-group.num_bytes)
        elif not group.is_alive:
            self.writer.count_device(-group.num_bytes)

    def keep_resident(self, group: _Group) -> None:
        group.advance(GroupState.RESIDENT)
        self.budget.inflight_bytes -= group.num_bytes
        self.writer.free_host(group.num_bytes, -1)
        self.writer.program.returned_bytes += group.num_bytes

    def reload(self, group: _Group, *, may_fail: bool = False) -> bool:
        writer, num_bytes = self.writer, group.num_bytes
        group.advance(GroupState.RELOADING)
        writer.count_device(num_bytes)
        group.reload = writer.issue(OpKind.RELOAD, num_bytes, self.label(group))
        writer.program.reloaded_bytes += num_bytes
        writer.free_host(num_bytes, group.reload)
        return True

    def label(self, group: _Group) -> str:
        """Name a group where someone reads it."""
        return group.label if self.writer.records else ""


class _Replay:
    """One rank's step, pass by pass."""

    def __init__(self, job: Job, rank: int, settings: RankSettings, records: bool) -> None:
        self.job = job
        self.rank = rank
        self.settings = settings
        self._own_stages = frozenset(job.schedule.stages_of(rank))
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._num_chunks = 0
        self._has_gone_back = False
        self.budget = DeviceBudget(settings.max_inflight_bytes, settings.prefetch_bytes)
        self.pending = PendingMessages(job, rank)
        self.writer = ProgramWriter(
            job.static_bytes[rank], self.budget, self.pending, records=records
        )
        self.transfers = _Transfers(self.writer, self.budget)
        self.prefetcher: Prefetcher[_Group] = Prefetcher(
            self.transfers, self.transfers, self.budget
        )

    def run(self) -> RankProgram:
        if self.settings.offloads:
            profile = _learn(self.job, self.rank, self.budget, self.settings.kept)
            self.budget.warmup_extra_bytes = self.settings.warmup_extra_bytes
            self.budget.begin_step()
            self.prefetcher.begin_step(profile)
        asked = _asked_ahead(self.job.schedule.ranks[self.rank])
        for one in self.job.schedule.ranks[self.rank]:
            self._has_gone_back |= one.kind is not PassKind.FORWARD
            self._exchange(OpKind.RECEIVE, one)
            if one in asked:
                self._exchange(OpKind.ASK, asked[one])
            if one.kind is PassKind.FORWARD:
                self._forward(one)
            else:
                self._backward(one)
            self._exchange(OpKind.SEND, one)
            self.pending.add_pass(one)
        self.transfers.drain_window()
        left = (self.budget.inflight_bytes, self.budget.held_bytes, self.budget.resident_bytes)
        assert left == (0, 0, 0), left
        return self.writer.finish(self.settings.host_slab_bytes)

    # Passes

    def _forward(self, one: Pass) -> None:
        stage = self.job.stages[one.stage]
        chunk = self._chunks[one.stage, one.microbatch] = _Chunk()
        for group in _groups_of(chunk, stage.groups, self._num_chunks, self.budget):
            work = group.work
            is_marked = work.is_marked and self.settings.offloads
            if is_marked:
                self.prefetcher.register(group)
            self.writer.count_device(work.num_bytes + work.kept_bytes)
            temp_bytes = work.forward_temp_bytes + stage.buffer_bytes
            label = self.transfers.label(group)
            self.writer.compute(work.forward_us, temp_bytes, label, is_backward=False)
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
            self.writer.compute(us, temp_bytes, self.transfers.label(group), is_backward=True)
            if one.kind is not PassKind.INPUT:
                self._drop(group)
            if is_marked and one.kind is not PassKind.WEIGHT:
                self._leave_backward(group)
        if one.kind is not PassKind.INPUT:
            del self._chunks[one.stage, one.microbatch]

    def _drop(self, group: _Group) -> None:
        """Let the graph of a group go, and its memory unless a copy still reads it."""
        group.is_alive = False
        num_bytes = 0 if group.is_in_window else group.num_bytes
        self.writer.count_device(-group.work.kept_bytes - num_bytes)

    # The boundaries of `Step`, in the order of its own lines

    def _commit(self, group: _Group) -> None:
        budget, settings = self.budget, self.settings
        group.chunk.committed.append(group)
        moving_bytes = 0 if group.key in settings.kept else group.num_bytes
        budget.add_saved(group.num_bytes, moving_bytes, is_learned=True)
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
            self.writer.program.num_late += 1
            transfers.reload(group)
            group.hold()
        elif group.state is GroupState.OFFLOADING:
            transfers.keep_resident(group)
        if has_moved:
            self.prefetcher.advance()
        if group.state is GroupState.RELOADING:
            # Where its first tensor is unpacked.
            self.writer.add(OpKind.AWAIT, group.reload, self.transfers.label(group))
            group.advance(GroupState.RELOADED)

    def _leave_backward(self, group: _Group) -> None:
        group.advance(GroupState.DONE)
        group.let_go()
        self.budget.drop_saved(group.num_bytes)
        if group.is_resident:
            self.budget.resident_bytes -= group.num_bytes
        self.transfers.pass_boundary(group.num_bytes)
        self.prefetcher.advance()

    def _exchange(self, kind: OpKind, one: Pass) -> None:
        """Receive from the stage before, or send to the one behind, as a pass goes.

        As megatron-core's interleaved schedule does (0.16 to 0.19): until its first backward a rank
        sends an output and asks for the next input in one, and goes on when both are there. Later
        messages are under way beside compute, and inputs are asked for a forward ahead.
        """
        if one.kind is PassKind.WEIGHT:
            return
        num_stages = self.job.schedule.num_stages
        goes_up = (kind is OpKind.SEND) == (one.kind is PassKind.FORWARD)
        other = one.stage + (1 if goes_up else -1)
        if 0 <= other < num_stages and other not in self._own_stages:
            sender = one if kind is OpKind.SEND else Pass(other, one.kind, one.microbatch)
            if kind is OpKind.SEND and not self._has_gone_back:
                kind = OpKind.HAND_OVER
            self.writer.add(kind, message_of(sender, num_stages))


def _asked_ahead(passes: Sequence[Pass]) -> dict[Pass, Pass]:
    """Return the forwards at whose begin a rank asks for the input of another, and of which.

    It is that of the next forward, from the last one before the first backward on.
    """
    is_back = [one.kind is not PassKind.FORWARD for one in passes]
    first_back = is_back.index(True) if True in is_back else len(passes)
    forwards = [one for one in passes if one.kind is PassKind.FORWARD]
    return dict(pairwise(forwards[max(0, first_back - 1) :]))


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


def _learn(
    job: Job, rank: int, budget: DeviceBudget, kept: Collection[GroupKey] = ()
) -> StepProfile:
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


def step_profile(job: Job, rank: int, budget: DeviceBudget | None = None) -> StepProfile:
    """Return what the engine would learn from a step of one rank: groups, and the order of needs.

    It depends on the schedule and on sizes alone, not on what moves.

    Args:
        job: the step.
        rank: pipeline rank.
        budget: one that is to know the step, as if it had come by.
    """
    return _learn(job, rank, budget or DeviceBudget(None, None))


def replay(job: Job, rank: int, settings: RankSettings, *, records: bool = False) -> RankProgram:
    """Return what one rank's streams do in a steady step.

    Args:
        job: the step.
        rank: pipeline rank.
        settings: what the rank keeps and may hold.
        records: keep labels, and memory over the program.
    """
    return _Replay(job, rank, settings, records).run()
