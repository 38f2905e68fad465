"""What hooks of saved tensors don't see in a context's forwards: caches, and what is under others.

Torch's two methods that say so are patched as long as any context has a forward under way.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.hooks import is_in_backward
from megatron_offload.recompute.patches import PatchStack

Cache: Any = getattr(torch.utils.checkpoint, "_CachingTorchDispatchMode", None)
"""The mode in which a selective checkpoint caches what its policy saves."""

CACHED = "in the cache of a selective checkpoint, which hooks of saved tensors don't see"
"""Why that is kept."""

_NOT_SEEN = (
    "what selective checkpoints save in their cache isn't offloaded: pass "
    "respect_saved_tensors_hooks=True to checkpoint() (torch 2.14 or later). This is said once"
)

_NO_CALL = (
    "rows have offloaded nothing so far, as none of their sites was called with gradients: perhaps "
    "another model is, or graphs are that torch has compiled before this context was made and that "
    "lack its hooks (torch._dynamo.reset() in front of it helps). This is said once"
)

_watched = WeakSet[AutomaticGroups]()
_patches, _lock = PatchStack(), RLock()


def watch_unseen(groups: AutomaticGroups) -> None:
    """Warn of what is unseen in a forward that has begun, and no more where it has ended."""
    with _lock:
        _watched.add(groups)
        for one in [one for one in _watched if one.forward is None]:
            _watched.discard(one)
        if not _watched:
            _patches.undo()
        elif not _patches and Cache is not None:
            _patches.wrap(Cache, "__exit__", _note)
            _patches.wrap(saved_tensors_hooks, "__enter__", _note)


def comes_by_no_site(groups: AutomaticGroups) -> bool:
    """Whether a forward that ends has no group, and none before had, where rows say to offload."""
    forward, manager = groups.forward, groups.manager
    named = () if manager.rows_are_own else manager.rows or ()
    if forward is None or not any(row.offload and not row.min_tokens for row in named):
        return False
    has_any = forward.chunk.position is not None or manager.decisions.committed
    return not (has_any or manager.last_step.by_name) and manager.records()


def warn_of_no_call(groups: AutomaticGroups) -> None:
    """Say so once."""
    groups.manager.transfers.warn_once(_NO_CALL)


@graph_break
def _note(call: Callable[..., Any], context: Any, *exception: object) -> None:
    call(context, *exception)
    try:
        with _lock:
            inside = [one for one in _watched if one.is_inside and not is_in_backward()]
        for groups in inside:
            _note_unseen(groups, context)
    except BaseException:  # an interrupt: the program's own `with` is not entered
        if type(context) is not Cache:
            context.__exit__()
        raise


def _note_unseen(groups: AutomaticGroups, context: Any) -> None:
    forward, manager = groups.forward, groups.manager
    if type(context) is not Cache:
        manager.warn_of_others()
    elif forward is not None:
        for leaf in tree_leaves(context.storage):
            if isinstance(tensor := getattr(leaf, "val", None), torch.Tensor):
                forward.chunk.count_kept(forward.name, tensor, CACHED)
                manager.transfers.warn_once(_NOT_SEEN)
