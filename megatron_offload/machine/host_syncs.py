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


class HostSyncs:
    """The waits of some steps."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.counts: Counter[HostSync] = Counter()
        """How often the host waited at each place, in all steps together."""
        self._lock = threading.Lock()  # backward has threads of its own

    def per_step(self) -> list[tuple[HostSync, float]]:
        """Return each place and how often the host waits there in a step, most often first."""
        return [(sync, count / self.num_steps) for sync, count in self.counts.most_common()]

    def _add(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
            frame = frame.f_back
        sync = HostSync("", 0, "")
        if frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno
            sync = HostSync(file, line, shorten(linecache.getline(file, line).strip(), 60))
        with self._lock:
            self.counts[sync] += 1


@contextlib.contextmanager
def find_host_syncs(*, num_steps: int = 1) -> Iterator[HostSyncs]:
    """Count the waits within that ``torch.cuda.set_sync_debug_mode`` sees, by line.

    The first steps wait for things that later ones have (memory, learned orders): warm up before.
    Not seen are ``torch.cuda.synchronize()``, ``Event.synchronize()``, and what waits inside of
    other libraries, such as NCCL. A wait in backward's C++ part is told when ``backward`` returns.

    Args:
        num_steps: how many training steps run within.

    Raises:
        ValueError: ``num_steps`` is less than 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is at least 1, got {num_steps}")
    syncs = HostSyncs(num_steps)
    with backends.watch_syncs(syncs._add):
        yield syncs
