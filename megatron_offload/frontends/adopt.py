"""What each front door does with a model that it is given: marks, sites, and hooks of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.hooks import (
    graph_break,
    others_hooks,
    owner_of_hooks,
    put_on,
    take_off,
)
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.model_map.module_hooks import hook_calls, named_modules, sweep, unhook
from megatron_offload.model_map.offload_site import FindManager, LayerClock, OffloadSite
from megatron_offload.model_map.rows import find_rows
from megatron_offload.model_map.structure import layers_of
from megatron_offload.model_map.watch import RowWatch, SavedMemory
from megatron_offload.recompute.sites import recompute_modules, sites_of, unit_of

_IN_THREADS = (
    "what nn.DataParallel's threads save is kept, since a context sees its own thread alone; use "
    "DistributedDataParallel. This is said once"
)

HEADS = ("output", "lm_head", "output_layer", "embed_out", "score", "classifier", "head")
"""What libraries call the layer that makes logits: torchtune; Hugging Face and litgpt; Megatron;
GPT-NeoX; Hugging Face's classifiers; timm."""

_WRAPPED = ("module", "_orig_mod", "base_model", "model")
"""Where wrappers hold the model: data parallelism, ``torch.compile``, adapters."""


_HOOKS = frozenset({OffloadSite, LayerClock, RowWatch, SavedMemory, nn.DataParallel})
"""Whose hooks `adopt_model` sets, beside those of `recompute_modules`."""

_adopted = WeakKeyDictionary[nn.Module, "list[ref[PipelineOffloadManager]]"]()
"""By model whose hooks it has: a list of one, the last call's."""


def is_adopted_by(model: nn.Module, manager: PipelineOffloadManager) -> bool:
    """Whether a model's hooks are those that `adopt_model` has set for this manager."""
    return any(found() is manager for found in _adopted.get(model, ()))


def leave_all(manager: PipelineOffloadManager) -> None:
    """Take off all that `adopt_model` and `keep_head` have set for this manager."""
    for model, adopted in [*_adopted.items()]:
        if is_adopted_by(model, manager):
            unhook({keep_head}, model.modules())
            _leave(ref(model), adopted)


def _leave(model: ref[nn.Module], adopted: object) -> None:
    """Take off what one call has set, and a watched forward behind it, but no later call's."""
    found = model()
    if found is not None and _adopted.get(found) is adopted:
        del _adopted[found]
        modules = named_modules(found)
        recompute_modules(modules, {}, lambda: None)
        unhook(_HOOKS, modules.values())
        sweep(found.modules())


def _note_threads(find_manager: FindManager, module: nn.DataParallel, *given: object) -> None:
    if (manager := find_manager()) is not None:
        manager.transfers.stats.num_hidden_groups += len(module.device_ids)
        manager.transfers.warn_once(_IN_THREADS)


def adopt_model(
    model: nn.Module,
    manager: PipelineOffloadManager,
    find_manager: FindManager | None = None,
    *,
    groups: AutomaticGroups | None = None,
    is_part: bool = False,
) -> Callable[[], None]:
    """Keep a model's parameters and buffers, and hook what is recomputed, or named by rows.

    The hooks of an earlier call go. What is returned takes off all that are there, unless a later
    call has set them.

    Args:
        model: a model, or one of its chunks.
        manager: has what is configured.
        find_manager: returns whose forward it is; by default always ``manager``.
        groups: whose forwards are watched; by default each call of the model is one.
        is_part: as in `find_rows`.

    Raises:
        ConfigError: as `find_rows`.
    """
    _adopted[model] = adopted = [ref(manager)]
    for tensor in (*model.parameters(), *model.buffers()):
        manager.mark_not_offload(tensor)
    modules, find_manager = named_modules(model), find_manager or (lambda: manager)
    rows = find_rows(manager.rows or (), modules, unit_of, is_part=is_part)
    sites = {path: (row.site, row.min_tokens) for path, row in rows.recomputed.items()}
    if manager.rows is None:
        sites = {path: (unit, 0) for path, unit in sites_of(modules, manager.recompute).items()}
    recompute_modules(modules, sites, find_manager)
    watch = RowWatch(model, rows, find_manager) if any(rows) else None
    unhook(_HOOKS, modules.values())
    for path, module in modules.items():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            note = partial(_note_threads, find_manager)
            hook_calls(module, note, lambda *_: None, owner=nn.DataParallel)
        row = rows.offloaded.get(path)
        if row is not None and watch is not None:
            largest = watch.largest[path]
            site = OffloadSite(row.site, find_manager, largest, min_tokens=row.min_tokens)
            ends_graph = not manager.rows_are_own  # but a search ends none
            hook_calls(module, site.begin, site.end, owner=OffloadSite, ends_graph=ends_graph)
    clock = LayerClock(find_manager)
    if rows.offloaded or (is_part and any(row.offload for row in manager.rows or ())):
        for path in layers_of(modules):
            hook_calls(modules[path], clock.begin, clock.end, owner=LayerClock, is_outer=True)
    if watch is not None:
        watch.hook(is_called=groups is None)
    if groups is not None:
        groups.at_begin, groups.at_end = (watch.begin, watch.end) if watch else (None, None)
    return partial(_leave, ref(model), adopted)


def keep_head(model: nn.Module) -> bool:
    """Keep what a model's output head saves, unless hooks of others do that; False without one."""
    head = _find_head(model)
    if head is None:
        return False

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if owner_of_hooks() is not None and not others_hooks():
            put_on(_keep_head, SavedTensor.unpack)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        take_off(partial(is_, _keep_head), all_of_them=True)  # with what an interrupt has left

    hook_calls(head, enter, leave, owner=keep_head)
    return True


def _find_head(model: nn.Module) -> nn.Module | None:
    candidates = [model]
    for candidate in candidates:
        for name in HEADS:
            head = getattr(candidate, name, None)
            if not isinstance(head, nn.Module):
                head = getattr(head, "linear", None)  # a tied one is no module, and holds one
            if isinstance(head, nn.Module):
                return head
        inner = (getattr(candidate, name, None) for name in _WRAPPED)
        candidates += [x for x in inner if isinstance(x, nn.Module) and x not in candidates]
    return None


@graph_break
def _keep_head(tensor: torch.Tensor) -> SavedTensor:
    return SavedTensor(tensor, "head")
