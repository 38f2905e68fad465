"""Where a layer group begins and ends, in forward and in backward.

What follows is the first walk of ``docs/design.md``: a saved tensor, from pack to unpack. Outside a
chunk, without grad, and inside a checkpoint or its recompute both functions do nothing. Inside
`PipelineOffloadManager.step` a group that has no chunk begins one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.group import Pick
from megatron_offload.engine.hooks import graph_break
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.memory.nested import first_tensor

Tensors = TypeVar("Tensors")
Hook = Callable[[Any], None]

_NO_CHUNK = (
    "group %r was started outside a chunk, so nothing of it is offloaded: take the step inside "
    "`with manager.step():`, or call begin_chunk() before each forward; where the step is another "
    "manager's, set PipelineOffloadManager.instance to that first. This is said once"
)


@graph_break
def start_group(
    manager: PipelineOffloadManager, tensors: Tensors, name: str, pick: Pick | None = None
) -> Tensors:
    """Open a group: what autograd saves under the manager's hooks belongs to it from here on.

    Backward has left the group when the gradient of the first tensor that needs one is complete.
    A ``pick`` says which of its tensors are offloaded; None: all that can be.

    Returns:
        ``tensors`` itself, the group's inputs: one tensor, or what holds some (`first_tensor`).
    """
    chunk = chunk_of(manager, name) if manager.starts(name, is_marked=pick is None) else None
    if chunk is None:
        return tensors
    group = manager.start_group(chunk, name)
    group.pick = pick
    tensor = _first_activation(tensors)
    if tensor is None:
        return tensors
    hook = partial(manager.leave_backward, group)
    if tensor.grad_fn is None:  # a leaf, which may outlive its graph, and the hook must not
        group.unhook = tensor.register_hook(hook).remove
    else:
        _hook_gradient(tensor, hook)
    return tensors


def chunk_of(manager: PipelineOffloadManager, name: str) -> ChunkOffloadHandler | None:
    """Return the chunk of a group that starts now; None outside of all, which is said.

    A program that says nothing of its chunks inside `step` has one for all forwards between
    two backwards: what is decided by chunk, such as ``fraction``, is decided for them together.
    """
    step, chunk = manager.decisions, manager.decisions.chunk
    is_over = chunk is not None and chunk.begun_behind not in (None, len(step.backward_order))
    if chunk is None or (is_over and not chunk.open_groups):
        if not manager.is_in_step:
            manager.transfers.warn_once(_NO_CHUNK, name)
            return None
        chunk = manager.begin_chunk()
        chunk.begun_behind = len(step.backward_order)
    return chunk


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
        tensors: the group's outputs: one tensor, or what holds some (`first_tensor`).
        name: the group's name; None closes the group that was started last.
        forced_released_tensors: tensors that something else keeps alive and that are not read
            again: their storage is emptied at the release, if it is copied.
        delay: leave the copies to `PipelineOffloadManager.flush_delayed_groups`.

    Returns:
        ``tensors`` itself.
    """
    chunk = manager.cur_forward_chunk()
    group = chunk.close_group(name) if chunk is not None and manager.records() else None
    if group is None:
        return tensors
    if forced_released_tensors:
        group.force(forced_released_tensors)
    manager.commit(group, delay)
    hook_backward(tensors, partial(manager.enter_backward, group))
    return tensors


def tick(manager: PipelineOffloadManager, tensors: object, num_bytes: int) -> None:
    """Let the step's clock go by a layer without groups, now and when backward comes to its end.

    It doesn't where no backward can come, and goes by once in several over one graph.

    Args:
        manager: whose copies are released and reloaded by that clock.
        tensors: the layer's outputs, as of `commit_group`.
        num_bytes: what the clock counts.
    """
    left_in = [manager.step_number]

    def backward_comes(*_: object) -> None:
        if left_in and left_in.pop() == manager.step_number:
            manager.tick(num_bytes, True)

    if _first_activation(tensors) is not None and manager.tick(num_bytes):
        hook_backward(tensors, backward_comes)


def _first_activation(tensors: Any) -> torch.Tensor | None:
    """Return the first tensor that needs a gradient, flat ones first, but no parameter.

    Parameters outlive every graph. In place of a view whose base may have been changed since that
    base: to ask for the view's node would make it now, before others that come before it.
    """
    flat = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    tensor = first_tensor(flat, _needs_grad)
    if tensor is None or tensor._base is None or not tensor._version:
        return tensor
    return tensor._base if _needs_grad(tensor._base) else None


def _needs_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not is_parameter(tensor)


# [Note: boundaries are hooks, not nodes] An autograd function that hands its input through looks
# harmless. In front of a norm whose input also feeds the residual, it adds up the norm's own
# gradients first and the residual's last: another last bit. With nodes, 93 of 300 random programs
# came out different. A hook is called when the sum is complete.
def hook_backward(tensors: Any, hook: Hook) -> bool:
    """Call a hook when the gradient of `_first_activation` is complete; return whether it has one.

    A node's hooks run after those of its outputs: where one group ends with the tensor that the
    next begins with, backward leaves the one before it enters the other.
    """
    tensor = _first_activation(tensors)
    if tensor is None or is_functorch_wrapped_tensor(tensor) or tensor.grad_fn is None:
        return False
    base = tensor._base
    if base is not None and base.grad_fn is not None:
        # A write in place gives the view another node, and this one leaves the graph: only then
        # the gradient of the base counts, which is complete later.
        hook = partial(_instead, _hook_gradient(base, hook), hook)
    tensor.grad_fn.register_prehook(hook)
    return True


def _instead(take_off: Callable[[], object], hook: Hook, grads: object) -> None:
    take_off()
    hook(grads)


def _hook_gradient(tensor: torch.Tensor, hook: Hook) -> Callable[[], object]:
    """Hook the gradient of what is no leaf, and return what takes the hook off."""
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
        return tensor.register_hook(hook).remove
    # As `register_hook` does, but without a handle: half of its time.
    hooks: Any = OrderedDict({hook: hook})
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    return partial(hooks.pop, hook, None)
