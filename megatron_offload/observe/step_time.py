"""How long one step takes, on the device's own clock.

Owns `time_step`. Must not know what the time is for.

Two events on the compute stream, at the block's begin and where the step ends: the host waits for
the second when the block is left, and for nothing before.

Invariant: the manager is left as it was found, also by an exception; no result changes by a bit.
Read next: `megatron_offload.autotune`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron_offload.backends.base import Backend
from megatron_offload.core.profile import StepProfile
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Observer
from megatron_offload.errors import StateError

__all__ = ["TimedStep", "time_step"]


class TimedStep:
    """What `time_step` has found, once its block is left."""

    def __init__(self) -> None:
        self._step_us: float | None = None

    @property
    def step_us(self) -> float:
        """From the block's begin to the end of the step.

        Raises:
            StateError: the block wasn't left yet, or by an exception.
        """
        if self._step_us is None:
            raise StateError("there is no time: time_step's block has not come to its end")
        return self._step_us


@contextmanager
def time_step(manager: PipelineOffloadManager, *, moves: bool = True) -> Iterator[TimedStep]:
    """Time the first step that ends inside; meant for one step, its ``reset`` included.

    Args:
        manager: whose step it is.
        moves: whether the step moves what others would; nothing is learned from one that doesn't.

    Yields:
        The time, which is known when the block is left, unless by an exception.

    Raises:
        StateError: no step has ended inside.
    """
    timed, backend = TimedStep(), manager.backend
    watcher = _EndOfStep(backend)
    with ExitStack() as undo:
        undo.enter_context(manager.observed_by(watcher))
        if not moves:
            undo.enter_context(manager.staying("the step is timed without offload"))
        began = _now(backend)
        yield timed
        if watcher.time is None:
            raise StateError(
                "no step with a backward has ended inside time_step: call the manager's reset, or "
                "the front door's end_step, before the block ends"
            )
        timed._step_us = backend.sync_elapsed_us(began, watcher.time)


class _EndOfStep(Observer):
    """Takes the time of the first step's end."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.time: Any = None

    def step_ended(self, profile: StepProfile) -> None:
        """A step is over."""
        if self.time is None:
            self.time = _now(self._backend)


def _now(backend: Backend) -> Any:
    with backend.uncounted():
        return backend.timestamp(backend.compute_stream())
