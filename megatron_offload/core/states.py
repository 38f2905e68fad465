"""Where a group's tensors may be, and from where they go where: one table.

Owns the states and the moves between them. Must not know who moves anything, so that the engine and
the simulator of a step share the table.

Invariant: what is not in `MOVES` never happens. Read next: `megatron_offload.engine.group`.
"""

from __future__ import annotations

import enum

__all__ = ["MOVES", "GroupState"]


class GroupState(enum.Enum):
    """Where a group's tensors are."""

    RECORDING = "forward runs between start and commit; tensors are on the device, unmoved"
    RESIDENT = "the tensors stay on the device until backward has used them"
    OFFLOADING = "copies to the host are issued; device memory is still held"
    ON_HOST = "device memory is released; the host holds the data"
    RELOADING = "copies to the device are issued; host memory is given back behind them"
    RELOADED = "the compute stream is ordered behind the reload"
    DONE = "backward has left the group; what is left goes with the autograd graph"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is a call into Python


MOVES: dict[GroupState, frozenset[GroupState]] = {
    GroupState.RECORDING: frozenset(
        {GroupState.RESIDENT, GroupState.OFFLOADING, GroupState.DONE},
    ),
    GroupState.RESIDENT: frozenset({GroupState.DONE}),
    # Back to RESIDENT: backward came before the release, the source is still there.
    GroupState.OFFLOADING: frozenset(
        {GroupState.ON_HOST, GroupState.RESIDENT, GroupState.DONE},
    ),
    GroupState.ON_HOST: frozenset({GroupState.RELOADING, GroupState.DONE}),
    GroupState.RELOADING: frozenset({GroupState.RELOADED, GroupState.DONE}),
    GroupState.RELOADED: frozenset({GroupState.DONE}),
    GroupState.DONE: frozenset(),
}
"""The whole state table: from each state, the states it may move to."""
