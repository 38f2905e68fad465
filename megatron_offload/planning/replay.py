"""What the engine does in a steady step on one rank, call by call: no times, only the order.

`core.step.StepDecisions` decides here as in the engine, over the passes of a schedule; what it asks
for is written down. So what moves, where the compute stream waits, and every peak of memory follow
from here, whatever the copies cost; `megatron_offload.planning.streams` adds the times.

A source takes device memory until the compute stream has waited for its copy, a reload's target
from its issue on, and host memory is taken from the issue of the offload to that of the reload.
What a split backward needs stays until its part for weights has run, although the engine has left
the group by then.

Invariants: what left the device comes back or was kept in time; all counts are zero at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import Group, GroupState
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.core.step import StepDecisions
from megatron_offload.core.window import InFlightWindow
from megatron_offload.planning.job import GroupWork, Job, RankSettings
from megatron_offload.planning.pending import PendingMessages
from megatron_offload.planning.program import OpKind, ProgramWriter, RankProgram, message_of
from megatron_offload.planning.schedule import Pass, PassKind

__all__ = ["replay", "step_profile"]


class _Group(Group):
    """A group with its work, and the indices of its copies in the program."""

    __slots__ = ("is_alive", "is_in_window", "offload", "reload", "work")

    def __init__(self, key: GroupKey, work: GroupWork, budget: DeviceBudget) -> None:
        super().__init__(key, work.name, budget)
        self.num_bytes = work.num_bytes
        self.work = work
        self.is_alive = True
        self.is_in_window = False
        self.offload = self.reload = -1

    @property
    def is_spent(self) -> bool:
        return not self.is_alive


class _Copies:
    """Writes down what is decided about groups, and counts what that takes."""

    def __init__(self, writer: ProgramWriter, budget: DeviceBudget) -> None:
        self.window: InFlightWindow[_Group] = InFlightWindow(self.release, budget)
        self._writer = writer
        self._budget = budget

    def stay(self, group: _Group, reason: str) -> None:
        group.advance(GroupState.RESIDENT)

    def offload(self, group: _Group) -> None:
        writer, num_bytes = self._writer, group.num_bytes
        group.advance(GroupState.OFFLOADING)
        group.offload = writer.issue(OpKind.OFFLOAD, num_bytes, self.label(group))
        writer.program.offloaded_bytes += num_bytes
        writer.program.moved.append(group.key)
        writer.take_host(num_bytes, group.offload)
        self._budget.inflight_bytes += num_bytes
        group.is_in_window = True
        self.window.add(group)

    def release(self, group: _Group) -> None:
        group.is_in_window = False
        self._writer.add(OpKind.AWAIT, group.offload, self.label(group))
        if group.state is GroupState.OFFLOADING:
            self._budget.inflight_bytes -= group.num_bytes
            group.advance(GroupState.ON_HOST)
            self._writer.count_device(-group.num_bytes)
        elif not group.is_alive:
            self._writer.count_device(-group.num_bytes)

    def cancel(self, group: _Group, *, is_late: bool) -> None:
        group.advance(GroupState.RESIDENT)
        self._budget.inflight_bytes -= group.num_bytes
        self._writer.free_host(group.num_bytes, -1)
        self._writer.program.returned_bytes += group.num_bytes

    def reload(self, group: _Group, *, is_late: bool) -> bool:
        writer, num_bytes = self._writer, group.num_bytes
        writer.program.num_late += is_late
        group.advance(GroupState.RELOADING)
        writer.count_device(num_bytes)
        group.reload = writer.issue(OpKind.RELOAD, num_bytes, self.label(group))
        writer.program.reloaded_bytes += num_bytes
        writer.free_host(num_bytes, group.reload)
        return True

    def await_reload(self, group: _Group) -> None:
        """Wait for what comes back, where its first tensor is unpacked."""
        if group.state is GroupState.RELOADING:
            self._writer.add(OpKind.AWAIT, group.reload, self.label(group))
            group.advance(GroupState.RELOADED)

    def label(self, group: _Group) -> str:
        """Name a group as the engine does, where someone reads it."""
        return group.label if self._writer.records and group.work.is_marked else ""


class _Replay:
    """One rank's step, pass by pass."""

    def __init__(self, job: Job, rank: int, settings: RankSettings, records: bool) -> None:
        self.job = job
        self.rank = rank
        self.settings = settings
        self._own_stages = frozenset(job.schedule.stages_of(rank))
        self._chunks: dict[tuple[int, int], list[_Group]] = {}
        self._num_chunks = 0
        self._has_gone_back = False
        self.budget = DeviceBudget(settings.max_inflight_bytes, settings.prefetch_bytes)
        self.pending = PendingMessages(job, rank)
        self.writer = ProgramWriter(
            job.static_bytes[rank], self.budget, self.pending, records=records
        )
        self.copies = _Copies(self.writer, self.budget)
        self.decisions = StepDecisions(self.copies, self.copies.window, self.budget)

    def run(self) -> RankProgram:
        if self.settings.offloads:
            profile = _learn(self.job, self.rank, self.budget, self.settings.kept)
            self.budget.warmup_extra_bytes = self.settings.warmup_extra_bytes
            self.decisions.begin_step(profile, self.settings.residents)
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
        self.copies.window.drain()
        left = (self.budget.inflight_bytes, self.budget.held_bytes, self.budget.resident_bytes)
        assert left == (0, 0, 0), left
        return self.writer.finish(self.settings.host_slab_bytes)

    # Passes

    def _forward(self, one: Pass) -> None:
        stage = self.job.stages[one.stage]
        chunk = self._chunks[one.stage, one.microbatch] = []
        for group in _groups_of(stage.groups, self._num_chunks, self.budget):
            chunk.append(group)
            work = group.work
            is_marked = work.is_marked and self.settings.offloads
            if is_marked:
                self.decisions.start(group)
            self.writer.count_device(work.num_bytes + work.kept_bytes)
            temp_bytes = work.forward_temp_bytes + stage.buffer_bytes
            label = self.copies.label(group)
            self.writer.compute(work.forward_us, temp_bytes, label, is_backward=False)
            if is_marked:
                is_kept = group.key in self.settings.kept
                self.decisions.commit(group, "it is kept" if is_kept else "")
        self._num_chunks += any(work.is_marked for work in stage.groups)

    def _backward(self, one: Pass) -> None:
        stage = self.job.stages[one.stage]
        for group in reversed(self._chunks[one.stage, one.microbatch]):
            work = group.work
            is_marked = work.is_marked and self.settings.offloads
            us = work.backward_us
            if one.kind is PassKind.WEIGHT:
                us = work.weight_us
            elif one.kind is PassKind.INPUT:
                us -= work.weight_us
            if is_marked and one.kind is not PassKind.WEIGHT:
                self.decisions.enter_backward(group)
                self.copies.await_reload(group)
            temp_bytes = work.backward_temp_bytes + stage.buffer_bytes
            self.writer.compute(us, temp_bytes, self.copies.label(group), is_backward=True)
            if one.kind is not PassKind.INPUT:
                self._drop(group)
            if is_marked and one.kind is not PassKind.WEIGHT:
                self.decisions.leave_backward(group)
        if one.kind is not PassKind.INPUT:
            del self._chunks[one.stage, one.microbatch]

    def _drop(self, group: _Group) -> None:
        """Let the graph of a group go, and its memory unless a copy still reads it."""
        group.is_alive = False
        num_bytes = 0 if group.is_in_window else group.num_bytes
        self.writer.count_device(-group.work.kept_bytes - num_bytes)

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
    works: tuple[GroupWork, ...], position: int, budget: DeviceBudget
) -> Iterator[_Group]:
    """Yield a chunk's groups as its forward comes to them; marked ones are numbered."""
    order = 0
    for work in works:
        yield _Group(GroupKey(position, order if work.is_marked else -1), work, budget)
        order += work.is_marked


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
