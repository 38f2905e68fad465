"""What the engine does in a steady step on one rank, call by call: no times, only the order.

`core.step.StepDecisions` decides here as in the engine, over the passes of a schedule; what it asks
for is written down. So what moves, where the compute stream waits, and every peak of memory follow
from here, whatever the copies cost; `megatron_offload.planning.streams` adds the times.

What a split backward needs stays until its part for weights has run, although the engine has left
the group by then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.core.step import StepDecisions
from megatron_offload.planning.job import Job, RankSettings
from megatron_offload.planning.pending import PendingMessages
from megatron_offload.planning.program import (
    OpKind,
    ProgramWriter,
    RankProgram,
    WorkGroup,
    message_of,
)
from megatron_offload.planning.schedule import Pass, PassKind


class _Replay:
    """One rank's step, pass by pass."""

    def __init__(self, job: Job, rank: int, settings: RankSettings, records: bool) -> None:
        self._job = job
        self._settings = settings
        self._passes = job.schedule.ranks[rank]
        self._own_stages = frozenset(job.schedule.stages_of(rank))
        self._chunks: dict[tuple[int, int], list[WorkGroup]] = {}
        self._num_chunks = 0
        self._has_gone_back = False
        self._budget = DeviceBudget(settings.max_inflight_bytes, settings.prefetch_bytes)
        self._pending = PendingMessages(job, rank)
        self._writer = ProgramWriter(
            job.static_bytes[rank], self._budget, self._pending, records=records
        )
        self._decisions = StepDecisions(self._writer, self._writer.window, self._budget)
        if settings.offloads:
            profile = step_profile(job, rank, self._budget, settings.kept)
            self._budget.warmup_extra_bytes = settings.warmup_extra_bytes
            self._decisions.begin_step(profile, settings.residents)

    def run(self) -> RankProgram:
        asked = _asked_ahead(self._passes)
        for one in self._passes:
            self._has_gone_back |= one.kind is not PassKind.FORWARD
            self._exchange(OpKind.RECEIVE, one)
            if one in asked:
                self._exchange(OpKind.ASK, asked[one])
            if one.kind is PassKind.FORWARD:
                self._forward(one)
            else:
                self._backward(one)
            self._exchange(OpKind.SEND, one)
            self._pending.add_pass(one)
        return self._writer.finish(self._settings.host_slab_bytes)

    def _forward(self, one: Pass) -> None:
        stage = self._job.stages[one.stage]
        chunk = self._chunks[one.stage, one.microbatch] = []
        order = 0
        for work in stage.groups:
            key = GroupKey(self._num_chunks, order if work.is_marked else -1)
            group = WorkGroup(key, work, self._budget)
            chunk.append(group)
            order += work.is_marked
            if not work.is_marked or not self._settings.offloads:
                self._writer.forward(group, stage.buffer_bytes)
                continue
            self._decisions.start(group)
            self._writer.forward(group, stage.buffer_bytes)
            is_kept = key in self._settings.kept
            self._decisions.commit(group, "the plan keeps it" if is_kept else "")
        self._num_chunks += order > 0

    def _backward(self, one: Pass) -> None:
        stage = self._job.stages[one.stage]
        for group in reversed(self._chunks[one.stage, one.microbatch]):
            work = group.work
            us = work.backward_us
            if one.kind is PassKind.WEIGHT:
                us = work.weight_us
            elif one.kind is PassKind.INPUT:
                us -= work.weight_us
            is_seen = work.is_marked and self._settings.offloads
            is_seen &= one.kind is not PassKind.WEIGHT
            if is_seen:
                self._decisions.enter_backward(group)
                self._writer.await_reload(group)
            is_last = one.kind is not PassKind.INPUT
            self._writer.backward(group, us, stage.buffer_bytes, is_last=is_last)
            if is_seen:
                self._decisions.leave_backward(group)
        if one.kind is not PassKind.INPUT:
            del self._chunks[one.stage, one.microbatch]

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
            self._writer.add(kind, message_of(sender, num_stages))


def _asked_ahead(passes: Sequence[Pass]) -> dict[Pass, Pass]:
    """Return the forwards at whose begin a rank asks for the input of another, and of which.

    It is that of the next forward, from the last one before the first backward on.
    """
    is_back = [one.kind is not PassKind.FORWARD for one in passes]
    first_back = is_back.index(True) if True in is_back else len(passes)
    forwards = [one for one in passes if one.kind is PassKind.FORWARD]
    return dict(pairwise(forwards[max(0, first_back - 1) :]))


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


def replay(job: Job, rank: int, settings: RankSettings, *, records: bool = False) -> RankProgram:
    """Return what one rank's streams do in a steady step.

    Args:
        job: the step.
        rank: pipeline rank.
        settings: what the rank keeps and may hold.
        records: keep labels, and memory over the program.
    """
    return _Replay(job, rank, settings, records).run()
