"""Where a layer group begins and ends, in forward and in backward.

Owns `start_group` and `commit_group`, which model code calls, and the autograd hooks that tell the
manager when backward comes by. Must not know copies or pools.

Invariant: boundaries leave the autograd graph as it is. A node between a tensor and its consumers,
even one that only hands gradients through, would change the order in which the gradients of a
tensor with several consumers are summed, and with it the last bit of the result. A hook is called
when the sum is complete, and returns nothing.

Outside a chunk, without grad, and inside a checkpoint or its recompute both functions do nothing.
Inside `PipelineOffloadManager.step` a group that has no chunk begins one.
Read next: `megatron_offload.engine.manager`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron_offload.engine.graph_break import graph_break
from megatron_offload.errors import StateError

if TYPE_CHECKING:
    from megatron_offload.engine.chunk import ChunkOffloadHandler
    from megatron_offload.engine.group import OffloadGroup
    from megatron_offload.engine.manager import PipelineOffloadManager

__all__ = [
    "Tensors",
    "commit_group",
    "commit_group_of",
    "is_in_backward",
    "is_in_checkpoint",
    "refuse_mutable_saves",
    "start_group",
    "start_group_of",
]

Tensors = TypeVar("Tensors", bound=torch.Tensor | Sequence[Any] | None)


def is_in_backward() -> bool:
    """Whether this thread runs a backward; a forward in there is a recompute."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_in_checkpoint() -> bool:
    """Whether the hooks in force are those of a non-reentrant ``torch.utils.checkpoint``.

    It counts what is saved inside it in forward and again in the recompute, so nothing may be
    taken from under it; and what it drops needs no offload.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and hooks[0].__module__ == "torch.utils.checkpoint"


def refuse_mutable_saves() -> None:
    """Raise `StateError` inside ``torch.autograd.graph.allow_mutation_on_saved_tensors``.

    It keeps each saved tensor on the device and hands backward the value at the time of saving, by
    hooks that those of a group would hide from what is saved.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    name = getattr(hooks[0], "__qualname__", "") if hooks else ""
    if name.startswith("_swap_with_cloned."):
        raise StateError(
            "offload was asked for inside allow_mutation_on_saved_tensors(), which keeps all that "
            "is saved on the device, so nothing would leave it; use one of the two"
        )


@graph_break
def start_group(manager: PipelineOffloadManager, tensors: Tensors, name: str) -> Tensors:
    """Open a group: what autograd saves under the manager's hooks belongs to it from here on.

    Backward has left the group when the gradient of the first tensor that needs one is complete.

    Args:
        manager: whose current chunk gets the group.
        tensors: the group's inputs: one tensor, a tuple or list of anything, or None.
        name: the group's name.

    Returns:
        ``tensors`` itself.
    """
    chunk = manager.chunk_to_record(name)
    if chunk is not None:
        start_group_of(chunk, tensors, name)
    return tensors


@graph_break
def start_group_of(
    chunk: ChunkOffloadHandler, tensors: torch.Tensor | Sequence[Any] | None, name: str
) -> OffloadGroup | None:
    """Open a group of a given chunk; see `start_group`. Returns None where nothing is recorded."""
    if not chunk.manager.records():
        return None
    refuse_mutable_saves()
    group = chunk.start_group(name)
    tensor = _first_with_grad(tensors)
    if tensor is not None:
        handle = tensor.register_hook(partial(_leave, group))
        if tensor.is_leaf:  # it may outlive its graph, and the hook must not
            group.leaf_hook = handle
    return group


@graph_break
def commit_group(
    manager: PipelineOffloadManager,
    tensors: Tensors,
    name: str | None,
    forced_released_tensors: Sequence[torch.Tensor] | None = None,
    *,
    delay: bool = False,
) -> Tensors:
    """Close a group and issue its copies.

    Backward enters the group when the gradient of the first tensor that needs one is complete.

    Args:
        manager: whose current chunk holds the group.
        tensors: the group's outputs: one tensor, a tuple or list of anything, or None.
        name: the group's name; None closes the group that was started last.
        forced_released_tensors: tensors that something else keeps alive and that no one reads
            again: their storage is emptied at the release, if this manager has copied it.
        delay: leave the copies to `PipelineOffloadManager.flush_delayed_groups`.

    Returns:
        ``tensors`` itself.
    """
    chunk = manager.cur_forward_chunk()
    if chunk is not None:
        commit_group_of(chunk, tensors, name, forced_released_tensors, delay=delay)
    return tensors


@graph_break
def commit_group_of(
    chunk: ChunkOffloadHandler,
    tensors: torch.Tensor | Sequence[Any] | None,
    name: str | None,
    forced_released_tensors: Iterable[torch.Tensor] | None = None,
    *,
    delay: bool = False,
) -> OffloadGroup | None:
    """Close a group of a given chunk; see `commit_group`. Returns None where none is open."""
    group = chunk.close_group(name) if chunk.manager.records() else None
    if group is None:
        return None
    chunk.manager.commit(group, forced_released_tensors or (), delay=delay)
    tensor = _first_with_grad(tensors)
    if tensor is not None and tensor.grad_fn is not None:
        # A node's hooks run after those of its outputs: where one group ends with the tensor that
        # the next begins with, backward leaves the one before it enters the other.
        tensor.grad_fn.register_prehook(partial(_enter, group))
    return group


@graph_break
def _enter(group: OffloadGroup, grads: Sequence[torch.Tensor]) -> None:
    group.chunk.manager.enter_backward(group)


@graph_break
def _leave(group: OffloadGroup, grad: torch.Tensor) -> None:
    group.chunk.manager.leave_backward(group)


def _first_with_grad(tensors: torch.Tensor | Sequence[Any] | None) -> torch.Tensor | None:
    """Return the first activation that needs a gradient; parameters outlive every graph."""
    for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors or ():
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.requires_grad
            and not isinstance(tensor, torch.nn.Parameter)
        ):
            return tensor
    return None
