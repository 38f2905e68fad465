"""Where the bytes of a block are: the whole table, apart from what is done about it."""

from __future__ import annotations

import enum

from megatron_offload.errors import StateError


class BlockState(enum.Enum):
    """Where a block's bytes are."""

    SAVED = "the source has them; no copy was issued"
    IN_FLIGHT = "a copy to the host is issued; the source is held until its release"
    KEPT = "the source has them, though a copy was issued"
    RELEASED = "the source was dropped behind its copy; the host has them"
    RELOADED = "a copy to the device is issued; who reads them waits for it"
    DROPPED = "the source was dropped without a copy; a recipe recomputes them"
    EXTERNAL = "the source was dropped, and lives on where something else keeps it"
    LOST = "they went with a step that was aborted"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is a call into Python


SAVED, IN_FLIGHT, KEPT, RELEASED, RELOADED, DROPPED, EXTERNAL, LOST = BlockState


class _Moves(dict[tuple[BlockState, BlockState], BlockState]):
    def __missing__(self, move: tuple[BlockState, BlockState]) -> BlockState:
        raise StateError(f"a block can't move from {move[0].name} to {move[1].name}")


_FOLLOWING = {
    SAVED: (IN_FLIGHT, DROPPED),
    IN_FLIGHT: (RELEASED, KEPT),  # to KEPT: a reader came first, or the source had been emptied
    RELEASED: (RELOADED, EXTERNAL, LOST),
    RELOADED: (LOST,),
    DROPPED: (LOST,),
}
MOVES = _Moves({(state, to): to for state, states in _FOLLOWING.items() for to in states})
"""By a state and one that it may move to, that one; a `StateError` for any other two."""

HAVE_SOURCE = frozenset({SAVED, IN_FLIGHT, KEPT})
