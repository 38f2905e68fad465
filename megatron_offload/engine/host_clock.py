"""What the engine takes of the host's time, while a step is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar


class HostClock:
    """Adds up the time of calls of the engine; what one calls in turn counts once."""

    running: ClassVar[HostClock | None] = None
    """The one that adds up now, of all managers of the process."""

    def __init__(self) -> None:
        self.us = 0.0
        self._is_inside = False

    def time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the engine."""
        if self._is_inside:
            return function(*args)
        self._is_inside, began_s = True, perf_counter()
        try:
            return function(*args)
        finally:
            self.us += 1e6 * (perf_counter() - began_s)
            self._is_inside = False

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Time what is called inside."""
        before, HostClock.running = HostClock.running, self
        try:
            yield
        finally:
            HostClock.running = before


class TimedHook:
    """A hook of saved tensors of the engine whose calls are timed."""

    __slots__ = ("_clock", "hook")

    def __init__(self, hook: Callable[..., Any], clock: HostClock) -> None:
        self.hook, self._clock = hook, clock

    def __call__(self, value: Any) -> Any:
        """Call the hook."""
        return self._clock.time(self.hook, value)
