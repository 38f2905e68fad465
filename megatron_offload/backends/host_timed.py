"""The simulated device, with compute that takes as long as the program really does.

Owns the one link between the virtual clock and the real one: between two calls of a backend the
compute stream has worked for as long as the host took. Must not know what the program does.

Invariants: what the calls themselves take (copies, poison, the search for hazards) is no compute,
as a real device has no such work; copies take the virtual time of their bytes. Bits, hazards and
the order of copies are those of `SimulatedBackend`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatron_offload.backends.base import Backend
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import SimulatedConfig

__all__ = ["HostTimedBackend"]


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

    @staticmethod
    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` with the clock stopped inside."""

        @functools.wraps(method)
        def call(self: HostTimedBackend, *args: Any, **kw: Any) -> Any:
            self._enter()
            try:
                return method(self, *args, **kw)
            finally:
                self._leave()

        return call

    def _enter(self) -> None:
        if self._depth == 0:
            self.advance_compute(max(0.0, 1e6 * (self._now_s() - self._left_at_s)))
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._left_at_s = self._now_s()


for _name, _method in vars(SimulatedBackend).items():
    # Every call of the contract that does something; the others only say what is where.
    if callable(_method) and _name in vars(Backend) and not _name.startswith("_"):
        setattr(HostTimedBackend, _name, HostTimedBackend.timed(_method))
