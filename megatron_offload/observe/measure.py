"""How long one step takes, what of it is lost by waiting and making again, what it reserves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_offload.backends.base import Backend, Pair, Wait
from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.engine.group import Block, OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Direction, Observer
from megatron_offload.observe.live_bytes import meter_of


class MeasuredStep(NamedTuple):
    """What one step took."""

    step_us: float
    """From the start of its first group to its end."""
    waited_us: float
    """What of that the compute stream waited for copies."""
    remade_us: float
    """What of it went into making tensors again."""
    reserved_bytes: int | None
    """The most that the process has reserved; None where nobody tells."""


@dataclass(slots=True)
class _Remaking:
    """A block that is being made again, or was."""

    key: GroupKey
    unit: str
    start: Any
    first_wait: int
    end: Any = None
    num_waits: int = 0
    """Inside, those of what it is made from included."""
    inner: list[_Remaking] = field(default_factory=list)


class LossTimer(Observer):
    """Two events around each wait of the compute stream for a copy, and each making again."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._since: Any = None
        self._empty: tuple[Any, Any] | None = None
        self._waits: list[tuple[Any, Any]] = []
        self._remade: list[_Remaking] = []
        self._remaking: list[_Remaking] = []

    def restart(self) -> None:
        """Forget what was lost so far."""
        self._waits.clear()
        self._remade.clear()
        self._empty = self.now(), self.now()

    def wait_starts(self) -> None:
        self._since = self.now()

    def wait_issued(self, why: Wait, group: OffloadGroup) -> None:
        self._waits.append((self._since, self.now()))

    def remake_starts(self, block: Block) -> None:
        unit = "" if block.recipe is None else block.recipe.unit
        one = _Remaking(block.group.key, unit, self.now(), len(self._waits))
        outer = self._remaking[-1].inner if self._remaking else self._remade
        outer.append(one)
        self._remaking.append(one)

    def remade(self, block: Block, made: torch.Tensor) -> None:
        one = self._remaking.pop()
        one.end, one.num_waits = self.now(), len(self._waits) - one.first_wait

    def read_waits_us(self) -> list[float]:
        """Wait for all of them; return what each took, but for what two events take anyway."""
        return [self._elapsed_us(*wait) for wait in self._waits]

    def read_remade_us(self) -> dict[tuple[GroupKey, str], float]:
        """Wait likewise; return what groups have made again, by unit, waits left out."""
        waits_us = self.read_waits_us()
        found: dict[tuple[GroupKey, str], float] = defaultdict(float)

        def add(one: _Remaking) -> float:
            if one.end is None:  # an exception has ended it
                return 0.0
            waited_us = sum(waits_us[one.first_wait : one.first_wait + one.num_waits])
            us = max(0.0, self._elapsed_us(one.start, one.end) - waited_us)
            found[one.key, one.unit] += max(0.0, us - sum(map(add, one.inner)))
            return us

        for one in self._remade:
            add(one)
        return found

    def _elapsed_us(self, start: Any, end: Any) -> float:
        elapsed_us = self._backend.sync_elapsed_us
        least_us = elapsed_us(*self._empty) if self._empty is not None else 0.0
        return max(0.0, elapsed_us(start, end) - least_us)

    def now(self) -> Any:
        """Return a point of the compute stream whose time can be read."""
        with self._backend.uncounted():
            return self._backend.timestamp(self._backend.compute_stream())


class StepTimer(LossTimer):
    """Measures the first step that ends while it observes a manager; `read` tells what it took.

    The host waits for nothing before that.
    """

    def __init__(self, manager: PipelineOffloadManager) -> None:
        super().__init__(manager.backend)
        self._began: Any = None
        self._ended: Any = None
        self._num_waits = self._num_remade = 0
        self._meter = meter_of(manager)
        self._earlier_peak_bytes = 0
        if self._meter is not None:
            self._earlier_peak_bytes = self._meter.peak_bytes
            self._meter.reset_peak()

    @property
    def has_ended(self) -> bool:
        """Whether a step has."""
        return self._ended is not None

    def group_starts(self, group: OffloadGroup) -> None:
        if group.key == (0, 0) and not self.has_ended:
            self.restart()  # what was passed so far, such as an evaluation, is no part of it
            self._began = self.now()

    def step_ended(self, profile: StepProfile) -> None:
        if self._began is not None and not self.has_ended:
            self._ended = self.now()
            self._num_waits, self._num_remade = len(self._waits), len(self._remade)

    def read(self) -> MeasuredStep:
        """Wait for the step's end on the device; return what was seen."""
        step_us = self._backend.sync_elapsed_us(self._began, self._ended)
        reserved_bytes = self._backend.reserved_bytes()
        if self._meter is not None:
            if reserved_bytes is None:
                reserved_bytes = self._meter.peak_bytes
            self._meter.restore_peak(self._earlier_peak_bytes)
        del self._waits[self._num_waits :], self._remade[self._num_remade :]
        waited_us, remade_us = sum(self.read_waits_us()), sum(self.read_remade_us().values())
        return MeasuredStep(step_us, waited_us, remade_us, reserved_bytes)


class Copy(NamedTuple):
    """A copy whose times are still to be read."""

    direction: Direction
    label: str
    start: Any
    end: Any
    num_bytes: int


class CopyTimer(Observer):
    """Times what is copied to the host and back while it observes a manager."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._since: Any = None
        self.copies: list[Copy] = []

    def copy_starts(self, direction: Direction) -> None:
        self._since = self._now(direction)

    def copy_issued(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> None:
        num_bytes = sum(destination.nbytes for destination, _ in pairs)
        end = self._now(direction)
        self.copies.append(Copy(direction, group.label, self._since, end, num_bytes))

    def read_gbps(self, direction: Direction) -> float:
        """Wait for the copies of one direction; return what they got, or 0 if none did."""
        copies = [copy for copy in self.copies if copy.direction == direction]
        us = sum(self._backend.sync_elapsed_us(copy.start, copy.end) for copy in copies)
        return sum(copy.num_bytes for copy in copies) / us / 1e3 if us > 0 else 0.0

    def _now(self, direction: Direction) -> Any:
        backend = self._backend
        stream = backend.d2h_stream if direction == "d2h" else backend.h2d_stream
        with backend.uncounted():
            return backend.timestamp(stream)
