"""What TransformerEngine's modules save of their own, where no hook of a module gets to.

Quantised weights stay on the device, the first step included. With FP8 a module saves quantised
copies of its weights like any tensor, unless TransformerEngine's own offload is on, which would
choose other kernels, and with them other bits. So none of its flags is touched: what its functions
return for a weight is marked.

What fused layers make and save within one autograd function is made again: the output of the norm
before a linear layer, and that of the activation between two. The names by which the modules call
what makes them stand for functions that tell of it.

The engine asks for both at each chunk, because the library may be imported at any time.
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
from megatron_offload.engine.exchanges import Exchanges, around
from megatron_offload.engine.hooks import is_in_backward, owner_of_hooks
from megatron_offload.engine.marks import mark_everywhere
from megatron_offload.engine.subclasses import plain_parts

_MODULES = tuple(
    f"transformer_engine.pytorch.module.{name}"
    for name in ("base", "linear", "grouped_linear", "layernorm_linear", "layernorm_mlp")
)
_NORM_TAKES = ("inputmat", "ln_out", "ln_weight", "ln_bias", "eps", "output_quantizer")
"""The first parameters of ``apply_normalization`` in the versions that are known, 2.0 to 2.20."""

_PREPARE = "_prepare_weights_for_grouped_tensor_gemm"

_exchanged = Exchanges()


def mark_not_offload(*tensors: Any) -> None:
    """Keep tensors on the device, what they consist of, and all that shares its storage."""
    for tensor in (*tensors, *plain_parts(tensors)):
        if isinstance(tensor, torch.Tensor):
            mark_everywhere(tensor)


def look_inside() -> None:
    """Mark what the modules quantise of weights, and let fused layers tell, once they are imported.

    A second call changes nothing, and one before TransformerEngine's import costs a look. Only what
    isn't quantised is told of: a quantiser's scales may change with every call.
    """
    if _exchanged or not hasattr(sys.modules.get(_MODULES[-1]), "LayerNormMLP"):
        return
    modules = [sys.modules.get(name) for name in _MODULES]
    base, _, grouped, *fused = modules
    for owner, name, call in (
        *((module, "quantize_weight", _quantize) for module in modules[1:]),
        (getattr(grouped, "_GroupedLinear", None), _PREPARE, _quantize),
        # In earlier versions a method of all modules.
        (getattr(base, "TransformerEngineBaseModule", None), "get_weight_workspace", _quantize),
        (fused[-1], "_act_func", _find_activation),
        (fused[-1], "bias_gelu_fused", _activate),
    ):
        if owner is not None and name in vars(owner):
            _exchanged.wrap(owner, name, call)
    for module in fused:
        normalize = getattr(module, "apply_normalization", None)
        takes = () if normalize is None else inspect.signature(normalize).parameters
        if tuple(takes)[: len(_NORM_TAKES)] == _NORM_TAKES:
            _exchanged.wrap(module, "apply_normalization", _normalize)


uninstall = _exchanged.undo
"""Puts back what `look_inside` found; the next chunk exchanges it again."""


def _quantize(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = theirs(*args, **kwargs)
    mark_not_offload(*tree_leaves(result))
    return result


def _tell(output: Any, function: Callable[..., Any], *inputs: Any, unit: str) -> None:
    """Tell the chunk whose hooks are in force how an output was made."""
    owner = owner_of_hooks()
    chunk = owner if isinstance(owner, ChunkOffloadHandler) else getattr(owner, "chunk", None)
    if chunk is None or unit not in chunk.rules.configured or is_in_backward():
        return
    if type(output) is torch.Tensor:
        chunk.add_recipe(output, function, inputs, unit)


def _normalize(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = theirs(*args, **kwargs)
    if len(args) > 5 and not kwargs and args[1] is None and args[5] is None:
        _tell(result[0], lambda *again: theirs(*again)[0], *args, unit="norm")
    return result


def _find_activation(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    forward, *backward = theirs(*args, **kwargs)
    return (_telling(forward), *backward)


def _activate(theirs: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    made = theirs(x, *args, **kwargs)
    _tell(made, functools.partial(theirs, **kwargs), x, *args, unit="mlp_act")
    return made


_telling = functools.cache(functools.partial(around, call=_activate))
