"""One call of the engine at a time, and what becomes of a call that is cut short.

Autograd's own threads enter as the user's do; the second of them waits. Forwards belong to one
thread at a time, which has claimed the engine; another is refused. Errors of this package are
raised before anything has changed; they fail no step.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, cast

from megatron_offload.engine.hooks import F, apart, graph_break, has_modes
from megatron_offload.errors import OffloadError, StateError

_logger = logging.getLogger(__name__)


class Guard:
    """The lock of one manager; ``synchronize`` waits, where a call fails, for all copies.

    ``is_mine`` says whether the calling thread holds it: entries don't call entries, so what asks
    is code of others that the engine has called. ``left`` are leases of blocks that have
    gone, which the next call frees first.
    """

    __slots__ = ("_synchronize", "_thread", "has_failed", "is_mine", "left", "lock")

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._thread: int | None = None
        self.lock = RLock()
        # What the standard library's own Condition asks; a count of ours could be interrupted.
        self.is_mine: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.has_failed = False
        self.left: deque[Any] = deque()

    def claim(self, is_busy: Callable[[], bool]) -> None:
        """Give the engine to the calling thread; `StateError` if another is in a forward."""
        me = threading.get_ident()
        if self._thread == me:
            return
        with self.lock:
            if any(t.ident == self._thread for t in threading.enumerate()) and is_busy():
                self.refuse_other_threads()
            self._thread = me

    def refuse_other_threads(self) -> None:
        """Raise `StateError` where the engine belongs to another thread."""
        if self._thread not in (None, threading.get_ident()):
            mine = threading.current_thread().name
            others = [t.name for t in threading.enumerate() if t.ident == self._thread]
            raise StateError(
                f"offload is in use in thread {others[0] if others else self._thread!r}, which is "
                f"not done with it, and was asked for in {mine!r}; give each thread a context or "
                "manager of its own"
            )

    def refuse_nesting(self, name: str) -> None:
        """Raise `StateError` where this thread is in a call already: it would wait for itself."""
        if self.is_mine():
            raise StateError(
                f"{name} was called from inside a call of the engine, by an observer or a wrapper "
                "of it; call it between two of them"
            )

    def fail(self) -> None:
        """Take note that a call was cut short, and wait for all copies; with the lock held."""
        self.has_failed = True
        try:
            self._synchronize()
        except RuntimeError:
            _logger.exception("the copies under way can't be waited for")


# [Note: calls that are cut short] Between any two lines can come a collection that frees a graph
# with its blocks, another thread, and an exception: no memory, an interrupt. What a dead block has
# left is freed as the next call begins, not in a finalizer in Python, which swallows an interrupt.
# After an exception the host waits for all copies before anything is unwound, so that none writes
# to memory that an unwound frame freed. The step has failed then: the next chunk or its end aborts
# it, and `abort` assumes nothing of the counts: any line that changes them may have been the last
# that ran.
def guarded(method: F) -> F:
    """Make a method an entry of the engine, by its object's ``guard``.

    Its arguments are positional, which is quicker.
    """

    @functools.wraps(method)
    @graph_break
    def entry(*args: Any) -> Any:
        if has_modes():
            return apart(entry, *args)
        guard: Guard = args[0].guard
        if guard.is_mine():
            guard.refuse_nesting(method.__name__)
        with guard.lock:
            try:
                left = guard.left
                while left:
                    left[0].free(left[0])
                    left.popleft()
                return method(*args)
            except OffloadError:
                raise
            except BaseException:
                guard.fail()
                raise

    return cast("F", entry)
