"""A hook on a module that stays with that module.

Owns `ModuleHook`. Must not know what hooks do. Read next: `megatron_offload.frontends.modules`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from megatron_offload.engine.graph_break import graph_break

__all__ = ["ModuleHook"]


class ModuleHook:
    """A forward hook of one module; its copies, and what is loaded from a file, do nothing.

    A manager and its memory can neither be copied nor saved, and a copy that shared them would be
    a second model on them that nobody marked. So a copied or saved model has no groups: mark it as
    any other. Such a file needs nothing of this package to be loaded.
    """

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    @graph_break
    def __call__(self, *args: Any) -> None:
        """Run the hook."""
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A call that takes anything, does nothing and returns None, and that every Python has.
        return getattr, (nullcontext(), "__exit__")
