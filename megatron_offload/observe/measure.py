"""When the device passes the boundaries of groups, waits for copies, and recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from megatron_offload.backends.base import Pair, Wait
from megatron_offload.engine.group import Block, OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Direction, Observer
from megatron_offload.observe.live_bytes import LiveActivationMeter

Boundary: TypeAlias = Literal["start", "commit", "backward", "done"]
"""A forward enters and leaves a group, a backward does."""

Place: TypeAlias = tuple[Literal["forward", "backward", "other"], OffloadGroup | None]
"""A pass of a group; neither where the program is in none."""


class Turn(NamedTuple):
    """What the compute stream does from a time on."""

    time: Any
    place: Place
    lost_by: Literal["", "wait", "recompute"] = ""
    """Why it does no work of the program's own, if it doesn't."""
    detail: str = ""
    """The wait's name, or the unit of what is recomputed."""


class Copy(NamedTuple):
    """A copy whose times are still to be read."""

    direction: Direction
    label: str
    start: Any
    end: Any
    num_bytes: int


class BoundaryTimer(Observer):
    """Events of the compute stream at group boundaries, waits and recompute; times of all copies.

    Calls `passed` at every boundary, in the order of the program. Of a group whose start needs no
    gradient no event says that backward leaves it: the next boundary outside the group counts as
    its end.
    """

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self._manager, self._backend = manager, manager.backend
        meters = (one for one in manager.observers if isinstance(one, LiveActivationMeter))
        self._meter = next(meters, None)
        self.restart()

    def restart(self) -> None:
        """Forget what was seen so far."""
        self._empty = self.now(), self.now()
        self.turns: list[Turn] = []
        self._recomputing: list[tuple[Place, Literal["recompute"], str]] = []
        self.copies: list[Copy] = []
        self.open: list[tuple[Literal["forward", "backward"], OffloadGroup]] = []
        """The passes and groups that the program is in, innermost last."""

    def where(self) -> Place:
        """Return the innermost group that the program is in."""
        return self.open[-1] if self.open else ("other", None)

    def turn(self) -> None:
        """Note what the compute stream does from now on."""
        what = self._recomputing[-1] if self._recomputing else (self.where(),)
        self.turns.append(Turn(self.now(), *what))

    def wait_starts(self) -> None:
        self.turns.append(Turn(self.now(), self.where(), "wait"))

    def wait_issued(self, why: Wait, group: OffloadGroup) -> None:
        self.turns[-1] = self.turns[-1]._replace(detail=why.name)
        self.turn()

    def recompute_starts(self, block: Block) -> None:
        unit = block.recipe.unit if block.recipe else ""
        self._recomputing.append((("backward", block.group), "recompute", unit))
        self.turn()

    def recomputed(self, block: Block, made: torch.Tensor) -> None:
        self._recomputing.pop()
        self.turn()

    def now(self) -> Any:
        """Return a point of the compute stream whose time can be read."""
        return self._backend.timestamp(self._backend.compute_stream())

    def passed(self, boundary: Boundary, group: OffloadGroup) -> None:
        """The program has passed a boundary; ``open`` is up to date."""
        self._recomputing.clear()  # where an exception has ended it
        self.turn()

    def group_starts(self, group: OffloadGroup) -> None:
        self.leave_backwards()
        self.open.append(("forward", group))
        self.passed("start", group)

    def group_commits(self, group: OffloadGroup, *, is_delayed: bool) -> None:
        if ("forward", group) in self.open:  # a commit that is put off comes twice
            self.open.remove(("forward", group))
            self.passed("commit", group)

    def backward_enters(self, group: OffloadGroup) -> None:
        self.leave_backwards(inner=group)
        self.open.append(("backward", group))
        self.passed("backward", group)

    def backward_leaves(self, group: OffloadGroup) -> None:
        # Of several, as through a graph that is kept, the last.
        if ("backward", group) in self.open:
            self.open.remove(("backward", group))
            self.passed("done", group)

    def leave_backwards(self, inner: OffloadGroup | None = None) -> None:
        """Leave the groups that backward is in, but for those around ``inner``."""
        for kind, group in list(self.open):
            is_around = inner is not None and (
                group.key.chunk == inner.key.chunk and group.key.order < inner.key.order
            )
            if kind == "backward" and not is_around:
                self.backward_leaves(group)

    def copy_starts(self, direction: Direction) -> None:
        self._copies_since = self._now_on(direction)

    def copy_issued(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> None:
        num_bytes = sum(destination.nbytes for destination, _ in pairs)
        since, end = self._copies_since, self._now_on(direction)
        self.copies.append(Copy(direction, group.label, since, end, num_bytes))

    def _now_on(self, direction: Direction) -> Any:
        backend = self._backend
        return backend.timestamp(backend.d2h_stream if direction == "d2h" else backend.h2d_stream)
