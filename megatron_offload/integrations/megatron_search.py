"""Rows that a Megatron job finds by its own steps: the chunks of a rank are one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.autotune.row_search import ADVICE, RowSearch
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.module_hooks import ModuleHook, expression_of, hooks_of
from megatron_offload.files.renames import OldAttributes
from megatron_offload.machine.job_ranks import rank_in
from megatron_offload.planning.found import NAME
from megatron_offload.planning.policy import ModulesPolicy

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


class MegatronSearch(OldAttributes):
    """Finds rows in the chunks of a rank, which come one after the other; a manager's ``tuner``.

    Attributes:
        by_rows: what looks for them, once there is a chunk.
        is_converged: whether no more steps are looked at.
        said: how it has ended, in one line.
    """

    def __init__(self) -> None:
        self.by_rows: RowSearch | None = None
        self.is_converged, self.said, self._num_empty = False, "", 0

    def begin(self, manager: PipelineOffloadManager) -> None:
        """Begin anew, between two steps, with what the manager's configuration leaves open."""
        self.by_rows, self.said, self._num_empty = None, "", 0
        self.is_converged = manager.config.tuned_policy is None
        if not self.is_converged:
            manager.learner.open()

    def save(self, folder: str | Path) -> None:
        """Leave the plans of rows that were found, in the place of any that are there."""
        if self.by_rows is not None:
            self.by_rows.save(folder)
        elif rank_in() == 0:
            (Path(folder) / NAME).unlink(missing_ok=True)

    def __call__(self, manager: PipelineOffloadManager) -> None:
        """Look back at the step that has ended, and prepare for the next."""
        if self.by_rows is not None:
            self.by_rows(manager)
            self.is_converged, self.said = self.by_rows.is_converged, self.by_rows.said
        else:  # there may be none on this rank
            self._num_empty += 1
            self.is_converged |= self._num_empty > _MOST_EMPTY

    def end(self, why: str) -> None:
        """Look for nothing, and say so once: what the device has no room for is offloaded."""
        if not self.is_converged:
            self.is_converged = True
            what = "only what the device has no room for is offloaded"
            self.said = f"megatron-offload: {what}: {why}{ADVICE}"
            if rank_in() == 0:
                _logger.warning("%s", self.said)


def search_of(manager: PipelineOffloadManager) -> RowSearch | None:
    """Return what looks for rows in a manager's steps."""
    tuner = manager.tuner
    return tuner.by_rows if isinstance(tuner, MegatronSearch) else None


def join_search(
    model: nn.Module, config: Any, manager: PipelineOffloadManager, hook: Callable[[], object]
) -> list[RemovableHandle]:
    """Look for rows in a chunk too, if that is left open; ``hook`` sets those of all chunks."""
    search, tuner, given = search_of(manager), manager.tuner, manager.config
    if search is not None and not search.is_of(model):
        search.add(model)
    elif search is None and isinstance(tuner, MegatronSearch) and not tuner.is_converged:
        goes_around = _what_goes_around(config, is_replayed=given.whole_step_graph)
        if given.policy is None and manager.learner.policy != ModulesPolicy():
            manager.learner.follow_rules()  # the model's own settings say what is kept
            tuner.is_converged = True
        elif goes_around:
            tuner.end(f"{goes_around} calls parts of layers, so that no rows can be found")
        else:
            names = config.offload_modules
            if "modules" in given.model_fields_set:
                names = [x for x in names if any(fnmatchcase(x, one) for one in given.modules)]
            may_offload, may_rerun = partial(_is_named, names), partial(_may_rerun, config)
            how = config.recompute_granularity, config.recompute_method
            has_layers = how != ("full", "uniform")
            own = None, may_offload, may_rerun
            search = RowSearch([model], manager, hook, *own, has_layers=has_layers)
            search.loss_is_by_rows = lambda: given.names_loss
            tuner.by_rows = search
    handles = hooks_of(RowSearch, model)
    if search is not None:
        end = ModuleHook(partial(_end, search))
        handles.append(model.register_forward_hook(end, always_call=True))
    return handles


def _what_goes_around(config: Any, *, is_replayed: bool) -> str:
    """Return what of a job's settings doesn't call its layers as modules, as graphs of these."""
    names = ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl")
    names = ("overlap_moe_expert_parallel_comm", *(() if is_replayed else names))
    on = (name for name in names if getattr(config, name, None) not in (None, False, "none"))
    return next(on, "")


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
