"""What TransformerEngine's fused layers make and save within one autograd function.

The output of the norm before a linear layer, and that of the activation between two, are saved by
the function that makes them, where no hook of a module gets to. So the names by which its modules
call what makes them stand for functions that tell of it. The engine asks for that at each chunk,
because the library may be imported at any time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.exchanges import Exchanges, around, imported
from megatron_offload.engine.hooks import is_in_backward, owner_of_hooks

_MODULES = tuple(
    f"transformer_engine.pytorch.module.{name}" for name in ("layernorm_linear", "layernorm_mlp")
)
_NORM_TAKES = ("inputmat", "ln_out", "ln_weight", "ln_bias", "eps", "output_quantizer")
"""The first parameters of ``apply_normalization`` in the versions that are known, 2.0 to 2.20."""

_exchanged = Exchanges()


def tell_of_fused_outputs() -> None:
    """Let the fused layers tell, once they are imported; a second call changes nothing.

    Only what isn't quantised is told of: a quantiser's scales may change with every call.
    """
    modules = [] if _exchanged else imported(_MODULES, last="LayerNormMLP")
    for module in modules:
        normalize = getattr(module, "apply_normalization", None)
        takes = () if normalize is None else inspect.signature(normalize).parameters
        if tuple(takes)[: len(_NORM_TAKES)] == _NORM_TAKES:
            _exchanged.wrap(module, "apply_normalization", _normalize)
    for name, call in (("_act_func", _find_activation), ("bias_gelu_fused", _activate)):
        if modules and hasattr(modules[-1], name):
            _exchanged.wrap(modules[-1], name, call)


uninstall = _exchanged.undo
"""Puts back what `tell_of_fused_outputs` found; the next chunk exchanges it again."""


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
