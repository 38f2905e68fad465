"""How long one step takes, what of it is lost by waiting and recompute, what it reserves.

And which groups the program is in, and their boundaries in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from megatron_offload.backends.base import Pair, Wait
from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.engine.group import Block, OffloadGroup
from megatron_offload.engine.host_clock import HostClock
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


class ComputeTimer(Observer):
    """An event of the compute stream at both ends of each wait for a copy and each recompute."""

    at: Place = "other", None
    """Which group the program has entered last."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self._manager, self._backend = manager, manager.backend
        meters = (one for one in manager.observers if isinstance(one, LiveActivationMeter))
        self._meter = next(meters, None)
        self.restart()

    def where(self) -> Place:
        return self.at

    def restart(self) -> None:
        self.turns: list[Turn] = []
        self._recomputing: list[tuple[Place, Literal["recompute"], str]] = []
        self._empty = self.now(), self.now()

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


class Copy(NamedTuple):
    """A copy whose times are still to be read."""

    direction: Direction
    label: str
    start: Any
    end: Any
    num_bytes: int


class BoundaryTimer(ComputeTimer):
    """Calls `passed` at every boundary too, in the order of the program, and times all copies.

    Of a group whose start needs no gradient no event says that backward leaves it: the next
    boundary outside the group counts as its end.
    """

    def restart(self) -> None:
        super().restart()
        self.copies: list[Copy] = []
        self.open: list[tuple[Literal["forward", "backward"], OffloadGroup]] = []
        """The passes and groups that the program is in, innermost last."""

    def where(self) -> Place:
        return self.open[-1] if self.open else ("other", None)

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


class MeasuredStep(NamedTuple):
    """What one step took."""

    step_us: float
    """From the start of its first group to its end."""
    lost_us: list[list[float]]
    """What went into waiting for copies and recompute: by chunk, in its forward and in
    its backward."""
    copied_bytes: int
    """To the host and back."""
    reserved_bytes: int | None
    """The most that the process has reserved; None where unknown."""
    idle_share: float
    """Of the boundaries of its groups, those at which the device had come to the one before: most,
    where it waits for the host. Where groups have been skipped in between, neither counts."""
    host_us: float
    """What the engine took of the host's time, as far as it is timed: pinning memory too."""


class StepTimer(ComputeTimer):
    """Measures the first step that ends while it observes; the host waits in `read` alone.

    ``clock`` adds up the host's time meanwhile.
    """

    needs_groups = False

    def __init__(self, manager: PipelineOffloadManager) -> None:
        super().__init__(manager)
        self.clock = HostClock()
        self._began: Any = None
        self._ended: Any = None
        self._num_chunks = self._num_turns = self._copied_bytes = 0
        self._boundary: tuple[GroupKey, Any] | None = None
        self._num_boundaries = self._num_idle = 0
        if self._meter is not None:
            self._earlier_peak_bytes = self._meter.peak_bytes
            self._meter.reset_peak()

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def group_starts(self, group: OffloadGroup) -> None:
        self.at = "forward", group
        if group.key == (0, 0) and not self.has_ended:
            self.restart()  # what was passed so far, such as an evaluation, is no part of it
            self.clock.us = 0.0
            self._began = self.now()
            self._num_boundaries = self._num_idle = 0
        self._look(group)

    def backward_enters(self, group: OffloadGroup) -> None:
        self.at = "backward", group
        self._look(group)

    def _look(self, group: OffloadGroup, *, is_delayed: bool = False) -> None:
        """See at a boundary whether the device has come to the one before already."""
        if not self.has_ended:
            if self._boundary is not None:
                (chunk, order), event = self._boundary
                if group.key.chunk == chunk and abs(group.key.order - order) <= 1:
                    self._num_boundaries += 1
                    self._num_idle += self._backend.has_passed(event)
            self._boundary = group.key, self.now()

    group_commits = backward_leaves = _look

    def step_ended(self, profile: StepProfile) -> None:
        if self._began is not None and not self.has_ended:
            self._ended, self._host_us = self.now(), self.clock.us
            self._num_turns = len(self.turns)
            self._num_chunks = 1 + max(group.key.chunk for group in profile.groups)
            stats = self._manager.last_step
            self._copied_bytes = stats.offloaded_bytes + stats.reloaded_bytes
            self._reserved_bytes = self._backend.reserved_bytes()  # some is handed back behind it

    def read(self) -> MeasuredStep:
        """Wait for the step's end on the device; return what was seen."""
        step_us = self._backend.sync_elapsed_us(self._began, self._ended)
        reserved_bytes = self._reserved_bytes
        if self._meter is not None:
            if reserved_bytes is None:
                reserved_bytes = self._meter.peak_bytes
            # As if unobserved.
            self._meter.peak_bytes = max(self._meter.peak_bytes, self._earlier_peak_bytes)
        lost_us = [[0.0, 0.0] for _ in range(self._num_chunks)]
        elapsed_us = self._backend.sync_elapsed_us
        event_us = elapsed_us(*self._empty)
        for since, until in pairwise(self.turns[: self._num_turns]):
            kind, group = since.place
            if group is not None and since.lost_by:
                us = elapsed_us(since.time, until.time) - event_us
                lost_us[group.key.chunk][kind == "backward"] += max(0.0, us)
        idle_share = self._num_idle / max(1, self._num_boundaries)
        sizes = self._copied_bytes, reserved_bytes
        return MeasuredStep(step_us, lost_us, *sizes, idle_share, self._host_us)
