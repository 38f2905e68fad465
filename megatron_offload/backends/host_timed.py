"""The simulated device, with compute that takes as long as the program really does.

Between two calls of the backend the compute stream has worked for as long as the host took. What
the calls themselves take (poison, the search for hazards) is no compute.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from megatron_offload.backends.base import Backend
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import SimulatedConfig


class HostTimedBackend(SimulatedBackend):
    """A simulated device for timelines of real programs on a CPU."""

    def __init__(self, config: SimulatedConfig | None = None) -> None:
        super().__init__(config)
        self._depth = 0
        self._left_at_s = perf_counter()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Stop the clock inside."""
        if self._depth == 0:
            self.advance_compute(1e6 * (perf_counter() - self._left_at_s))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._left_at_s = perf_counter()


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
