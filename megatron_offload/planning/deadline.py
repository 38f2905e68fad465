"""A bound on how long planning takes, looked at in the middle of simulations, too.

Time is that of the thread's own work: what else the machine does changes no plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from megatron_offload.errors import OffloadError

_ends_s = ContextVar("_ends_s", default=math.inf)


class OutOfTimeError(OffloadError):
    """Planning would take longer than it may."""


@contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """Let what simulates inside end with `OutOfTimeError` after so long."""
    token = _ends_s.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _ends_s.reset(token)


def check_time() -> None:
    """Raise `OutOfTimeError` where the time is up."""
    if time.thread_time() > _ends_s.get():
        raise OutOfTimeError("planning takes too long")
