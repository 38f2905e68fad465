"""SIGTERM and SIGINT as a wish to stop, and the statuses that a stopped run ends with.

Invariant: a signal never interrupts a rank's step; whoever asks between two steps sees it. For a
rank repeated signals mean the same as one: launchers send again what a terminal sent already.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

from megatron_offload.errors import OffloadError


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


@contextlib.contextmanager
def second_signal_kills() -> Iterator[None]:
    """Kill all child processes on the second SIGTERM or SIGINT inside this context.

    The handlers stay whoever's they are: here torch's launcher's, which waits for its ranks after
    the first signal and would begin to wait anew after the second. Main thread only.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=_kill_on_second, args=(reader,), daemon=True)
    watcher.start()
    found = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(found)
        writer.close()
        watcher.join()
        reader.close()


@contextlib.contextmanager
def children_without_sigint() -> Iterator[None]:
    """Let child processes begin with SIGINT blocked, until they call `end_with_parent`.

    A terminal's Ctrl-C reaches them too, and while Python starts it would print a traceback. Inside
    `second_signal_kills` alone, whose thread takes the signals that this one leaves.
    """
    resource_tracker.ensure_running()  # where it starts, it unblocks SIGINT
    found = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, found)


def end_with_parent() -> None:
    """In a child process: end at once when its parent is gone, or at a SIGINT that none collects.

    Without a parent that was started by ``multiprocessing`` it does nothing.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_on_second(reader: socket.socket) -> None:
    """Read signal numbers, one byte each, until the other end is closed."""
    count = 0
    while numbers := reader.recv(64):
        count += sum(number in (signal.SIGTERM, signal.SIGINT) for number in numbers)
        if count > 1:
            for process in multiprocessing.active_children():
                process.kill()


def exit_status(number: int) -> int:
    """Return the status of a process that a signal stopped: 143 for SIGTERM, 130 for SIGINT."""
    return 128 + number
