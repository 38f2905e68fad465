"""Names of other libraries that stand for something else for a while, and how they are put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch.utils.hooks import RemovableHandle

Call = Callable[..., Any]
"""A function, method or class that is called."""


def around(original: Call, call: Call) -> Call:
    """Return what replaces a function: ``call``, given that function before the arguments."""

    @wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    return patched


class PatchStack(ExitStack):
    """Patches that are in force; as a context manager it undoes all at its end."""

    on_undo = ExitStack.callback
    """Call something when all that comes after it is put back."""

    undo = ExitStack.close
    """Put everything back, the last first; a second call does nothing."""

    def __bool__(self) -> bool:
        return bool(self._exit_callbacks)  # type: ignore[attr-defined]

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module, class or object."""
        own = vars(owner)
        put_back = partial(setattr, owner, name, own[name]) if name in own else None
        self.on_undo(put_back or partial(delattr, owner, name))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, call: Call) -> None:
        """Set a function of a module, class or object to `around` it."""
        patched = around(getattr(owner, name), call)
        is_static = isinstance(vars(owner).get(name), staticmethod)
        self.replace(owner, name, staticmethod(patched) if is_static else patched)

    def remove_later(self, handles: Iterable[RemovableHandle]) -> None:
        """Take hooks of modules off with the rest."""
        for handle in handles:
            self.on_undo(handle.remove)
