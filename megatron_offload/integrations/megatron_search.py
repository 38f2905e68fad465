"""Rows that a Megatron job finds by its own steps: the chunks of a rank are one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.autotune.followed import ADVICE
from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.core.row_config import EXPERTS, MOE_ACT, RowConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.integrations.megatron_recompute import is_known_activation
from megatron_offload.integrations.megatron_rows import RERUN, mark_layers
from megatron_offload.model_map.module_hooks import expression_of, hooks_of, is_own_hook
from megatron_offload.model_map.sites import Site, foreign_class, modules_of

_logger = logging.getLogger(__name__)

_MOST_EMPTY = 8  # so many steps without a chunk are no evaluation before training

_WITHIN = {
    "attention": {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "layer"},
    "mlp": {
        *("mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "layer"),
        *("expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "shared_experts"),
    },
}
"""Of the parts of a layer, names in ``offload_modules`` of which each lets it be offloaded."""


class MegatronSearch(RowSearch):
    """Finds rows in the chunks of a rank, which join one after the other; a manager's ``tuner``.

    Attributes:
        is_scheduled: whether a schedule of Megatron's has run a backward.
    """

    def __init__(self, manager: PipelineOffloadManager) -> None:
        super().__init__((), manager, lambda: None)

    def begin(self, manager: PipelineOffloadManager) -> None:
        """Begin anew, between two steps, with what the manager's configuration leaves open."""
        self._models.clear()
        self._followed: list[RowConfig] = []
        self.is_scheduled = False
        self._has_joined, self._num_empty = False, 0
        super().begin(manager)

    def join(
        self, model: nn.Module, config: Any, hook: Callable[[], object]
    ) -> list[RemovableHandle]:
        """Look for rows in a chunk too, if that is left open; ``hook`` sets those of all chunks."""
        manager = self.manager
        given = manager.config
        if self._has_joined and not self.is_of(model):
            self.add(model)
        elif not (self._has_joined or self.is_converged):
            goes_around = _what_goes_around(config, is_replayed=given.whole_step_graph)
            if manager.learner.is_ruled:
                manager.learner.follow_rules()  # the model's own settings say what is kept
                self.is_converged = True
            elif goes_around:
                why = f"{goes_around} calls parts of layers, so that no rows can be found"
                self._stop(why, ADVICE, keeps_open=True)
            else:
                names = config.offload_modules
                if "modules" in given.model_fields_set:
                    names = [x for x in names if any(fnmatchcase(x, one) for one in given.modules)]
                self._may_offload = partial(_is_named, names)
                how = config.recompute_granularity, config.recompute_method
                self._has_layers = how != ("full", "uniform")
                self.loss_is_by_rows = lambda: given.names_loss
                self._has_joined = True
                self.serve(hook)
                self.add(model)
        handles = hooks_of(RowSearch, model)
        if self._has_joined:
            handles.append(self.hook_end(model))
        return handles

    def _sites(self) -> dict[str, Site]:
        """Return what others have, and the activations of grouped experts."""
        found, named = super()._sites(), self._named_recompute
        experts = {x: site for x, site in found.items() if site.name.endswith(EXPERTS)}
        modules = modules_of(experts)
        # It empties what it frees, and backward must be as Megatron's schedules have it.
        may = self.is_scheduled and (named is None or "mlp_act" in named)
        may &= not (
            self.manager.config.whole_step_graph or any(map(foreign_class, self._models.values()))
        )
        if not may or any(vars(module).get(RERUN) for module in modules.values()):
            return found
        for path, module in modules.items():
            config, behind = getattr(module, "config", None), getattr(module, "linear_fc2", None)
            own, is_quantised = vars(module), any(getattr(config, x, None) for x in ("fp8", "fp4"))
            is_known = RERUN in own and is_known_activation(own.get("activation_func"))
            if is_known and behind is not None and not (is_quantised or _has_hooks(module)):
                found[f"{path}.linear_fc2"] = Site(experts[path].layer, MOE_ACT, behind)
        return found

    def _follow_in_library(self, rows: Sequence[RowConfig]) -> None:
        rows = [row for row in rows if row.site == MOE_ACT]
        if rows != self._followed:
            self._followed = rows
            for model in self._models.values():
                mark_layers(model, rows)

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Look back at the step that has ended, and prepare for the next."""
        super().__call__(manager)
        if not self._has_joined:  # there may be no chunk on this rank
            self._num_empty += 1
            self.is_converged |= self._num_empty > _MOST_EMPTY


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module or a part has hooks of others than Megatron, or all modules have."""
    tables = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    for part in module.modules():
        tables += [part._forward_hooks, part._forward_pre_hooks]
    hooks = (hook for table in tables for hook in table.values())
    return not all(is_own_hook(x) or f"{x.__module__}".startswith("megatron.core.") for x in hooks)


def _what_goes_around(config: Any, *, is_replayed: bool) -> str:
    """Return what of a job's settings doesn't call its layers as modules, as graphs of these."""
    names = ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl")
    names = ("overlap_moe_expert_parallel_comm", *(() if is_replayed else names))
    on = (name for name in names if getattr(config, name, None) not in (None, False, "none"))
    return next(on, "")


def _is_named(names: Collection[str], site: str, path: str) -> bool:
    """Whether names of marked groups, or patterns, lie in a site: so a user wants it offloaded."""
    parts = _WITHIN.values() if site == "layer" else [_WITHIN[site.partition(".")[0]]]
    if all(part.intersection(names) for part in parts):
        return True
    expressions = [expression_of(name) for name in names if "." in name or "*" in name]
    return any(expression.fullmatch(path.partition(".")[2]) for expression in expressions)
