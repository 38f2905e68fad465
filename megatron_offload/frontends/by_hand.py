"""One function of a program, by hand, whose output backward makes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.hooks import owner_of_hooks
from megatron_offload.engine.manager import PipelineOffloadManager

T = TypeVar("T")


@graph_break
def recomputable(function: Callable[..., T], *inputs: Any, preserve_rng_state: bool = True) -> T:
    """Call a cheap function, and let backward make its output again from its inputs.

    Inside a group, or `OffloadActivations` and the like, the output that autograd saves is neither
    kept nor copied; elsewhere the function is just called. The output must have memory of its own,
    and what it is made from must be saved as well: `PipelineOffloadManager.recomputable` says more,
    and ``last_step.refused_recipe_bytes`` which outputs were kept or moved all the same, and why.

    Args:
        function: returns one tensor, and does nothing else.
        *inputs: its arguments; activations must be among them, not captured by the function.
        preserve_rng_state: whether it draws random numbers, which are drawn again as they were.

    Returns:
        What the function returns.
    """
    owner = owner_of_hooks()
    manager = owner.manager if isinstance(owner, AutomaticGroups) else None
    manager = manager or PipelineOffloadManager.instance
    if manager is None:
        return function(*inputs)
    return manager.recomputable(function, *inputs, preserve_rng_state=preserve_rng_state)
