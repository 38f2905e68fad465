"""What one step reserves of the device at most.

Owns `weigh_step`. Must not know what the number is for.

A process keeps what it has reserved, so the end of a step tells the most of it; the begin tells
what came behind the step before, such as the optimizer's. Where the device doesn't say, the
manager's meter counts live bytes of saved tensors instead, as in a profile.

Invariant: no result changes by a bit, and nobody else's peak is lost.
Read next: `megatron_offload.autotune.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.live_bytes import meter_of

__all__ = ["WeighedStep", "can_weigh", "weigh_step"]


class WeighedStep:
    """What `weigh_step` has found, once its block is left.

    Attributes:
        reserved_bytes: the most; 0 before that.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0


def can_weigh(manager: PipelineOffloadManager) -> bool:
    """Whether device or meter tells."""
    return manager.backend.reserved_bytes() is not None or meter_of(manager) is not None


@contextmanager
def weigh_step(manager: PipelineOffloadManager, *, empties: bool = False) -> Iterator[WeighedStep]:
    """Weigh the step that is taken inside, its ``reset`` included.

    Args:
        manager: whose device it is, on which `can_weigh` is true.
        empties: hand back first what is reserved and unused, such as another kind of step's.

    Yields:
        The weight, which is known when the block is left, unless by an exception.
    """
    weighed, backend, meter = WeighedStep(), manager.backend, meter_of(manager)
    if empties:
        backend.trim_device()
    before_bytes = backend.reserved_bytes()
    if before_bytes is not None:
        yield weighed
        weighed.reserved_bytes = max(before_bytes, backend.reserved_bytes() or 0)
        return
    assert meter is not None
    peak_bytes = meter.peak_bytes
    meter.reset_peak()
    try:
        yield weighed
        weighed.reserved_bytes = meter.peak_bytes
    finally:
        meter.restore_peak(peak_bytes)
