"""The two autograd functions that mark where a layer group begins and ends.

Owns `GroupStart`, `GroupCommit` and the functions that put them into a graph. Must not know copies
or pools; boundaries only tell the manager that the program has come by.

Invariants: a boundary returns the same values as an alias that is no view (megatron-core's pipeline
schedules refuse to free the storage of a view), and passes gradients through untouched. Outside a
chunk, without grad, and inside a backward (recompute) both are the identity.
Read next: `megatron_offload.engine.manager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from megatron_offload.engine.group import OffloadGroup
    from megatron_offload.engine.manager import PipelineOffloadManager

__all__ = ["GroupCommit", "GroupStart", "commit_group", "is_in_backward", "start_group"]

Tensors = TypeVar("Tensors", torch.Tensor, tuple[Any, ...], list[Any])


class GroupStart(torch.autograd.Function):
    """Identity whose backward says: the group's backward is over."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: OffloadGroup) -> torch.Tensor:
        """Return an alias of ``tensor`` that is no view."""
        ctx.group = group
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Leave the group."""
        ctx.group.chunk.manager.leave_backward(ctx.group)
        return grads[0], None


class GroupCommit(torch.autograd.Function):
    """Identity whose backward says: the group's data is needed now."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: OffloadGroup) -> torch.Tensor:
        """Return an alias of ``tensor`` that is no view."""
        ctx.group = group
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Enter the group's backward."""
        ctx.group.chunk.manager.enter_backward(ctx.group)
        return grads[0], None


def is_in_backward() -> bool:
    """Whether this thread runs a backward; a forward in there is a recompute."""
    return bool(torch._C._current_graph_task_id() != -1)


def start_group(manager: PipelineOffloadManager, tensors: Tensors, name: str) -> Tensors:
    """Open a group and mark its start on the first tensor that needs a gradient.

    Args:
        manager: whose current chunk gets the group.
        tensors: one tensor, or a tuple or list of anything.
        name: the group's name.
    """
    chunk = manager.cur_forward_chunk()
    if chunk is None or not manager.records():
        return tensors
    return _mark(tensors, GroupStart, chunk.start_group(name))


def commit_group(
    manager: PipelineOffloadManager,
    tensors: Tensors,
    name: str | None,
    forced_released_tensors: Sequence[torch.Tensor] | None = None,
    *,
    delay: bool = False,
) -> Tensors:
    """Close a group, issue its copies, and mark its end.

    Args:
        manager: whose current chunk holds the group.
        tensors: the group's outputs: one tensor, or a tuple or list of anything.
        name: the group's name; None closes the group that was started last.
        forced_released_tensors: tensors that something else keeps alive and that no one reads
            again: their storage is emptied at the release, if this manager has copied it.
        delay: leave the copies to `PipelineOffloadManager.flush_delayed_groups`.
    """
    chunk = manager.cur_forward_chunk()
    if chunk is None or not manager.records():
        return tensors
    group = chunk.close_group(name)
    if group is None:
        return tensors
    manager.commit(group, forced_released_tensors or (), delay=delay)
    return _mark(tensors, GroupCommit, group)


def _mark(tensors: Tensors, boundary: type[torch.autograd.Function], group: Any) -> Tensors:
    if isinstance(tensors, torch.Tensor):
        return boundary.apply(tensors, group) if tensors.requires_grad else tensors
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            marked = [*tensors]
            marked[index] = boundary.apply(tensor, group)
            if isinstance(tensors, list):
                return marked
            # A named tuple is rebuilt by its own class.
            return tensors._make(marked) if hasattr(tensors, "_make") else tuple(marked)
    return tensors
