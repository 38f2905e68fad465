"""What of megatron-core's model backward recomputes, and where its code has a place to say so.

Patches of megatron-core's functions call the originals and report to the process's manager how the
output was made. Norms are sites of a model; what TransformerEngine fuses is reported by
`megatron_offload.recompute.transformer_engine`.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from megatron_offload.config import LAYER_INPUT
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.integrations.megatron_loss import vocabulary_loss
from megatron_offload.recompute.patches import Call
from megatron_offload.recompute.recipes import add_recipe

_in_segments: list[nn.Module] = []
"""The module whose layers run in checkpoints now, where the inputs of these are groups."""

keeps_activation: WeakSet[nn.Module] = WeakSet()
"""MLPs and experts of layers whose activation no row recomputes, though rows recompute others'."""

_kept: list[nn.Module] = []
"""Of these the one whose forward runs."""

_manager = PipelineOffloadManager.get_instance


# What is called in the place of megatron-core's functions: each is given its own first.


def _noting(original: Call, *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    if "mlp_act" in _manager().recompute and not _kept:
        # For its own backward each saves its input, unless a flag says in fp8 or on the host.
        holds = not any(one is True for one in (*args, *kwargs.values()))
        add_recipe(
            _manager().recorded_chunk(), output, original, args, kwargs, unit="mlp_act", holds=holds
        )
    return output


def _by_segments(original: Call, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Distinguish checkpoints of full recompute from those of parts of a layer."""
    on = self.config.fine_grained_activation_offloading
    if not on or LAYER_INPUT not in self.config.offload_modules:
        return original(self, *args, **kwargs)
    _in_segments.append(self)
    try:
        return original(self, *args, **kwargs)
    finally:
        _in_segments.pop()


def _grouping(original: Call, *args: Any, **kwargs: Any) -> Any:
    """Make a group of the hidden states that a checkpoint of whole layers keeps, and of no more."""
    if not (_in_segments and torch.is_grad_enabled()):
        return original(*args, **kwargs)
    hidden, *others = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    manager = _manager()
    for mask_or_table in others:
        manager.mark_not_offload(mask_or_table)
    start_group(manager, hidden, LAYER_INPUT)
    with manager:
        outputs = original(*args, **kwargs)
    # Schedules hold what they have received until its backward, and read its gradient alone.
    received = [hidden] if hidden is getattr(_in_segments[-1], "input_tensor", None) else []
    return commit_group(manager, outputs, LAYER_INPUT, received)


def is_known_activation(activate: Any) -> bool:
    """Whether an activation has the same effect each time that it runs."""
    is_of_torch = activate in (nn.functional.gelu, nn.functional.silu)
    return is_of_torch or getattr(activate, "__module__", "") == "megatron.core.activations"


def _noting_activation(original: Call, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Note the recipe of an MLP's activation, where Megatron calls it by itself and it is known."""
    if self in keeps_activation and not _kept:
        _kept.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _kept.clear()
    manager, own, config = _manager(), vars(self), self.config
    is_other = (  # fused, or not called by this name, or compared with what it may be
        config.bias_activation_fusion or config.use_te_activation_func or config.gated_linear_unit
    ) or getattr(config, "use_fused_weighted_squared_relu", False)
    activate: Any = None if torch.compiler.is_compiling() else own.get("activation_func")
    may = manager.may_recompute("mlp_act")
    if is_other or not (may and is_known_activation(activate) and manager.records()):
        return original(self, *args, **kwargs)
    own["activation_func"] = partial(_noting, activate)
    try:
        return original(self, *args, **kwargs)
    finally:
        own["activation_func"] = activate


PATCHES: dict[str, Call] = {
    # Activations with bias, gate and weights fused.
    "fusions.fused_bias_gelu.bias_gelu_impl": _noting,
    "fusions.fused_bias_geglu.bias_geglu_impl": _noting,
    "fusions.fused_bias_geglu.weighted_bias_quick_geglu_impl": _noting,
    "fusions.fused_bias_swiglu.bias_swiglu_impl": _noting,
    "fusions.fused_bias_swiglu.weighted_bias_swiglu_impl": _noting,
    "fusions.fused_weighted_squared_relu.weighted_squared_relu_impl": _noting,
    "tensor_parallel.random.checkpoint": _grouping,
    "extensions.transformer_engine.te_checkpoint": _grouping,
    "recompute.checkpointed_forward": _by_segments,
    "tensor_parallel.cross_entropy.vocab_parallel_cross_entropy": vocabulary_loss,
    "transformer.mlp:MLP.forward": _noting_activation,
    "transformer.moe.experts:TEGroupedMLP.forward": _noting_activation,
    "transformer.transformer_block:TransformerBlock._checkpointed_forward": _by_segments,
    "transformer.multi_token_prediction:MultiTokenPredictionLayer._checkpointed_forward": (
        _by_segments
    ),
}
"""By the name of a function or method of megatron-core's what is called in its place."""
