"""The lines of a program that make the host wait for the device.

While the host waits, no kernel and no copy is queued.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from megatron_offload import backends
from megatron_offload.errors import shorten

_PASSED_OVER = (
    *(str(Path(str(module.__file__)).parent) + "/" for module in (torch, backends)),
    *(str(module.__file__) for module in (warnings, contextlib)),
    __file__,
)
"""Where a frame's file begins so, somebody else asked for the wait."""


class HostSync(NamedTuple):
    """A place in a program where the host waits."""

    file: str
    """Empty where no Python code asked for it."""
    line: int
    """From 1."""
    call: str
    """The line's source, shortened; empty where it isn't there."""


@contextlib.contextmanager
def find_host_syncs() -> Iterator[Counter[HostSync]]:
    """Count the waits within that ``torch.cuda.set_sync_debug_mode`` sees, by line.

    The first steps wait for things that later ones have (memory, learned orders): warm up before.
    Not seen are ``torch.cuda.synchronize()``, ``Event.synchronize()``, and what waits inside of
    other libraries, such as NCCL. A wait in backward's C++ part is told when ``backward`` returns.
    """
    counts: Counter[HostSync] = Counter()
    lock = threading.Lock()  # backward has threads of its own

    def count() -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
            frame = frame.f_back
        sync = HostSync("", 0, "")
        if frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno
            sync = HostSync(file, line, shorten(linecache.getline(file, line).strip(), 60))
        with lock:
            counts[sync] += 1

    with backends.watch_syncs(count):
        yield counts
