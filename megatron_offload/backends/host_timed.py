"""The simulated device, with compute that takes as long as the program really does.

Between two calls of the backend the compute stream has worked for as long as the host took. What
the calls themselves take (poison, the search for hazards) is no compute.
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
        if self._depth == 0:
            self.advance_compute(max(0.0, 1e6 * (self._now_s() - self._left_at_s)))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._left_at_s = self._now_s()


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` with the clock stopped inside."""

    @functools.wraps(method)
    def call(self: HostTimedBackend, *args: Any, **kw: Any) -> Any:
        with self.uncounted():
            return method(self, *args, **kw)

    return call


for _name, _method in vars(SimulatedBackend).items():
    if _name in vars(Backend) and callable(_method) and _name[0] != "_":
        setattr(HostTimedBackend, _name, _timed(_method))
