"""Which group comes back next, and how far ahead.

Owns the predicted order of group backwards. Must not know streams or tensors: it looks at groups'
states and asks for moves, so that the engine and the simulator of a step run the same code.

What backward has been in and may come to once more, as where a schedule takes the gradients of
inputs and of weights in two passes, stays where it is and counts for nothing here: the budget is
for what is ahead.

Order is only a hint. A wrong prediction costs a late reload or an idle byte, never correctness.

Invariant: what comes back is near, in place, and within the budget.
Read next: `megatron_offload.engine.manager`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.core.states import GroupState

__all__ = ["Prefetcher"]


class _Keyed(Protocol):
    @property
    def key(self) -> GroupKey: ...


class _Chunk(Protocol):
    @property
    def committed(self) -> Sequence[_Keyed]: ...


class _Group(_Keyed, Protocol):
    """What a group has to tell, and to let do."""

    num_bytes: int
    held_bytes: int

    @property
    def state(self) -> GroupState: ...
    @property
    def chunk(self) -> _Chunk: ...
    def hold(self) -> None: ...
    def let_go(self) -> None: ...


Group = TypeVar("Group", bound=_Group)
_Moved = TypeVar("_Moved", contravariant=True)


class _Transfers(Protocol[_Moved]):
    """Who brings groups back; see `megatron_offload.engine.transfers.Transfers`."""

    def reload(self, group: _Moved, *, may_fail: bool = False) -> bool: ...


class _Window(Protocol[_Moved]):
    """Who holds what leaves; see `megatron_offload.engine.window.InFlightWindow`."""

    @property
    def step_bytes(self) -> int: ...
    def release_over_budget(self) -> None: ...
    def keep_resident(self, group: _Moved) -> None: ...


class Prefetcher(Generic[Group]):
    """Reloads groups along the order in which the last such step needed them.

    Nothing comes back before it is *near*: within so many bytes of passed groups, forward and
    backward, of its use. What comes back earlier only takes room that copies to the host could use.

    Args:
        transfers: what really copies.
        window: what is in flight to the host, and the step's clock.
        budget: how much may be held, and how much lies in between when a group is near.
    """

    def __init__(
        self, transfers: _Transfers[Group], window: _Window[Group], budget: DeviceBudget
    ) -> None:
        self.transfers = transfers
        self.window = window
        self.budget = budget
        self.backward_order: list[GroupKey] = []
        """The order seen in this step so far."""
        self.backward_at_bytes: list[int] = []
        """By the step's clock; see `StepProfile`."""
        self._groups: dict[GroupKey, Group] = {}
        self._in_use: Group | None = None
        self._profile: StepProfile | None = None
        self._learned: tuple[GroupKey, ...] = ()
        self._learned_position: dict[GroupKey, int] = {}
        self._order: Sequence[GroupKey] = ()
        self._position: dict[GroupKey, int] = {}
        self._bytes_before: list[int] = []
        self._needed_at_bytes: dict[GroupKey, int] = {}
        self._reached_at_bytes = 0
        self._next = 0

    def begin_step(self, profile: StepProfile | None) -> None:
        """Forget the last step and predict along ``profile``, if there is one."""
        for group in self._groups.values():
            group.held_bytes = 0
        self._groups.clear()
        self._in_use = None
        self._reached_at_bytes = 0
        self.backward_order = []
        self.backward_at_bytes = []
        if profile is not None and profile is self._profile:
            # As the last step, so what was made of it is right still.
            self._order, self._position, self._next = self._learned, self._learned_position, 0
            return
        self._profile = profile
        self._follow(profile.backward_order if profile is not None else ())
        self._learned, self._learned_position = tuple(self._order), self._position
        num_bytes = {g.key: g.num_bytes for g in profile.groups} if profile is not None else {}
        self._bytes_before = [0]
        for key in self._order:
            self._bytes_before.append(self._bytes_before[-1] + num_bytes.get(key, 0))
        at_bytes = profile.backward_at_bytes if profile is not None else ()
        self._needed_at_bytes = dict(zip(self._order, at_bytes, strict=False))

    def register(self, group: Group) -> None:
        """Take note of a group whose forward has begun."""
        self._groups[group.key] = group

    def knows(self, group: Group) -> bool:
        """Whether the group belongs to this step; graphs may outlive theirs."""
        return self._groups.get(group.key) is group

    def groups(self) -> Iterable[Group]:
        """Return all groups of this step."""
        return self._groups.values()

    def is_needed_soon(self, group: Group) -> bool:
        """Whether the group would have to come back at once if it were offloaded now.

        True where it is near, and it and all that backward needs before it fit into the budget.
        """
        if not self._follows_learned():
            return False
        position = self._position.get(group.key)
        if position is None or position < self._next:
            return position is not None
        ahead_bytes = self._bytes_before[position] - self._bytes_before[self._next]
        near = self._is_near(group.key, self.budget.total_bytes)
        return near and self.budget.may_stay(ahead_bytes + group.num_bytes)

    def enter_backward(self, group: Group) -> bool:
        """Backward has reached the end of ``group``: its data is needed from here on.

        Returns:
            Whether what comes next is another than it was, or has more room.
        """
        behind, self._in_use = self._in_use, group
        has_more_room = behind is not None and behind.held_bytes > 0
        if behind is not None:
            behind.let_go()
        self.backward_order.append(group.key)
        self.backward_at_bytes.append(self.window.step_bytes)
        if group.key not in self._position:
            self._follow([other.key for other in reversed(group.chunk.committed)])
        position = self._position.get(group.key)
        if position is None:
            return has_more_room
        was_foreseen = position < self._next and group.state is not GroupState.ON_HOST
        if was_foreseen:
            self._reached_at_bytes = self._needed_at_bytes.get(group.key, 0)
        else:
            self._next = position + 1
        return has_more_room or not was_foreseen

    def advance(self) -> None:
        """Bring back along the order what is near, while the budget lasts."""
        order = self._order
        groups = self._groups
        while self._next < len(order):
            key = order[self._next]
            group = groups.get(key)
            if group is None or group.state is GroupState.RECORDING:
                return  # its forward is still to come; nothing behind it is needed sooner
            state = group.state
            if state is GroupState.ON_HOST or state is GroupState.OFFLOADING:
                budget = self.budget
                if order is self._learned and not self._is_near(key, budget.lookahead_bytes):
                    return
                if state is GroupState.OFFLOADING:  # staying takes no more room
                    if not budget.may_stay(group.num_bytes):
                        return
                    self.window.keep_resident(group)
                    group.hold()
                else:
                    if not budget.may_prefetch(group.num_bytes):
                        return
                    group.hold()
                    if budget.is_exceeded():
                        self.window.release_over_budget()
                    if not self.transfers.reload(group, may_fail=True):
                        group.let_go()
                        return  # the next boundary tries again
            self._next += 1

    def _follows_learned(self) -> bool:
        """Whether this step has gone the way of the last so far."""
        return self._order is self._learned

    def _is_near(self, key: GroupKey, distance_bytes: int) -> bool:
        needed_at_bytes = self._needed_at_bytes.get(key)
        if needed_at_bytes is None:
            return True
        # Where backward is tells more than the clock, which sizes that differ can put back.
        now_bytes = max(self.window.step_bytes, self._reached_at_bytes)
        return needed_at_bytes - now_bytes <= distance_bytes

    def _follow(self, order: Sequence[GroupKey]) -> None:
        self._order = tuple(order)
        self._position = {key: index for index, key in enumerate(self._order)}
        self._next = 0
