"""Trace one step of a manager: the one place where engine, backend and report meet.

Owns `trace_step`, and how the engine's boundaries become spans of the compute stream. Must not know
what a trace is for.

Invariant: the manager is left as it was found, also by an exception. Read next:
`megatron_offload.backends.tracing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron_offload.backends.tracing import TracingBackend
from megatron_offload.core.profile import GroupKey
from megatron_offload.core.trace import (
    HELD_BYTES,
    HOST_BYTES,
    LIVE_BYTES,
    PREFETCHED_BYTES,
    StepTrace,
)
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.boundary_watch import surrounds, watch_boundaries

__all__ = ["trace_step"]


@contextmanager
def trace_step(manager: PipelineOffloadManager, rank: int = 0) -> Iterator[StepTrace]:
    """Trace what runs inside; meant for one step, its ``reset`` included.

    The first steps of a job are not like the rest: trace one after the order of backwards has been
    learned.

    Args:
        manager: whose copies and groups are traced.
        rank: whose trace it is.

    Yields:
        A trace that is filled when the block is left, unless by an exception.

    Raises:
        RuntimeError: the manager is being traced or profiled already.
    """
    trace = StepTrace(rank)
    before = manager.backend
    backend = before if isinstance(before, TracingBackend) else TracingBackend(before)
    boundaries = _Boundaries(manager, backend)
    with ExitStack() as undo:
        undo.enter_context(watch_boundaries(manager, boundaries))
        undo.callback(setattr, backend, "counters", backend.counters)
        backend.counters = boundaries.counters
        for user in (manager, manager.transfers, manager.sources):
            if user.backend is not backend:
                undo.callback(_swap, user, backend, before)
                user.backend = backend
        backend.restart()
        yield trace
        finished = backend.finish(rank)
        trace.spans, trace.counters = finished.spans, finished.counters


class _Boundaries:
    """What the program has passed, as marks on the compute stream."""

    def __init__(self, manager: PipelineOffloadManager, backend: TracingBackend) -> None:
        self._transfers = manager.transfers
        self._budget = manager.budget
        self._backend = backend
        # Groups that the program is in, innermost last.
        self._open: list[tuple[str, OffloadGroup]] = []
        self._live: dict[GroupKey, int] = {}
        self._live_bytes = 0

    def counters(self) -> dict[str, float]:
        """Return the engine's numbers of bytes.

        What lies on the host and in flight is held twice. A group that came back before its release
        is no longer on the host and still in flight, hence the bounds.
        """
        on_host = self._transfers.host_bytes
        held = self._live_bytes - on_host + self._backend.inflight_bytes
        return {
            HOST_BYTES: on_host,
            PREFETCHED_BYTES: self._budget.held_bytes,
            LIVE_BYTES: self._live_bytes,
            HELD_BYTES: min(max(held, 0), self._live_bytes),
        }

    def start(self, register: Callable[..., None], group: OffloadGroup) -> None:
        """A forward enters a group."""
        self._leave_backwards(lambda left: True)
        self._open.append(("forward", group))
        self._mark()
        register(group)

    def commit(
        self, commit: Callable[..., None], group: OffloadGroup, *args: Any, **kw: Any
    ) -> None:
        """A forward leaves a group."""
        self._close("forward", group)
        if group.key not in self._live:  # a commit that was put off comes twice
            num_bytes = sum(block.num_bytes for block in group.blocks() if block.d2h is None)
            self._live[group.key] = num_bytes
            self._live_bytes += num_bytes
        commit(group, *args, **kw)
        self._backend.sample()

    def enter_backward(self, enter: Callable[..., None], group: OffloadGroup) -> None:
        """A backward enters a group."""
        self._leave_backwards(lambda left: not surrounds(left, group))
        self._open.append(("backward", group))
        self._mark()
        enter(group)
        self._backend.sample()

    def leave_backward(self, leave: Callable[..., None], group: OffloadGroup) -> None:
        """A backward leaves a group."""
        self._close("backward", group)
        self._forget(group)
        leave(group)
        self._backend.sample()

    def _leave_backwards(self, is_left: Callable[[OffloadGroup], bool]) -> None:
        """Close groups whose start has no backward of its own, for want of a gradient."""
        for kind, group in list(self._open):
            if kind == "backward" and is_left(group):
                self._open.remove((kind, group))
                self._forget(group)

    def _forget(self, group: OffloadGroup) -> None:
        self._live_bytes -= self._live.pop(group.key, 0)

    def _close(self, kind: str, group: OffloadGroup) -> None:
        if (kind, group) in self._open:
            self._open.remove((kind, group))
            self._mark()

    def _mark(self) -> None:
        kind, label = "other", ""
        if self._open:
            kind, group = self._open[-1]
            label = group.label
        self._backend.mark(kind, label)


def _swap(holder: Any, current: Any, other: Any) -> None:
    """Put ``other`` back, unless the backend was changed meanwhile."""
    if holder.backend is current:
        holder.backend = other
