"""Rows that a Megatron job finds by its own steps: the chunks of a rank are one model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.autotune.loop import MeasuredLoop
from megatron_offload.autotune.row_search import RowSearch, leaves_rows_open
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.module_hooks import ModuleHook, expression_of, hooks_of
from megatron_offload.planning.policy import ModulesPolicy

_WITHIN = {
    "attention": {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "layer"},
    "mlp": {
        *("mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "layer"),
        *("expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "shared_experts"),
    },
}
"""Of the parts of a layer, names in ``offload_modules`` of which each lets it be offloaded."""


def search_of(manager: PipelineOffloadManager) -> RowSearch | None:
    """Return what looks for rows in a manager's steps."""
    loop = manager.tuner
    found = loop.by_rows if isinstance(loop, MeasuredLoop) else None
    return found if isinstance(found, RowSearch) else None


def join_search(
    model: nn.Module, config: Any, manager: PipelineOffloadManager, hook: Callable[[], object]
) -> list[RemovableHandle]:
    """Look for rows in a chunk too, if that is left open; ``hook`` sets those of all chunks."""
    search, loop = search_of(manager), manager.tuner
    if search is not None and not search.is_of(model):
        search.add(model)
    elif (
        search is None and isinstance(loop, MeasuredLoop) and _may_take_rows(loop, config, manager)
    ):
        names, given = config.offload_modules, manager.config
        if "modules" in given.model_fields_set:
            names = [x for x in names if any(fnmatchcase(x, one) for one in given.modules)]
        give_up = partial(_plan_by_groups, loop)
        may_offload, may_rerun = partial(_is_named, names), partial(_may_rerun, config)
        search = RowSearch([model], manager, hook, give_up, None, may_offload, may_rerun)
        search.loss_is_by_rows = lambda: given.names_loss
        loop.by_rows = search
    own = hooks_of(RowSearch, model)
    if search is not None:
        end = ModuleHook(partial(_end, search))
        own.append(model.register_forward_hook(end, always_call=True))
    return own


def _may_take_rows(loop: MeasuredLoop, config: Any, manager: PipelineOffloadManager) -> bool:
    """Whether a job's layers are called as modules, and nothing says what becomes of them."""
    own_rules = manager.config.policy is None and manager.learner.policy != ModulesPolicy()
    goes_around = (
        config.recompute_granularity == "full"
        or getattr(config, "overlap_moe_expert_parallel_comm", False)
        or getattr(config, "cuda_graph_impl", "none") not in ("none", None)
        or getattr(config, "enable_cuda_graph", False)
        or getattr(config, "external_cuda_graph", False)
    )
    return loop.may_take_rows and leaves_rows_open(manager) and not (own_rules or goes_around)


def _may_rerun(config: Any, site: str) -> bool:
    """Whether what a site does holds no collective.

    A rank alone may find that a site can't run again, by the bits of its kernels, hooks or memory.
    Others would then wait for it.
    """
    size = config.tensor_model_parallel_size
    if site.endswith(".experts"):
        return (getattr(config, "expert_tensor_parallel_size", None) or size) == 1
    is_moe = config.num_moe_experts is not None
    in_attention = size > 1 or config.context_parallel_size > 1
    in_mlp = size > 1 or (is_moe and config.expert_model_parallel_size > 1)
    return not {"attention": in_attention, "mlp": in_mlp}.get(site, in_attention or in_mlp)


def _plan_by_groups(loop: MeasuredLoop, manager: PipelineOffloadManager) -> None:
    loop.may_take_rows = False
    loop.begin(manager)


def _is_named(names: Collection[str], site: str, path: str) -> bool:
    """Whether names of marked groups, or patterns, lie in a site: so a user wants it offloaded."""
    parts = _WITHIN.values() if site == "layer" else [_WITHIN[site.partition(".")[0]]]
    if all(part.intersection(names) for part in parts):
        return True
    expressions = [expression_of(name) for name in names if "." in name or "*" in name]
    return any(expression.fullmatch(path.partition(".")[2]) for expression in expressions)


def leave_search() -> None:
    """Look at no more forwards, as Megatron has its own handler again."""
    manager = PipelineOffloadManager.instance
    search = None if manager is None else search_of(manager)
    if search is not None:
        search.close()


def begin_forward(model: nn.Module, manager: PipelineOffloadManager) -> None:
    """Note that the forward of a chunk begins."""
    search = search_of(manager)
    if search is not None:
        search.forward_begins(model)


def _end(search: RowSearch, model: nn.Module, args: Any, output: Any) -> None:
    search.forward_ends(has_failed=output is None)
