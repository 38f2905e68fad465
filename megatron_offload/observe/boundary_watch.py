"""Stand around the boundaries of a manager's groups for a while, to look at a step from outside.

Owns how the engine's entries are wrapped and unwrapped, how a step is made to move nothing, and
which groups backward has silently left. Must not know what is looked at.

Invariant: the manager is left as it was found, also by an exception.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from megatron_offload.core.profile import StepProfile
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.manager import PipelineOffloadManager

__all__ = ["BoundaryWatcher", "Learn", "stay", "surrounds", "watch_boundaries", "watch_ends"]

Entry = Callable[..., None]

Learn = Callable[[StepProfile], None]
"""Called when a step is over, with its groups and their order."""


class BoundaryWatcher(Protocol):
    """Whoever watches: each method is called in an entry's place, and calls it."""

    def start(self, register: Entry, group: OffloadGroup) -> None:
        """A forward enters a group."""

    def commit(self, commit: Entry, group: OffloadGroup, *args: Any, **kw: Any) -> None:
        """A forward leaves a group; twice where its commit was put off, ``delay`` the first."""

    def enter_backward(self, enter: Entry, group: OffloadGroup) -> None:
        """A backward enters a group."""

    def leave_backward(self, leave: Entry, group: OffloadGroup) -> None:
        """A backward leaves a group; never comes where the group's start has no gradient."""


@contextmanager
def watch_boundaries(manager: PipelineOffloadManager, watcher: BoundaryWatcher) -> Iterator[None]:
    """Have ``watcher`` called at the boundaries that are passed inside.

    Raises:
        RuntimeError: the manager is being watched already.
    """
    if "commit" in vars(manager):
        raise RuntimeError(
            "this manager is being traced already, or profiled: one trace_step or profile_step "
            "at a time"
        )
    passed: tuple[tuple[Any, str, Callable[..., None]], ...] = (
        (manager.prefetcher, "register", watcher.start),
        (manager, "commit", watcher.commit),
        (manager, "enter_backward", watcher.enter_backward),
        (manager, "leave_backward", watcher.leave_backward),
    )
    with ExitStack() as undo:
        for owner, name, around in passed:
            original = getattr(owner, name)
            undo.callback(delattr, owner, name)
            setattr(owner, name, functools.partial(around, original))
        yield


@contextmanager
def watch_ends(
    manager: PipelineOffloadManager, ended: Callable[[Learn, StepProfile], None]
) -> Iterator[None]:
    """Have ``ended`` called at the end of each step inside, with what would learn from the step.

    Raises:
        RuntimeError: the ends of the manager's steps are being watched already.
    """
    learner = manager.learner
    if "learn" in vars(learner):
        raise RuntimeError(
            "a step of this manager is being profiled already, or timed: one profile_step or "
            "time_step at a time"
        )
    setattr(learner, "learn", functools.partial(ended, learner.learn))  # noqa: B010
    try:
        yield
    finally:
        delattr(learner, "learn")


@contextmanager
def stay(manager: PipelineOffloadManager, because: str) -> Iterator[None]:
    """Let steps inside move nothing; whoever watches them has to see that nothing is learned."""
    manager.stays_because = because
    try:
        yield
    finally:
        manager.stays_because = ""


def surrounds(outer: OffloadGroup, inner: OffloadGroup) -> bool:
    """Whether a group that backward is in can still be open when it enters ``inner``.

    Only those around it are: earlier ones of the same chunk. Any other was left without a word, for
    want of a gradient of its start.
    """
    return outer.chunk is inner.chunk and outer.key.order < inner.key.order
