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
    """What a step took, once its block is left; None of what was not measured."""

    step_us: float | None = None
    """From the block's begin to the end of the step."""
    reserved_bytes: int | None = None
    """The most."""


@contextmanager
def time_step(manager: PipelineOffloadManager, *, moves: bool = True) -> Iterator[MeasuredStep]:
    """Time the first step that ends inside; meant for one step, its ``reset`` included.

    The host waits for the device when the block is left, and for nothing before.

    Args:
        manager: whose step it is.
        moves: whether the step moves what others would; nothing is learned from one that doesn't.

    Yields:
        The time, which is known when the block is left, unless by an exception.

    Raises:
        StateError: no step has ended inside.
    """
    timed, backend = MeasuredStep(), manager.backend
    end = _EndOfStep(backend)
    with ExitStack() as undo:
        undo.enter_context(manager.observed_by(end))
        if not moves:
            undo.enter_context(manager.staying("the step is timed without offload"))
        began = _now(backend)
        yield timed
        if end.time is None:
            raise StateError(
                "no step with a backward has ended inside time_step: call the manager's reset, or "
                "the front door's end_step, before the block ends"
            )
        timed.step_us = backend.sync_elapsed_us(began, end.time)


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


def can_weigh(manager: PipelineOffloadManager) -> bool:
    """Whether the device tells what is reserved, or a meter that observes the manager."""
    return manager.backend.reserved_bytes() is not None or meter_of(manager) is not None


@contextmanager
def weigh_step(manager: PipelineOffloadManager) -> Iterator[MeasuredStep]:
    """Weigh the step that is taken inside, its ``reset`` included.

    A process keeps what it has reserved, so the end of a step tells the most of it; the begin tells
    what came behind the step before, such as the optimizer's.

    Args:
        manager: whose device it is, on which `can_weigh` is true.

    Yields:
        The weight, which is known when the block is left, unless by an exception.
    """
    weighed, backend, meter = MeasuredStep(), manager.backend, meter_of(manager)
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
