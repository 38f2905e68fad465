"""SIGTERM and SIGINT as a wish to stop, and the statuses that a stopped run ends with.

Owns the signal handlers of a rank while it trains. Must not know what is done about the wish.

Invariant: a signal never interrupts a step; whoever asks between two steps sees it. Repeated
signals mean the same as one: launchers send again what a terminal sent already. Read next:
`megatron_offload.train.loop`, which lets all ranks agree.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from megatron_offload.errors import OffloadError

__all__ = ["StopSignals", "StoppedError", "exit_status", "open_stop_signals"]


class StoppedError(OffloadError, RuntimeError):
    """A run was stopped by a signal before its last step."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number
        """The signal."""


class StopSignals:
    """Which signal has arrived."""

    def __init__(self) -> None:
        self.received = 0
        """The first signal's number; 0 for none."""

    def take(self, number: int, _: FrameType | None) -> None:
        """Be the handler."""
        self.received = self.received or number


@contextlib.contextmanager
def open_stop_signals() -> Iterator[StopSignals]:
    """Collect SIGTERM and SIGINT inside this context instead of ending; main thread only."""
    signals = StopSignals()
    found = {
        number: signal.signal(number, signals.take) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield signals
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


def exit_status(number: int) -> int:
    """Return the status of a process that a signal stopped: 143 for SIGTERM, 130 for SIGINT."""
    return 128 + number
