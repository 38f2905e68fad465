"""What autograd does in this thread, and the saved-tensor hooks in force for groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import is_grad_enabled
from torch._C import _current_graph_task_id
from torch._C._autograd import (  # type: ignore[attr-defined]  # its stub has not all
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)

CHECKPOINT = "torch.utils.checkpoint"
"""The owner of hooks of checkpoints that aren't reentrant; others' show in their rerun alone."""
RECOMPUTE = "megatron_offload.recompute"
"""The owner of hooks under which nothing is recorded, since it is recomputed as a whole."""


def is_in_backward() -> bool:
    """Whether this thread runs a backward; a forward in there is a recompute."""
    return _current_graph_task_id() != -1


def others_hooks() -> str:
    """Return whose hooks of saved tensors are in force, module and class, if not of groups.

    A checkpoint counts what is saved inside it in forward and again in its rerun, another may
    compress; what they rely on isn't known, so nothing is taken from under them.
    """
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is None:
        return ""
    pack = hooks[0]
    pack = pack.func if isinstance(pack, partial) else pack
    owner = getattr(pack, "__module__", None) or "something"
    owner += "." + getattr(pack, "__qualname__", type(pack).__name__).partition(".")[0]
    is_ours = owner.startswith("megatron_offload.") and not owner.startswith(RECOMPUTE)
    return "" if is_ours else owner


def is_recording(*, needs_grad: bool = True) -> bool:
    """Whether what is saved here and now is saved for a backward, and by this package's rules.

    An autograd function saves with grad switched off; ``needs_grad`` says that this isn't one.
    Nothing is where torch refuses all hooks, as ``torch.func.grad`` lets it.
    """
    if _current_graph_task_id() != -1 or (needs_grad and not is_grad_enabled()):
        return False
    return not others_hooks() and _saved_tensors_hooks_is_enabled()


def owner_of_hooks() -> Any:
    """Return the object whose method is the pack hook in force; None where it is no method."""
    hooks = _top_saved_tensors_default_hooks(True)
    return owner_of(hooks[0]) if hooks else None


def owner_of(pack: Callable[..., Any]) -> Any:
    """Return the object whose method a pack hook is; None where it is no method."""
    return getattr(pack.func if isinstance(pack, partial) else pack, "__self__", None)


def take_off(is_one: Callable[[Any], bool], *, all_of_them: bool = False) -> list[Any]:
    """Take hooks of saved tensors off, wherever they lie by now: the last, or all; return them.

    Others are kept as they are, and in their order. ``is_one`` is asked with pack hooks.
    """
    found, others = list[Any](), list[Any]()
    while (hooks := _top_saved_tensors_default_hooks(True)) is not None:
        _pop_saved_tensors_default_hooks()
        (found if is_one(hooks[0]) else others).insert(0, hooks)
        if found and not all_of_them:
            break
    for both in others:
        put_on(*both)
    return found


put_on = _push_saved_tensors_default_hooks
"""Put a pack and an unpack hook in force."""


def take_off_all(transfers: object) -> None:
    """Take off all hooks whose owners have these ``transfers``: of one manager."""
    take_off(lambda pack: getattr(owner_of(pack), "transfers", None) is transfers, all_of_them=True)
