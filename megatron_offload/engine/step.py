"""One training step as it runs: what its groups have, what was decided about them, what it showed.

Boundaries of groups, and autograd's hooks behind them, enter the engine here.

Invariant: a group counts against the budget while it belongs to this step, and no longer; graphs
may outlive their step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from weakref import ref

from megatron_offload.core.group import DONE, RECORDING
from megatron_offload.core.step import StepDecisions
from megatron_offload.engine.block_state import RELOADED
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.guard import guarded
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.stats import StepStats
from megatron_offload.engine.transfers import Transfers
from megatron_offload.errors import StateError

_MOST_CHUNKS = 1024
"""A step of more chunks than this ends by itself as soon as the last one's graph is gone: one that
something keeps alive for good would else let it grow for ever."""

_MOST_BEHIND = 64
"""A graph that is alive behind so many forwards, none of which has one, is kept for good."""

_CAPTURED_TOO_EARLY = (
    "a step was captured into a graph while it is looked at: trace and check others; "
    "where a plan is looked for, take some 50 steps before (cuda_graph_warmup_steps), or set "
    "policy: modules"
)
_NO_END = (
    "%d forwards and no end of a step, so nothing was learned from them: take each training step "
    "inside `with manager.step():`, or call reset() after it; where a context finds steps itself, "
    "let go of losses that no backward has used up. This is said once"
)
_NO_COMMIT = (
    "nothing is offloaded of groups that are started and never committed, as %s in this step: give "
    "group_commit() the name that group_start() was given. This is said once"
)

_logger = logging.getLogger(__name__)


class Step(StepDecisions[OffloadGroup]):
    """The step of one manager; `begin` makes the next.

    Attributes:
        chunk: the one whose forward runs, if any.
        entered: the chunks that have groups, in order.
        delayed: groups whose commits were put off.
        last: counters of the last one that is finished.
        last_call: the last call of this step whose inside is recomputed: there may be no groups
            besides.
    """

    last: StepStats | None = None
    last_call: ref[object] | None = None
    _is_held = False
    """Whether graphs hold memory as it ends, which are to be named."""

    def __init__(self, transfers: Transfers, learner: Learner) -> None:
        super().__init__(transfers, transfers.window, transfers.budget)
        self.guard = transfers.guard
        self._transfers = transfers
        self._observers = transfers.observers
        self._learner = learner
        self.chunk: ChunkOffloadHandler | None = None
        self.entered: list[ChunkOffloadHandler] = []
        self.delayed: list[OffloadGroup] = []

    def begin(self) -> None:
        """Forget the last step's groups and count from zero."""
        self.chunk, self.last_call, self._is_held = None, None, False
        for chunk in self.entered:
            chunk.groups.clear()
            chunk.open_groups.clear()
            chunk.recipes.clear()
        self.entered.clear()
        self.delayed.clear()
        for group in self.groups():
            if group.unhook is not None and not group.blocks():
                group.unhook()
            if group.dropped_bytes:
                self._transfers.count_recomputed(group)
        self._transfers.begin_step()
        self._recorded_bytes = 0
        self.begin_step(self._learner.profile)

    def enter(self, chunk: ChunkOffloadHandler) -> None:
        """Take a chunk in; let limits forget those whose graphs have gone without a backward."""
        for other in self.entered:
            groups = other.groups if other.saved_bytes else ()
            is_gone = groups and not any(one.state is DONE or one.blocks() for one in groups)
            if is_gone and all(key.chunk != other.position for key in self.backward_order):
                self.budget.drop_saved(other.saved_bytes)
                self._recorded_bytes -= sum(group.recorded_bytes for group in groups)
                other.saved_bytes = 0
        chunk.position = len(self.entered)
        self.entered.append(chunk)

    def is_idle(self) -> bool:
        """Whether no graph is left, and nothing saved."""
        return all(found() is None for one in self.groups() for found in one.references)

    def is_over(self) -> bool:
        """Whether the chunk that is entered next is of another step.

        Forwards that are over without any backward (an evaluation with grad on) are no part of the
        step: they would shift the positions of all that follows. And a program that never calls
        `reset` gets a new step now and then, so that nothing grows for ever.
        """
        if len(self.entered) >= _MOST_CHUNKS:
            return not any(group.blocks() for group in self.entered[-1].groups)
        return bool(self.committed) and not self.backward_order and self.is_idle()

    def is_left(self) -> bool:
        """Whether its groups were committed, and no graph is left that isn't kept for good."""
        call = self.last_call
        has_begun = bool(self.committed) or call is not None
        is_idle = has_begun and self.is_idle()
        is_held = has_begun and not is_idle and len(self.entered) > _MOST_BEHIND
        recent = reversed(self.entered[-_MOST_BEHIND:]) if is_held else ()
        self._is_held = is_held and not any(x.blocks() for chunk in recent for x in chunk.groups)
        return (is_idle or self._is_held) and (call is None or call() is None)

    def end_unasked(self) -> None:
        """Finish it, as the program doesn't; only forwards show nothing."""
        if self.backward_order:
            self._transfers.warn_once(_NO_END, len(self.entered))
            self.finish()

    def finish(self, *, names_leaks: bool = False, is_looked_at: bool = False) -> None:
        """Release what is in flight, count, and learn; may warn of what holds memory.

        Raises:
            StateError: it was captured into a graph although it ``is_looked_at``.
        """
        is_captured = self._transfers.backend.is_capturing()
        if is_captured and is_looked_at and self.committed:
            raise StateError(_CAPTURED_TOO_EARLY)
        names = {group.name for chunk in self.entered for group in chunk.open_groups}
        if names:
            self._transfers.warn_once(_NO_COMMIT, ", ".join(map(repr, sorted(names))))
        self.window.drain()
        self.last = stats = self._transfers.counted()
        if names_leaks or self._is_held:
            stats.leaks = _leaks_of(self.groups())
            if stats.leaks:
                found = "\n".join(stats.leaks)
                _logger.warning("the step has ended and graphs still hold memory:\n%s", found)
        stats.is_captured = is_captured
        if is_captured and self.committed:  # else an evaluation
            self._transfers.wait_reloads(self.committed)  # of what is unread too
            self._transfers.host_pool.leave_to_graph()  # it gets what its copies use
        elif self.backward_order and not is_captured:
            self._learner.learn(self.profile())

    # Boundaries

    @guarded
    def commit_group(self, group: OffloadGroup, delay: bool = False) -> None:
        """Decide about a closed group and issue its copies, or leave that to a flush."""
        for observer in self._observers:
            observer.group_commits(group)
        if delay:
            self.delayed.append(group)
        else:
            self._commit(group)
        for observer in self._observers:
            observer.boundary_passed(group)

    def _commit(self, group: OffloadGroup) -> None:
        transfers = self._transfers
        if group.pick is not None:
            group.pick.choose(group)
        transfers.measure(group)
        number = group.key.chunk
        if -1 < number < len(self.entered):
            self.entered[number].saved_bytes += group.clock_bytes
        stats = transfers.stats
        stats.by_name[group.name].num_groups += 1
        self._recorded_bytes += group.recorded_bytes
        stats.peak_recorded_bytes = max(stats.peak_recorded_bytes, self._recorded_bytes)
        keep_reason = self._learner.reason_to_keep(group)
        if group.forced and not keep_reason:  # of which each block has some, or none
            for block in group.blocks():
                block.forced_by += group.forced
        self.commit(group, keep_reason, must_move=group.rules.should_offload is not None)

    def flush_delayed_groups(self) -> None:
        """Issue the copies of all groups that were put off, in the order of their commits."""
        delayed, self.delayed = self.delayed, []
        for group in delayed:
            if group.state is RECORDING:
                self.commit_group(group)

    @guarded
    def enter_backward(self, group: OffloadGroup, grads: object = None) -> None:
        """Backward has reached a group's end: reload it if need be, and look ahead.

        ``grads`` are what autograd hands a hook.
        """
        chunk = self.chunk
        if chunk is not None and chunk.position == group.key.chunk:
            chunk.recipes.clear()  # its forward is over, and they may keep what is reloaded
        for observer in self._observers:
            observer.backward_enters(group)
        if group.dropped_bytes:
            self._transfers.count_recomputed(group)
        super().enter_backward(group)
        self._transfers.learn_owners(group)
        for observer in self._observers:
            observer.boundary_passed(group)

    @guarded
    def leave_backward(self, group: OffloadGroup, grad: object = None) -> None:
        """Backward has left a group, unless it came from inside its forward and will come again."""
        if group.state is RECORDING and group not in self.delayed:
            return
        for observer in self._observers:
            observer.backward_leaves(group)
        if group.unhook is not None:
            group.unhook()
        if group.state is not DONE and self.knows(group):
            self._recorded_bytes -= group.recorded_bytes
        super().leave_backward(group)
        for observer in self._observers:
            observer.boundary_passed(group)

    @guarded
    def tick(self, num_bytes: int, is_backward: bool = False) -> bool:
        """As there."""
        counts = super().tick(num_bytes, is_backward)
        if counts and not is_backward and self.chunk is not None:
            self.chunk.saved_bytes += num_bytes
        return counts


def _leaks_of(groups: Iterable[OffloadGroup]) -> tuple[str, ...]:
    """Describe the groups that still hold memory: some graph of the step is alive."""
    found = []
    for group in groups:
        blocks = group.blocks()
        host_bytes = sum(block.num_bytes for block in blocks if block.host is not None)
        device_bytes = sum(block.num_bytes for block in blocks if block.state is RELOADED)
        if host_bytes or device_bytes:
            left = "backward has left it" if group.state is DONE else group.state.name
            found.append(
                f"{group.label}: {host_bytes} bytes on the host, {device_bytes} reloaded ({left})"
            )
    return tuple(found)
