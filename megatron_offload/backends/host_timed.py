"""The simulated device, with compute that takes as long as the program really does.

Between two calls of the backend the compute stream has worked for as long as the host took. What
the calls themselves take (copies, poison, the search for hazards) is no compute, as a real device
has no such work; copies take the virtual time of their bytes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import SimulatedConfig


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` with the clock stopped inside."""

    @functools.wraps(method)
    def call(self: HostTimedBackend, *args: Any, **kw: Any) -> Any:
        self._enter()
        try:
            return method(self, *args, **kw)
        finally:
            self._leave()

    return call


class HostTimedBackend(SimulatedBackend):
    """A simulated device for timelines of real programs on a CPU.

    Args:
        config: as for `SimulatedBackend`.
        clock: seconds of a clock that never runs back.
    """

    def __init__(
        self, config: SimulatedConfig | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__(config)
        self._now_s = clock or time.perf_counter
        self._depth = 0
        self._left_at_s = self._now_s()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Stop the clock inside."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        if self._depth == 0:
            self.advance_compute(max(0.0, 1e6 * (self._now_s() - self._left_at_s)))
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._left_at_s = self._now_s()

    owns = _timed(SimulatedBackend.owns)
    compute_stream = _timed(SimulatedBackend.compute_stream)
    record = _timed(SimulatedBackend.record)
    wait = _timed(SimulatedBackend.wait)
    copy = _timed(SimulatedBackend.copy)
    is_done = _timed(SimulatedBackend.is_done)
    sync_copies = _timed(SimulatedBackend.sync_copies)
    timestamp = _timed(SimulatedBackend.timestamp)
    empty_device = _timed(SimulatedBackend.empty_device)
    empty_device_like = _timed(SimulatedBackend.empty_device_like)
    empty_host = _timed(SimulatedBackend.empty_host)
    note_produced = _timed(SimulatedBackend.note_produced)
    note_consumed = _timed(SimulatedBackend.note_consumed)
    note_freed = _timed(SimulatedBackend.note_freed)
