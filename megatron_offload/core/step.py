"""What is decided at the boundaries of groups: keep, offload, release, reload.

The engine and the simulator both run it; what is done about a decision, `Actions` does. It goes by
counts and by the order of the program alone, never by what a stream has already done, so every run
of a program decides alike.

Nothing is reloaded before it is *near*: within so many bytes of passed groups, forward and
backward, of its use by the order in which the last such step needed it. What is reloaded earlier
only takes room that copies to the host could use. That order is a hint: a wrong prediction costs a
late reload or an idle byte, never correctness.

What backward has been in and may come to once more, as where a schedule takes the gradients of
inputs and of weights in two passes, is kept and counts for nothing here: the budget is
for what is ahead.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import DONE, OFFLOADING, ON_HOST, RECORDING, RESIDENT, Group
from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.core.window import InFlightWindow

G = TypeVar("G", bound=Group)
_Acted = TypeVar("_Acted", bound=Group, contravariant=True)


class Actions(Protocol[_Acted]):
    """Who does what is decided, moves the group to its new state, and counts bytes in flight.

    The release of a group is the window's: `InFlightWindow` is given what does it.
    """

    def keep(self, group: _Acted, reason: str) -> None:
        """Leave a group whose forward is over on the device."""

    def offload(self, group: _Acted) -> None:
        """Issue a group's copies to the host and put it into the window."""

    def cancel(self, group: _Acted, *, is_late: bool) -> None:
        """Leave a group on the device whose copies are in flight.

        ``is_late`` says that backward has come to it already, so that they were for nothing.
        """

    def reload(self, group: _Acted, *, is_late: bool) -> bool:
        """Issue a group's copies back to the device; return whether they were issued.

        ``is_late`` says that backward has come to it already: else they may be left for later,
        where the device has no memory.
        """


class Forecast(NamedTuple):
    """In which order groups will be needed, if a step is as one that was seen to its end."""

    order: tuple[GroupKey, ...]
    position: dict[GroupKey, int]
    bytes_before: list[int]
    """Of all that come before each position."""
    needed_at_bytes: dict[GroupKey, int]
    """By the step's clock."""
    committed_at_bytes: dict[GroupKey, int]
    """Likewise."""


def forecast_of(profile: StepProfile) -> Forecast:
    """Return what a step foretells of the next."""
    groups = {group.key: (group.num_bytes, group.needs) for group in profile.groups}
    nothing: tuple[int, tuple[GroupKey, ...]] = (0, ())
    needs = {key: groups.get(key, nothing)[1] for key in profile.backward_order}
    # Each once, where its bytes are needed first.
    order = tuple(dict.fromkeys(one for key in needs for one in (*needs[key], key)))
    sizes = (groups.get(key, nothing)[0] for key in order)
    needed_at_bytes: dict[GroupKey, int] = {}
    for key, at_bytes in zip(profile.backward_order, profile.backward_at_bytes, strict=False):
        for needed in (*needs[key], key):
            needed_at_bytes.setdefault(needed, at_bytes)
    position = {key: index for index, key in enumerate(order)}
    committed_at_bytes = {group.key: group.committed_at_bytes for group in profile.groups}
    bytes_before = list(accumulate(sizes, initial=0))
    return Forecast(order, position, bytes_before, needed_at_bytes, committed_at_bytes)


class StepDecisions(Generic[G]):
    """Decides about one rank's groups, step by step.

    Args:
        actions: does what is decided.
        window: what is in flight to the host, and the step's clock.
        budget: how much may be held, and how much lies in between when a group is near.

    Attributes:
        committed: the groups whose forward is over, in order.
        backward_order: the groups that backward has reached, in order.
        backward_at_bytes: when that was, by the step's clock.
    """

    def __init__(self, actions: Actions[G], window: InFlightWindow[G], budget: DeviceBudget):
        self.window = window
        self.budget = budget
        self._actions = actions
        self._groups: dict[GroupKey, G] = {}
        self._profile: StepProfile | None = None
        self._foretold = forecast_of(StepProfile((), ()))
        self.begin_step(None)

    def begin_step(self, profile: StepProfile | None) -> None:
        """Forget the last step and predict along one that was seen to its end, if one was."""
        for group in self._groups.values():
            group.held_bytes = 0
        self._groups.clear()
        self.committed: list[G] = []
        self.backward_order: list[GroupKey] = []
        self.backward_at_bytes: list[int] = []
        self._in_use: G | None = None
        self._next = 0
        self._pace = 1.0
        self.window.begin_step()
        self.budget.begin_step(is_learned=profile is not None)
        if profile is not self._profile:
            self._foretold = forecast_of(profile or StepProfile((), ()))
        self._profile = profile
        self._forecast = self._foretold
        """What is followed, until backward comes to a group outside of it."""

    def start(self, group: G) -> None:
        """Take note of a group whose forward has begun."""
        self._groups[group.key] = group

    def knows(self, group: G) -> bool:
        """Whether the group belongs to this step; graphs may outlive their step."""
        return self._groups.get(group.key) is group

    def groups(self) -> list[G]:
        """Return all groups of this step."""
        return list(self._groups.values())

    def profile(self) -> StepProfile:
        """Return what the step has shown."""
        groups = tuple(group.profile for group in self.committed)
        return StepProfile(groups, tuple(self.backward_order), tuple(self.backward_at_bytes))

    # Boundaries

    def commit(self, group: G, keep_reason: str = "", *, must_move: bool = False) -> None:
        """Decide about a group whose forward is over.

        Args:
            group: with its bytes.
            keep_reason: why it was chosen to be kept; empty where it may be offloaded.
            must_move: offload it unless it was chosen to be kept, even where it is reloaded at
                once.
        """
        window, actions = self.window, self._actions
        num_bytes, clock_bytes = group.num_bytes, group.clock_bytes
        group.committed_at_bytes = window.step_bytes
        self._see_pace(self._forecast.committed_at_bytes.get(group.key, 0))
        self.committed.append(group)
        moving_bytes = 0 if keep_reason else num_bytes
        self.budget.add_saved(clock_bytes, moving_bytes, is_learned=self._profile is not None)
        if num_bytes == 0:
            group.advance(RESIDENT)
        elif keep_reason:
            actions.keep(group, keep_reason)
        elif must_move or not self.is_needed_soon(group):
            actions.offload(group)
        else:
            actions.keep(group, "needed too soon in backward")
            group.hold()
        window.pass_boundary(clock_bytes)
        self.look_ahead()

    def enter_backward(self, group: G) -> None:
        """Backward has reached the end of ``group``: its data is needed from here on."""
        has_moved = False
        if self.knows(group):
            self.budget.is_warming_up = False
            has_moved = self._reach(group)
            for needed in map(self._groups.get, group.needs):
                if needed is not None:
                    self._reload_late(needed)
        self._reload_late(group)
        if has_moved:
            self.look_ahead()

    def leave_backward(self, group: G) -> None:
        """Backward has left a group."""
        if group.state is not DONE:
            group.advance(DONE)
            if self.knows(group):
                group.let_go()
                clock_bytes = group.clock_bytes
                self.budget.drop_saved(clock_bytes)
                self.window.pass_boundary(clock_bytes)
        self.look_ahead()

    def tick(self, num_bytes: int, is_backward: bool = False) -> bool:
        """Let the clock go by what has no group: limits are as if it had one of this size.

        Returns:
            Whether it counts: a step begins with its first group.
        """
        if not self.committed:
            return False
        if is_backward:
            self.budget.drop_saved(num_bytes)
        else:
            self.budget.add_saved(num_bytes, 0, is_learned=self._profile is not None)
        self.window.pass_boundary(num_bytes)
        self.look_ahead()
        return True

    def _reload_late(self, group: G) -> None:
        """Let a group be on the device: backward needs it now."""
        if group.state is OFFLOADING:
            self._actions.cancel(group, is_late=True)
        elif group.state is ON_HOST:
            self._actions.reload(group, is_late=True)
            if self.knows(group):
                group.hold()

    # The order of backwards

    def _reach(self, group: G) -> bool:
        """Note where backward is; return whether what comes next is another, or has more room."""
        behind, self._in_use = self._in_use, group
        key = group.key
        self.backward_order.append(key)
        self.backward_at_bytes.append(self.window.step_bytes)
        has_more_room = behind is not None and behind.held_bytes > 0
        if behind is not None:
            behind.let_go()
        position = self._forecast.position.get(key)
        if position is None:
            # Not foreseen: the backwards of the chunk's groups are expected, from the last on.
            chunk = tuple(one.profile for one in self.committed if one.key.chunk == key.chunk)
            self._forecast = forecast_of(StepProfile(chunk, tuple(one.key for one in chunk[::-1])))
            self._next = 0
            position = self._forecast.position.get(key)
        if position is None:
            return has_more_room
        self._see_pace(self._forecast.needed_at_bytes.get(key, 0))
        was_foreseen = position < self._next and group.state is not ON_HOST
        if not was_foreseen:
            self._next = position + 1
        return has_more_room or not was_foreseen

    def is_needed_soon(self, group: G) -> bool:
        """Whether a group would have to be reloaded at once if it were offloaded now.

        True where it is near, and its bytes and all that backward needs before it fit into the
        budget.
        """
        position = self._forecast.position.get(group.key)
        if self._forecast is not self._foretold or position is None:
            return False
        if position < self._next:
            return True
        if not self._is_near(group.key, self.budget.total_bytes):
            return False
        before = self._forecast.bytes_before
        return self.budget.may_keep(before[position] - before[self._next] + group.num_bytes)

    def _is_near(self, key: GroupKey, distance_bytes: int) -> bool:
        needed_at_bytes = self._forecast.needed_at_bytes.get(key)
        if needed_at_bytes is None:
            return True
        return needed_at_bytes * self._pace - self.window.step_bytes <= distance_bytes

    def _see_pace(self, foreseen_at_bytes: int) -> None:
        """Compare the clock with what it was here in the step before: sizes may differ."""
        if foreseen_at_bytes > 0 and self.window.step_bytes > 0:
            self._pace = self.window.step_bytes / foreseen_at_bytes

    def look_ahead(self) -> None:
        """Reload along the order what is near, while the budget lasts."""
        order, groups, budget = self._forecast.order, self._groups, self.budget
        while self._next < len(order):
            group = groups.get(order[self._next])
            state = RECORDING if group is None else group.state
            if group is None or state is RECORDING:
                return  # its forward is still to come; nothing behind it is needed sooner
            if state is OFFLOADING or state is ON_HOST:
                if not self._is_near(group.key, budget.lookahead_bytes):
                    return
                if state is OFFLOADING:  # what is kept takes no more room
                    if not budget.may_keep(group.num_bytes):
                        return
                    self._actions.cancel(group, is_late=False)
                    group.hold()
                else:
                    if not budget.may_prefetch(group.num_bytes):
                        return
                    group.hold()
                    if budget.is_exceeded():
                        self.window.release_over_budget()
                    if not self._actions.reload(group, is_late=False):
                        group.let_go()
                        return  # the next boundary tries again
            self._next += 1
