"""Which group comes back next, and how far ahead.

Owns the predicted order of group backwards and the budget of bytes that are reloaded and not yet
consumed. Must not know streams or tensors: it looks at groups' states and asks `Transfers` to move.

Order is only a hint. A wrong prediction costs a late reload or an idle byte, never correctness.

Invariant: ``held_bytes`` is the sum over groups of what each holds of the budget.
Read next: `megatron_offload.engine.manager`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.transfers import Transfers
from megatron_offload.planning.profile import GroupKey, StepProfile

__all__ = ["Prefetcher"]


class Prefetcher:
    """Reloads groups along the order in which the last such step needed them.

    Args:
        transfers: what really copies.
        budget_bytes: most bytes reloaded and not yet consumed; one group is always allowed.
    """

    def __init__(self, transfers: Transfers, *, budget_bytes: int) -> None:
        self.transfers = transfers
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.backward_order: list[GroupKey] = []
        """The order seen in this step so far."""
        self._groups: dict[GroupKey, OffloadGroup] = {}
        self._learned: tuple[GroupKey, ...] = ()
        self._order: Sequence[GroupKey] = ()
        self._position: dict[GroupKey, int] = {}
        self._bytes_before: list[int] = []
        self._next = 0
        self._holders: list[OffloadGroup] = []

    def begin_step(self, profile: StepProfile | None) -> None:
        """Forget the last step and predict along ``profile``, if there is one."""
        self._groups.clear()
        self._holders.clear()
        self.held_bytes = 0
        self.backward_order = []
        self._follow(profile.backward_order if profile is not None else ())
        self._learned = tuple(self._order)
        num_bytes = {g.key: g.num_bytes for g in profile.groups} if profile is not None else {}
        self._bytes_before = [0]
        for key in self._order:
            self._bytes_before.append(self._bytes_before[-1] + num_bytes.get(key, 0))

    def register(self, group: OffloadGroup) -> None:
        """Take note of a group whose forward has begun."""
        self._groups[group.key] = group

    def knows(self, group: OffloadGroup) -> bool:
        """Whether the group belongs to this step; graphs may outlive theirs."""
        return self._groups.get(group.key) is group

    def groups(self) -> Iterable[OffloadGroup]:
        """Return all groups of this step."""
        return self._groups.values()

    def is_needed_soon(self, group: OffloadGroup) -> bool:
        """Whether the group would be reloaded at once if it were offloaded now.

        True where everything that backward needs from here up to and with this group fits into the
        budget.
        """
        if self._order is not self._learned:
            return False
        position = self._position.get(group.key)
        if position is None or position < self._next:
            return position is not None
        ahead = self._bytes_before[position] - self._bytes_before[self._next]
        return self.held_bytes + ahead + group.num_bytes <= self.budget_bytes

    def enter_backward(self, group: OffloadGroup) -> None:
        """Backward has reached the end of ``group``: its data is needed from here on."""
        self.backward_order.append(group.key)
        if group.key not in self._position:
            self._follow([other.key for other in reversed(group.chunk.committed)])
        position = self._position.get(group.key)
        if position is not None:
            self._next = position + 1

    def leave_backward(self, group: OffloadGroup) -> None:
        """Backward has left ``group``: its bytes no longer count."""
        self.held_bytes -= group.held_bytes
        group.held_bytes = 0

    def advance(self) -> None:
        """Reload along the order while the budget lasts."""
        order = self._order
        while self._next < len(order):
            group = self._groups.get(order[self._next])
            if group is None or group.state is GroupState.RECORDING:
                return  # its forward is still to come; nothing behind it is needed sooner
            if group.state in (GroupState.ON_HOST, GroupState.OFFLOADING):
                if not self._may_hold(group):
                    return
                self.hold(group)
                if group.state is GroupState.ON_HOST:
                    self.transfers.reload(group)
                else:
                    keep_resident(group)
            self._next += 1

    def hold(self, group: OffloadGroup) -> None:
        """Count a group's bytes against the budget until backward has left it."""
        if group.held_bytes == 0:
            group.held_bytes = group.num_bytes
            self.held_bytes += group.num_bytes
            self._holders.append(group)

    def _may_hold(self, group: OffloadGroup) -> bool:
        if self.held_bytes == 0 or self.held_bytes + group.num_bytes <= self.budget_bytes:
            return True
        # Groups that no one needs any more must not block the budget: dropped graphs, and groups
        # whose start has no backward of its own.
        for holder in self._holders:
            if holder.held_bytes and next(holder.blocks(), None) is None:
                self.leave_backward(holder)
        self._holders = [holder for holder in self._holders if holder.held_bytes]
        return self.held_bytes == 0 or self.held_bytes + group.num_bytes <= self.budget_bytes

    def _follow(self, order: Sequence[GroupKey]) -> None:
        self._order = tuple(order)
        self._position = {key: index for index, key in enumerate(self._order)}
        self._next = 0


def keep_resident(group: OffloadGroup) -> None:
    """Cancel the release of a group whose copies are in flight."""
    for block in group.blocks():
        if block.d2h is not None and not block.cancelled and not block.released:
            group.transfers.cancel(block)
    group.advance(GroupState.RESIDENT)
