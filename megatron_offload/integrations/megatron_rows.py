"""Rows about groups that Megatron's own layers mark, by flags that each layer has of its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megatron_offload.config import LAYER_INPUT, MEGATRON_MODULES
from megatron_offload.core.row_config import LOSS, MOE_ACT, UNITS, RowConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError
from megatron_offload.integrations.megatron_recompute import keeps_activation
from megatron_offload.model_map.module_hooks import ModuleHook, hooks_of, named_modules
from megatron_offload.model_map.offload_site import LargestTensors
from megatron_offload.model_map.sites import emptied_inside
from megatron_offload.model_map.structure import layers_of
from megatron_offload.recompute.patches import Call

_logger = logging.getLogger(__name__)

NOTES = (
    "hold linear layers of Megatron's own, which note on their saved weights that "
    "gradient_accumulation_fusion has summed a gradient; overlap_grad_reduce asks for that, and "
    "what autograd saves loses it under hooks. Set gradient_accumulation_fusion=False or "
    "overlap_grad_reduce=False"
)

WITHOUT_WEIGHTS = {"core_attn", "attn_norm", "mlp_norm", "mlp_act", "moe_act", LAYER_INPUT}
"""Groups in which no linear layer saves its weight."""

_CORE, RERUN = "offload_core_attention", "activation_recompute"
_FLAGS = {
    **{f"offload_{site}": (site, False) for site in MEGATRON_MODULES if site != LAYER_INPUT},
    "offload_core_attn": ("", False),  # of layers of 0.19, for graphs alone
    _CORE: ("core_attn", False),
    RERUN: ("moe_act", True),
}
"""By attribute of a layer, or of a part of it, of what group it is, and whether it says that this
is recomputed by Megatron; else, that it is marked."""

_built: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""By module the flags that it was built with, where rows have changed them."""


def refuse_rows(rows: Sequence[RowConfig], model: nn.Module, *, notes: bool) -> None:
    """Refuse rows of layers that no rank has, and what Megatron's layers can't do or don't call.

    Where linear layers make ``notes`` on saved weights, those of marked groups without weights are
    left: what is watched for others are whole forwards.
    """
    config: Any = model.config
    by_parts = getattr(config, "overlap_moe_expert_parallel_comm", False)
    modules = named_modules(model) if by_parts else {}
    of_experts = [n for path, n in layers_of(modules).items() if f"{path}.mlp.router" in modules]
    of_activations = [row for row in rows if row.site == "moe_act" and row.recompute]
    for row in rows:
        num_layers = config.num_layers + (getattr(config, "mtp_num_layers", None) or 0)
        if row.last_layer >= num_layers:
            raise ConfigError(f"row {row}: there are layers 0 to {num_layers - 1}")
        if notes and row.site not in {LOSS, *WITHOUT_WEIGHTS.intersection(MEGATRON_MODULES)}:
            raise ConfigError(f"row {row}: the forwards that it watches {NOTES}")
        refusal = emptied_inside(config, row.site) if row.recompute else ""
        if row.recompute and row.site in ("layer", "mlp", "mlp.experts") and not refusal:
            numbers = [n for n in range(num_layers) if row.has_layer(n)]
            inner = (one for one in of_activations if any(map(one.has_layer, numbers)))
            refusal = next((f"row {one} is about what lies inside it" for one in inner), "")
        if refusal:
            raise ConfigError(f"row {row}: {refusal}; one of them is enough")
        is_uncalled = row.site == "mlp" and any(map(row.has_layer, of_experts))
        if by_parts and (row.site == "layer" or is_uncalled):
            raise ConfigError(
                f"row {row}: overlap_moe_expert_parallel_comm calls the parts of layers; name "
                "'attention', 'mlp.experts' or groups that these mark"
            )
        if by_parts and row.site in UNITS:
            _logger.warning("row %s recomputes what marked groups save, and no more", row)
        if row.site not in MEGATRON_MODULES:
            continue
        if row.site == LAYER_INPUT and (row.offload, row.layers) != ("all", "all"):
            raise ConfigError(f"row {row}: of what checkpoints keep rows say 'offload: all' alone")
        if row.offload and row.site not in config.offload_modules:
            raise ConfigError(f"row {row}: add {row.site!r} to offload_modules, which mark it")
        if row.recompute and (row.site != "moe_act" or not config.moe_grouped_gemm):
            raise ConfigError(
                f"row {row}: of marked groups Megatron recomputes moe_act alone, where experts are "
                "grouped (moe_grouped_gemm); 'mlp_act' is the activation of others too"
            )
        is_built_in = row.recompute and (config.fp8 or getattr(config, "fp4", None))
        if is_built_in and "moe_act" not in config.recompute_modules:
            raise ConfigError(f"row {row}: FP8 and FP4 want 'moe_act' in recompute_modules for it")


def mark_layers(model: nn.Module, rows: Sequence[RowConfig]) -> None:
    """Let layers mark, of the groups that rows name, those of the rows' layers, and no others.

    Raises:
        ConfigError: two rows are about one group of one layer.
    """
    unmark_layers(model)
    of_activations = [row for row in rows if (row.site, row.recompute) == ("mlp_act", True)]
    rows = [row for row in rows if (row.site, row.recompute) in _FLAGS.values()]
    modules = named_modules(model) if rows or of_activations else {}
    layers, used = layers_of(modules), list[RowConfig]()
    for layer, number in layers.items():
        parts = [part for path, part in modules.items() if f"{path}.".startswith(f"{layer}.")]
        if of_activations and not any(row.has_layer(number) for row in of_activations):
            keeps_activation.update(parts)
        for flag, about in _FLAGS.items():
            ours = [row for row in rows if (row.site, row.recompute) == about]
            own = [row for row in ours if row.has_layer(number)]
            if len(own) > 1:
                raise ConfigError(f"rows {own[0]} and {own[1]} are both about {layer}")
            for part in parts if ours else ():
                is_rerun = flag == _CORE and getattr(part, "checkpoint_core_attention", False)
                if flag in vars(part) and (flag == RERUN or vars(part)[flag]) and not is_rerun:
                    _mark(part, flag, own[0] if own else None)
                    used += own
    for row in rows:
        if row not in used and any(map(row.has_layer, layers.values())):
            _logger.warning(
                "row %s does nothing in this part of the model (no such module, recomputed, or "
                "experts that aren't grouped)",
                row,
            )


def _mark(module: nn.Module, flag: str, row: RowConfig | None) -> None:
    """Set a flag to what chooses the group's tensors; the interface gets it where it is a group.

    Attention tests that of its core before: there what it calls inside the group sets it.
    """
    _built.setdefault(module, {})[flag] = vars(module)[flag]
    chosen = row is not None and (row.most is None or LargestTensors(row.most))
    setattr(module, flag, chosen)
    core = getattr(module, "core_attention", None)
    if isinstance(chosen, LargestTensors) and flag == _CORE and core is not None:
        hook = ModuleHook(partial(_choose, chosen))
        hooks_of(LargestTensors, core).append(core.register_forward_pre_hook(hook))


def _choose(chosen: LargestTensors, module: nn.Module, args: Any) -> None:
    chunk = PipelineOffloadManager.get_instance().cur_forward_chunk()
    group = chunk.open_groups[-1] if chunk is not None and chunk.open_groups else None
    if group is not None and group.name == "core_attn":
        group.pick = chosen.begin()


def count_recomputed(original: Call, self: Any, hook_tensor: torch.Tensor) -> None:
    """Count what a ``CheckpointWithoutOutput`` empties because rows have asked for it."""
    parts = (part for part, built in _built.items() if RERUN in built)
    is_ours = (vars(part).get("activation_checkpoint") is self for part in parts)
    if hook_tensor.requires_grad and any(is_ours):  # else no backward recomputes it
        outputs = self.outputs or ()  # None where a graph's warmup keeps them
        stats = PipelineOffloadManager.get_instance().transfers.stats.by_name[MOE_ACT]
        stats.recomputed_bytes += sum(output.untyped_storage().nbytes() for output in outputs)
    original(self, hook_tensor)


def copy_uncompiled(original: Call) -> Call:
    """Return what gives a ``CheckpointWithoutOutput`` its outputs back: up to 0.18 a copy.

    Since, Megatron compiles an extension for that in the first backward, which takes a compiler and
    some 17 s. Where rows alone have asked for the recompute it is a copy still.
    """
    is_ours = any(RERUN in built for built in _built.values())
    is_compiled = sys.modules["megatron.core.tensor_parallel.random"]._share_storage_ext is not None
    return _copy_storage if is_ours and not is_compiled else original()


def _copy_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    source, target = recomputed.untyped_storage(), output.untyped_storage()
    target.resize_(source.nbytes())
    target.copy_(source)


def unmark_layers(model: nn.Module | None) -> None:
    """Let layers mark what they were built to mark; None is a model that has gone."""
    for module in () if model is None else model.modules():
        keeps_activation.discard(module)
        vars(module).update(_built.pop(module, {}))
        hooks_of(LargestTensors, module)
