"""Exact, bounded, hidden activation offload for pipeline-parallel transformers.

Public names only. ``group_start`` and ``group_commit`` mark a layer group in model code; the
manager catches what autograd saves in between:

    from megatron_offload import PipelineOffloadManager, group_commit, group_start

    manager = PipelineOffloadManager.get_instance()
    with manager.step():
        x = group_start(x, "mlp")
        with manager:
            x = mlp(x)
        x = group_commit(x, "mlp")
        loss(x).backward()

`offload_modules` makes groups of any module by its name instead. What takes its time is imported
when it is first asked for, so that a command that only plans starts at once.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_offload.errors import did_you_mean

__version__ = "0.3.0"

if _level := os.environ.get("MEGATRON_OFFLOAD_LOG", ""):
    _logger, _known = logging.getLogger(__name__), logging.getLevelNamesMapping()
    _logger.addHandler(logging.StreamHandler())
    _logger.propagate = False
    if _level.upper() in _known:
        _logger.setLevel(_level.upper())
    else:
        _nearest = did_you_mean(_level.lower(), map(str.lower, _known))
        _logger.warning("MEGATRON_OFFLOAD_LOG is a level, and not %r%s", _level, _nearest)

if TYPE_CHECKING:
    from megatron_offload.config import OffloadConfig as OffloadConfig
    from megatron_offload.engine.manager import PipelineOffloadManager as PipelineOffloadManager
    from megatron_offload.frontends.modules import offload_modules as offload_modules
    from megatron_offload.frontends.ratio import CPUOffload as CPUOffload
    from megatron_offload.frontends.ratio import get_tensor_memory as get_tensor_memory
    from megatron_offload.frontends.whole_model import NoOpManager as NoOpManager
    from megatron_offload.frontends.whole_model import OffloadActivations as OffloadActivations
    from megatron_offload.frontends.whole_model import (
        get_act_offloading_ctx_manager as get_act_offloading_ctx_manager,
    )
    from megatron_offload.megatron_api.names import group_commit as group_commit
    from megatron_offload.megatron_api.names import group_start as group_start
    from megatron_offload.model_map.mapping import map_model as map_model
    from megatron_offload.recompute.loss import cross_entropy as cross_entropy
    from megatron_offload.recompute.recipes import recomputable as recomputable

_HOMES = {
    "CPUOffload": "frontends.ratio",
    "NoOpManager": "frontends.whole_model",
    "OffloadActivations": "frontends.whole_model",
    "OffloadConfig": "config",
    "PipelineOffloadManager": "engine.manager",
    "cross_entropy": "recompute.loss",
    "get_act_offloading_ctx_manager": "frontends.whole_model",
    "get_tensor_memory": "frontends.ratio",
    "group_commit": "megatron_api.names",
    "group_start": "megatron_api.names",
    "map_model": "model_map.mapping",
    "offload_modules": "frontends.modules",
    "recomputable": "recompute.recipes",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
