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
from megatron_offload.engine.hooks import graph_break, is_in_backward, is_recording
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
    "nothing is {} so far of what was named, as none of those sites was called with gradients: the "
    "model may have been evaluated alone, another one be called, hooks of another checkpoint be "
    "around them, or graphs of torch.compile be, inside which no site is recomputed, and which "
    "lack hooks if they were made before this context (torch._dynamo.reset() in front of it helps "
    "then). This is said once"
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


def done_nowhere(groups: AutomaticGroups) -> str:
    """Say that no forward has come by what a user has named, behind one that ends; or nothing."""
    forward, manager = groups.forward, groups.manager
    if forward is None or manager.rows_are_own or manager.is_searching or not is_recording():
        return ""
    if not manager.do_offload:
        return ""
    named = [x for x in manager.rows or () if not x.min_tokens and x not in manager.idle_rows]
    has_any = forward.chunk.position is not None or manager.decisions.committed
    if any(row.offload for row in named) and not (has_any or manager.last_step.by_name):
        return _NO_CALL.format("offloaded")
    recomputes = any(row.recompute for row in named) or (manager.rows is None and manager.recompute)
    return _NO_CALL.format("recomputed") if recomputes and not manager.has_come_by_site else ""


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
