"""What TransformerEngine's modules save of their own, where no hook of a module gets to.

What fused layers make and save within one autograd function is recomputed: the output of the norm
before a linear layer, and that of the activation between two. The names by which the modules call
what makes them stand for functions that note how it was made.

Quantised weights are kept on the device, the first step included. With FP8 a module saves quantised
copies of its weights like any tensor, unless TransformerEngine's own offload is on, which would
choose other kernels, and with them other bits. So none of its flags is touched: what its functions
return for a weight is marked.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.hooks import is_in_backward, owner_of_hooks
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import mark_everywhere
from megatron_offload.memory.nested import inner_tensors
from megatron_offload.recompute.patches import PatchStack, around
from megatron_offload.recompute.recipes import add_recipe

_MODULES = tuple(
    f"transformer_engine.pytorch.module.{name}"
    for name in ("base", "linear", "grouped_linear", "layernorm_linear", "layernorm_mlp")
)
_PREPARE = "_prepare_weights_for_grouped_tensor_gemm"
_NORM_TAKES = ("inputmat", "ln_out", "ln_weight", "ln_bias", "eps", "output_quantizer")
"""The first parameters of ``apply_normalization`` in the versions that are known, 2.0 to 2.20."""

_patches = PatchStack()


def is_quantising() -> bool:
    """Whether TransformerEngine's modules compute in 8 bits or fewer here and now."""
    home = sys.modules.get("transformer_engine.pytorch.quantization") or sys.modules.get(
        "transformer_engine.pytorch.fp8"
    )
    manager = getattr(home, "FP8GlobalStateManager", None)
    return manager is not None and bool(manager.is_fp8_enabled())


def mark_not_offload(*tensors: Any) -> None:
    """Keep tensors on the device, what they consist of, and all that shares its storage."""
    for tensor in (*tensors, *inner_tensors(tensors)):
        if isinstance(tensor, torch.Tensor):
            mark_everywhere(tensor)


def install() -> None:
    """Patch the modules where TransformerEngine is imported, which may come at any time.

    A second call changes nothing, and one before that import costs a look. Only outputs that aren't
    quantised are noted: a quantiser's scales may change with every call.
    """
    if _patches or not hasattr(sys.modules.get(_MODULES[-1]), "LayerNormMLP"):
        return
    base, *modules = map(sys.modules.get, _MODULES)
    _, grouped, *fused = modules
    for owner, name, call in (
        *((module, "quantize_weight", _quantize) for module in modules),
        (getattr(grouped, "_GroupedLinear", None), _PREPARE, _quantize),
        # In earlier versions a method of all modules.
        (getattr(base, "TransformerEngineBaseModule", None), "get_weight_workspace", _quantize),
        (fused[-1], "_act_func", _find_activation),
        (fused[-1], "bias_gelu_fused", _activate),
    ):
        if owner is not None and name in vars(owner):
            _patches.wrap(owner, name, call)
    for module in fused:
        normalize = getattr(module, "apply_normalization", None)
        takes = () if normalize is None else inspect.signature(normalize).parameters
        if tuple(takes)[: len(_NORM_TAKES)] == _NORM_TAKES:
            _patches.wrap(module, "apply_normalization", _normalize)


uninstall = _patches.undo
"""Puts back what `install` found; the next chunk patches it again."""

PipelineOffloadManager.at_chunk.append(lambda _: install())


def _note(output: Any, function: Callable[..., Any], *inputs: Any, unit: str) -> None:
    """Note for the chunk whose hooks are in force how an output was made.

    What that takes the layer saves for its own backward as well, if there is one.
    """
    owner = owner_of_hooks()
    chunk = owner if isinstance(owner, ChunkOffloadHandler) else getattr(owner, "chunk", None)
    if chunk is None or unit not in chunk.rules.configured or is_in_backward():
        return
    holds = isinstance(owner, ChunkOffloadHandler)
    add_recipe(chunk, output, function, inputs, unit=unit, holds=holds)


def _normalize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if len(args) > 5 and not kwargs and args[1] is None and args[5] is None:
        _note(result[0], lambda *again: original(*again)[0], *args, unit="norm")
    return result


def _find_activation(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    forward, *backward = original(*args, **kwargs)
    return (_noting(forward), *backward)


def _activate(original: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    made = original(x, *args, **kwargs)
    _note(made, functools.partial(original, **kwargs), x, *args, unit="mlp_act")
    return made


_noting = functools.cache(functools.partial(around, call=_activate))


def _quantize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    mark_not_offload(*tree_leaves(result))
    return result
