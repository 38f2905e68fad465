"""One training step as it runs: what its groups have, what was decided about them, what it showed.

Invariant: a group counts against the budget while it belongs to this step, and no longer; graphs
may outlive theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import pairwise
from weakref import ref

import torch

from megatron_offload.core.group import DONE
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile, merge_units
from megatron_offload.core.step import StepDecisions
from megatron_offload.engine.checking import leaks_of
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.stats import StepStats
from megatron_offload.engine.transfers import Transfers

_logger = logging.getLogger(__name__)

_TOO_SMALL = "smaller than what moves (min_tensor_bytes, min_tensor_elements)"


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
        self.joining: Mapping[GroupKey, tuple[GroupKey, str]] = {}
        """Of groups that are recorded as one with the next of their batch, what that is."""
        self.num_joined = 0
        self.waiting: OffloadGroup | None = None
        """One whose next is to come."""
        self._was_cut = False

    def is_idle(self) -> bool:
        """Whether no graph is left, and nothing saved."""
        groups = list(self.groups())  # another thread may ask, and be refused
        return not any(group.blocks() for group in groups)

    def finish(self, *, names_leaks: bool) -> StepStats:
        """Release what is in flight and return the counters; may warn of what holds memory."""
        self.complete_batch()
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
        """Whether groups have passed by in a step that has other groups than the learned one."""
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

    # Batches that are recorded as one group

    def joinable(self) -> dict[GroupKey, tuple[GroupKey, str]]:
        """Return `joining` for steps like this one: what is dropped to be made again ends one."""
        return {
            one.key: (other.key, other.name)
            for one, other in pairwise(self._groups.values())
            if one.may_join
            and other.may_join
            and (one.lead or one) is (other.lead or other)
            and not (one.elsewhere_bytes or other.elsewhere_bytes)
            and not any(unit.is_remade for unit in one.remade)
        }

    def waits(self, group: OffloadGroup) -> bool:
        """Let a group whose forward is over wait for the next of its batch, if that is to join."""
        if group.key not in self.joining or self.waiting is not None:
            return False
        group.is_pending, self.waiting = True, group
        return True

    def goes_on(self, chunk: ChunkOffloadHandler, name: str) -> bool:
        """Whether what starts now is the next of the group that waits, which goes on as that."""
        group = self.waiting
        if group is None:
            return False
        key, expected = self.joining[group.key]
        if name != expected or (chunk.position, chunk.num_groups) != key:
            return False
        self._count(group)
        self.waiting, group.is_pending = None, False
        group.first_key = group.first_key or group.key
        group.key, group.name = key, name
        self._groups[key] = group
        self.num_joined += 1
        chunk.num_groups += 1
        chunk.open_groups.append(group)
        return True

    def complete_batch(self) -> None:
        """Decide about what waits for more, if it is not what was learned that comes."""
        group, self.waiting = self.waiting, None
        if group is not None:
            group.is_pending, self._was_cut = False, True
            self.commit_group(group, (), "")
        super().complete_batch()

    def _count(self, group: OffloadGroup) -> None:
        """Count a group under its name, and what of it is too small."""
        stats = self._transfers.stats.by_name[group.name]
        stats.num_groups += 1
        if group.small_bytes:
            stats.keep(group.small_bytes, _TOO_SMALL)
            group.small_bytes = 0

    # Boundaries

    def commit_group(
        self,
        group: OffloadGroup,
        forced_released_tensors: Iterable[torch.Tensor],
        stays_because: str,
        *,
        must_move: bool = False,
    ) -> None:
        """Decide about a group whose forward is over, and issue its copies.

        The storage of ``forced_released_tensors`` is emptied at the release, if it is copied and
        no other tensor has it.
        """
        transfers = self._transfers
        if forced_released_tensors:
            self.complete_batch()  # whose copies count here
        transfers.measure(group, may_drop=not stays_because)
        self._count(group)
        if must_move:
            stays_because = ""
        elif not stays_because:
            stays_because = self._learner.keeps_because(group)
        named = () if stays_because else tuple(map(ref, forced_released_tensors))
        forced = []
        if named:
            keys = {tensor.untyped_storage()._cdata for tensor in forced_released_tensors}
            forced = [b for b in group.blocks() if b.storage_key in keys and not b.released]
        for block in forced:
            block.forced_by = named
        rules = group.rules
        must_move = must_move or rules.should_offload is not None
        most_inflight = rules.max_inflight_groups, rules.max_inflight_blocks
        is_alone = most_inflight != (None, None) or bool(forced)
        self.commit(group, stays_because, must_move=must_move, is_alone=is_alone)
        for block in forced:
            if block.flight is None:  # it stays, whoever moves it later
                block.forced_by = ()

    def enter_backward(self, group: OffloadGroup) -> None:
        """Backward has reached a group's end: bring it back if no one did, and look ahead."""
        self._transfers.count_remade(group)
        super().enter_backward(group)
        if group.first_key is None:  # it knows them by their places in groups
            self._transfers.owners.learn(group)

    def leave_backward(self, group: OffloadGroup) -> None:
        """Backward has left a group."""
        if group.leaf_hook is not None:
            group.unhook()
        super().leave_backward(group)
