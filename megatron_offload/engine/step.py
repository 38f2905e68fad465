"""One training step as it runs: what its groups have, what was decided about them, what it showed.

Invariant: a group counts against the budget while it belongs to this step, and no longer; graphs
may outlive theirs.
"""

from __future__ import annotations

import logging

from megatron_offload.core.group import DONE
from megatron_offload.core.joining import Joining, Started, joined_groups
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile, merge_units
from megatron_offload.core.step import StepDecisions
from megatron_offload.engine.checking import leaks_of
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.stats import StepStats
from megatron_offload.engine.transfers import Transfers

_logger = logging.getLogger(__name__)


class Step(StepDecisions[OffloadGroup]):
    """The step of one manager; `begin` makes the next."""

    def __init__(self, transfers: Transfers, learner: Learner) -> None:
        super().__init__(transfers, transfers.window, transfers.budget)
        self._transfers = transfers
        self._learner = learner

    def begin(self) -> None:
        """Forget the last step's groups and count from zero."""
        for group in self.groups():
            if group.leaf_hook is not None and not group.blocks():
                group.unhook()
            self._transfers.count_remade(group)
        self._transfers.begin_step()
        self.begin_step(self._learner.profile)
        self.joining: Joining = {}
        self.num_joined = 0
        """Groups that were recorded as one with one before."""
        self.waiting: OffloadGroup | None = None
        """One that goes on with the next that starts."""
        self.joined: OffloadGroup | None = None
        """One that others are recorded with, or may be; open, or waiting."""
        self._was_cut = False
        self._ends: set[GroupKey] = set()

    def is_idle(self) -> bool:
        """Whether no graph is left, and nothing saved."""
        groups = list(self.groups())  # another thread may ask, and be refused
        return not any(group.blocks() for group in groups)

    def finish(self, *, names_leaks: bool) -> StepStats:
        """Release what is in flight and return the counters; may warn of what holds memory."""
        self.commit_waiting()
        self.window.drain()
        for group in self.passed.values():
            by_name = self._transfers.stats.by_name[group.name]
            by_name.num_groups += 1
            num_bytes = group.num_bytes - group.shared_bytes
            by_name.keep(num_bytes, self._learner.kept.get(group.key, ""))
        stats = self._transfers.counted()
        if names_leaks:
            stats.leaks = leaks_of(self.groups())
            if stats.leaks:
                found = "\n".join(stats.leaks)
                _logger.warning("the step has ended and memory is still held:\n%s", found)
        return stats

    def abandon(self) -> None:
        """Take everything from the groups: after a failed step."""
        self._transfers.abandon(self.groups())
        for group in self.groups():
            if group.state is not DONE:
                group.advance(DONE)

    def profile(self) -> StepProfile:
        """Return what the step has shown."""
        groups = (
            GroupProfile(
                *(g.key, g.name, g.num_bytes, g.committed_at_bytes, g.elsewhere_bytes),
                shared_bytes=g.shared_bytes,
                remade=merge_units(g.remade),
            )
            for g in self.committed
        )
        order, at_bytes = tuple(self.backward_order), tuple(self.backward_at_bytes)
        return StepProfile(tuple(groups), order, at_bytes)

    def is_other(self) -> bool:
        """Whether a step that was not recorded whole has other groups than the learned one."""
        known = self._learner.profile
        if self.is_whole or self._was_cut or known is None:
            return self._was_cut or not self.is_whole
        names = {group.key: group.name for group in known.groups}
        is_other = any(names.get(group.key) != group.name for group in self.committed)
        num_groups = len(self.committed) + len(self.passed) + self.num_joined
        return is_other or len(names) != num_groups

    @property
    def is_whole(self) -> bool:
        """Whether each group was recorded, and by itself."""
        return not (self.passed or self.num_joined)

    # Groups that are recorded as one

    def joinable(self) -> Joining:
        """Return `joining` for steps like this one, of which none were."""
        started = []
        for group in self._groups.values():
            remade_bytes = sum(unit.num_bytes for unit in group.remade if unit.is_remade)
            num_bytes = group.num_bytes + remade_bytes
            started.append(
                Started(group.key, group.name, num_bytes, group.is_inside, group.may_join)
            )
        return joined_groups(started, self._ends, self.budget.joined_bytes)

    def started(self, group: OffloadGroup) -> None:
        """Note a group of boundaries, with which others may be recorded as one."""
        group.may_join = True
        if group.key in self.joining and not group.is_inside:
            self.joined, group.last_key = group, group.key
            group.parts = [(group.name, group.key)]

    def goes_on(self, key: GroupKey, name: str, around: OffloadGroup | None) -> OffloadGroup | None:
        """Return the group that started last, where what starts now is recorded as one with it.

        That is ``around`` it, or nothing that is recorded is.
        """
        group = self.joined
        if group is None or group.parts is None:
            return None
        if self.joining.get(group.last_key) != (key, name):
            return None
        if around is not None and around is not group and not around.passes_by:
            return None
        if group is self.waiting:
            self._count(group)
            self.waiting, group.key = None, key
        group.parts.append((name, key))
        group.name, group.last_key = name, key
        self._groups[key] = group
        self.num_joined += 1
        return group

    def ends_part(self, group: OffloadGroup) -> bool:
        """Take note of the end of a group that is recorded with others; whether they go on."""
        assert group.parts
        _, key = group.parts.pop()
        group.first_key = group.first_key or key
        goes_on = bool(group.parts)
        if goes_on:
            self._count(group)
            group.name = group.parts[-1][0]
        elif group.last_key in self.joining and self.waiting is None:
            goes_on, self.waiting = True, group
        else:
            self.joined = None
        return goes_on

    def commit_waiting(self) -> None:
        """Decide about what waits for more; where that is not what was learned, it is cut off."""
        if self._groups:
            self._ends.add(next(reversed(self._groups)))
        group, self.waiting = self.waiting, None
        if group is not None:
            self.joined, self._was_cut = None, True
            self.commit_group(group, "")

    def _count(self, group: OffloadGroup) -> None:
        self._transfers.stats.by_name[group.name].num_groups += 1

    # Boundaries

    def commit_group(
        self, group: OffloadGroup, stays_because: str, *, must_move: bool = False
    ) -> None:
        """Decide about a group whose forward is over, and issue its copies."""
        transfers = self._transfers
        transfers.measure(group, may_drop=not stays_because)
        self._count(group)
        if must_move:
            stays_because = ""
        elif not stays_because:
            stays_because = self._learner.keeps_because(group)
        if group.forced and not stays_because:
            self._force(group)
        rules = group.rules
        must_move = must_move or rules.should_offload is not None
        is_bound = (rules.max_inflight_groups, rules.max_inflight_blocks) != (None, None)
        if stays_because or must_move or is_bound or group.elsewhere_bytes:
            group.may_join = False
        self.commit(group, stays_because, must_move=must_move)

    def _force(self, group: OffloadGroup) -> None:
        """Let the storage of ``group.forced`` be emptied where a group that moves it is released.

        That is if it is copied, and no other tensor has it.
        """
        tensors = [tensor for forced in group.forced if (tensor := forced()) is not None]
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        for block in group.blocks():
            if block.storage_key in keys and not block.released:
                block.forced_by = group.forced
                if block.is_before_copy:
                    block.mover = group

    def enter_backward(self, group: OffloadGroup) -> None:
        """Backward has reached a group's end: bring it back if no one did, and look ahead."""
        self._transfers.count_remade(group)
        self.commit_waiting()
        super().enter_backward(group)
        if group.first_key is None:  # it knows them by their places in groups
            self._transfers.owners.learn(group)

    def leave_backward(self, group: OffloadGroup) -> None:
        """Backward has left a group."""
        if group.leaf_hook is not None:
            group.unhook()
        if group is self.waiting:
            self.commit_waiting()
        super().leave_backward(group)
