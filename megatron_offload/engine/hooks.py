"""What autograd does in this thread, and the saved-tensor hooks in force for groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import is_grad_enabled
from torch._C import _current_graph_task_id
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)

from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.errors import StateError


def is_in_backward() -> bool:
    """Whether this thread runs a backward; a forward in there is a recompute."""
    return _current_graph_task_id() != -1


def is_recording(*, needs_grad: bool = True) -> bool:
    """Whether what is saved here and now is saved for a backward, and not recomputed.

    An autograd function saves with grad switched off; ``needs_grad`` says that this isn't one.

    Not inside a non-reentrant ``torch.utils.checkpoint``: it counts what is saved inside it in
    forward and again in the recompute, so nothing may be taken from under it; and what it drops
    needs no offload.
    """
    if _current_graph_task_id() != -1 or (needs_grad and not is_grad_enabled()):
        return False
    hooks = _top_saved_tensors_default_hooks(True)
    return hooks is None or hooks[0].__module__ != "torch.utils.checkpoint"


def refuse_mutable_saves() -> None:
    """Raise `StateError` inside ``torch.autograd.graph.allow_mutation_on_saved_tensors``.

    It keeps each saved tensor on the device and hands backward the value at the time of saving, by
    hooks that those of a group would hide from what is saved.
    """
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks and getattr(hooks[0], "__qualname__", "").startswith("_swap_with_cloned."):
        raise StateError(
            "offload was asked for inside allow_mutation_on_saved_tensors(), which keeps all that "
            "is saved on the device, so nothing would leave it; use one of the two"
        )


def owner_of_hooks() -> Any:
    """Return the object whose method is the pack hook in force; None where it is no method."""
    hooks = _top_saved_tensors_default_hooks(True)
    return owner_of(hooks[0]) if hooks else None


def owner_of(pack: Callable[..., Any]) -> Any:
    """Return the object whose method a pack hook is; None where it is no method."""
    return getattr(pack.func if isinstance(pack, partial) else pack, "__self__", None)


class HookStack:
    """The hooks of one manager, whose ``transfers`` their owners have, in order of ``with`` blocks.

    After `clear` none of them is in force, whatever cut short the code that was to take them off.
    """

    def __init__(self, transfers: object) -> None:
        self._transfers = transfers
        self._are_in_force: list[bool] = []

    def __len__(self) -> int:
        return len(self._are_in_force)

    def push(self, pack: Callable[[torch.Tensor], SavedTensor] | None) -> None:
        """Let ``pack`` record what autograd saves from here on; None leaves all as it is."""
        # First, so that none is in force that isn't known here.
        self._are_in_force.append(pack is not None)
        if pack is not None:
            _push_saved_tensors_default_hooks(pack, SavedTensor.unpack)

    def pop(self) -> None:
        """Undo the last `push`; nothing where `clear` has done it."""
        if self._are_in_force:
            if self._are_in_force[-1]:
                _pop_saved_tensors_default_hooks()
            self._are_in_force.pop()

    def clear(self) -> None:
        """Take this manager's hooks off the top of autograd's, whoever was to do that."""
        self._are_in_force.clear()
        while getattr(owner_of_hooks(), "transfers", None) is self._transfers:
            _pop_saved_tensors_default_hooks()
