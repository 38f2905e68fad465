"""What TransformerEngine's modules save of their own, where no hook of a module gets to.

Quantised weights are kept on the device, the first step included. With FP8 a module saves quantised
copies of its weights like any tensor, unless TransformerEngine's own offload is on, which would
choose other kernels, and with them other bits. So none of its flags is touched: what its functions
return for a weight is marked.

The engine asks for that at each chunk, because the library may be imported at any time. What fused
layers recompute is `megatron_offload.recompute.transformer_engine`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_offload.engine.marks import mark_everywhere
from megatron_offload.engine.patches import PatchStack
from megatron_offload.engine.subclasses import inner_tensors

_MODULES = tuple(
    f"transformer_engine.pytorch.module.{name}"
    for name in ("base", "linear", "grouped_linear", "layernorm_linear", "layernorm_mlp")
)
_PREPARE = "_prepare_weights_for_grouped_tensor_gemm"

_patches = PatchStack()


def mark_not_offload(*tensors: Any) -> None:
    """Keep tensors on the device, what they consist of, and all that shares its storage."""
    for tensor in (*tensors, *inner_tensors(tensors)):
        if isinstance(tensor, torch.Tensor):
            mark_everywhere(tensor)


def look_inside() -> None:
    """Mark what the modules quantise of weights, once they are imported.

    A second call changes nothing, and one before TransformerEngine's import costs a look.
    """
    if _patches or not hasattr(sys.modules.get(_MODULES[-1]), "LayerNormMLP"):
        return
    modules = [sys.modules.get(name) for name in _MODULES]
    base, _, grouped, *_ = modules
    for owner, name, call in (
        *((module, "quantize_weight", _quantize) for module in modules[1:]),
        (getattr(grouped, "_GroupedLinear", None), _PREPARE, _quantize),
        # In earlier versions a method of all modules.
        (getattr(base, "TransformerEngineBaseModule", None), "get_weight_workspace", _quantize),
    ):
        if owner is not None and name in vars(owner):
            _patches.wrap(owner, name, call)


uninstall = _patches.undo
"""Undoes the patches of `look_inside`; the next chunk sets them again."""


def _quantize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    mark_not_offload(*tree_leaves(result))
    return result
