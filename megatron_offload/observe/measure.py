"""How long one step takes, and what it reserves of the device at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_offload.backends.base import Backend
from megatron_offload.core.profile import StepProfile
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Observer
from megatron_offload.errors import StateError
from megatron_offload.observe.live_bytes import meter_of


@dataclass
class MeasuredStep:
    """What a step took, known once its block is left, unless by an exception."""

    step_us: float = 0.0
    """From the block's begin to the end of the step."""
    reserved_bytes: int = 0
    """The most, where `tells_reserved`."""


def tells_reserved(manager: PipelineOffloadManager) -> bool:
    """Whether the device tells what is reserved, or a meter that observes the manager."""
    return manager.backend.reserved_bytes() is not None or meter_of(manager) is not None


@contextmanager
def measure_step(manager: PipelineOffloadManager, *, moves: bool = True) -> Iterator[MeasuredStep]:
    """Measure the first step that ends inside; meant for one step, its ``reset`` included.

    The host waits for the device when the block is left, and for nothing before. A process keeps
    what it has reserved, so the end of the block tells the most of it; the begin tells what came
    behind the step before, such as the optimizer's.

    Args:
        manager: whose step it is.
        moves: whether the step moves what others would; nothing is learned from one that doesn't.

    Raises:
        StateError: no step has ended inside.
    """
    measured, backend, meter = MeasuredStep(), manager.backend, meter_of(manager)
    end = _EndOfStep(backend)
    with ExitStack() as undo:
        undo.enter_context(manager.observed_by(end))
        if not moves:
            undo.enter_context(manager.staying("the step is timed without offload"))
        before_bytes = backend.reserved_bytes()
        if meter is not None:
            undo.callback(meter.restore_peak, meter.peak_bytes)
            meter.reset_peak()
        began = _now(backend)
        yield measured
        if end.time is None:
            raise StateError(
                "no step with a backward has ended inside measure_step: call the manager's reset, "
                "or the front door's end_step, before the block ends"
            )
        measured.step_us = backend.sync_elapsed_us(began, end.time)
        if before_bytes is not None:
            measured.reserved_bytes = max(before_bytes, backend.reserved_bytes() or 0)
        elif meter is not None:
            measured.reserved_bytes = meter.peak_bytes


class _EndOfStep(Observer):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.time: Any = None

    def step_ended(self, profile: StepProfile) -> None:
        if self.time is None:
            self.time = _now(self._backend)


def _now(backend: Backend) -> Any:
    with backend.uncounted():
        return backend.timestamp(backend.compute_stream())
