"""A layer group as far as decisions go: where its tensors are, and what it counts for."""

from __future__ import annotations

import abc
import enum

from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.profile import GroupKey, GroupProfile
from megatron_offload.errors import StateError


class GroupState(enum.Enum):
    """Where a group's tensors are."""

    RECORDING = "forward runs between start and commit; tensors are on the device, unmoved"
    RESIDENT = "the tensors are kept on the device until backward has used them"
    OFFLOADING = "copies to the host are issued; device memory is still held"
    ON_HOST = "device memory is released; the host holds the data"
    RELOADING = "copies to the device are issued; who reads a tensor waits for them"
    DONE = "backward has left the group; what is left goes with the autograd graph"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is a call into Python


# By name, because what a boundary compares it with would else be looked up by Python's enum.
RECORDING, RESIDENT, OFFLOADING, ON_HOST, RELOADING, DONE = GroupState

MOVES: dict[GroupState, frozenset[GroupState]] = {
    RECORDING: frozenset({RESIDENT, OFFLOADING, DONE}),
    RESIDENT: frozenset({DONE}),
    # Back to RESIDENT: backward came before the release, the source is still there.
    OFFLOADING: frozenset({ON_HOST, RESIDENT, DONE}),
    ON_HOST: frozenset({RELOADING, DONE}),
    RELOADING: frozenset({DONE}),
    DONE: frozenset(),
}
"""The whole state table: from each state, the states it may move to."""


class Group(abc.ABC):
    """One layer group of one chunk.

    Args:
        key: position in the step, a hint for prefetch and planning only.
        name: the module's name, such as ``core_attn``; groups of one name are counted together.
        budget: where its bytes count while they are held for its backward.

    Attributes:
        num_bytes: bytes that moving the group copies; set at commit.
        kept_bytes: bytes besides that were chosen to be kept; set at commit.
        committed_at_bytes: when its forward ended, by the step's clock.
        held_bytes, inflight_bytes: what it takes of the budget just now.
        needs: other groups whose bytes its backward makes its own from; set at commit.
    """

    # Defaults of the class: quicker to make than what each group sets for itself.
    num_bytes = kept_bytes = committed_at_bytes = held_bytes = inflight_bytes = 0
    needs: tuple[GroupKey, ...] = ()
    state = RECORDING

    def __init__(self, key: GroupKey, name: str, budget: DeviceBudget) -> None:
        self.key = key
        self.name = name
        self.budget = budget

    @property
    def label(self) -> str:
        """What to call it in messages and traces."""
        return f"{self.name}[chunk {self.key.chunk}, group {self.key.order}]"

    @property
    def clock_bytes(self) -> int:
        """What the step's clock counts of it, in forward and in backward."""
        return self.num_bytes + self.kept_bytes

    @property
    def profile(self) -> GroupProfile:
        """What it has shown to the next step."""
        at_bytes = self.committed_at_bytes
        return GroupProfile(self.key, self.name, self.num_bytes, at_bytes, self.needs)

    @property
    @abc.abstractmethod
    def is_spent(self) -> bool:
        """Whether nothing that it has saved is needed any more."""

    def advance(self, to: GroupState) -> None:
        """Move to state ``to``.

        Raises:
            StateError: the table has no such move; nothing has changed.
        """
        if to not in MOVES[self.state]:
            raise StateError(f"group {self.label} can't move from {self.state.name} to {to.name}")
        self.state = to

    def hold(self) -> None:
        """Count its bytes as held on the device until backward has left them behind."""
        if self.held_bytes == 0 and not self.is_spent:
            self.held_bytes = self.num_bytes
            self.budget.held_bytes += self.num_bytes

    def let_go(self) -> None:
        """Count its bytes as held no more."""
        self.budget.held_bytes -= self.held_bytes
        self.held_bytes = 0

    def land(self, num_bytes: int) -> None:
        """Count so much of it, if there is as much, as in flight no more."""
        num_bytes = min(num_bytes, self.inflight_bytes)
        self.inflight_bytes -= num_bytes
        self.budget.inflight_bytes -= num_bytes
