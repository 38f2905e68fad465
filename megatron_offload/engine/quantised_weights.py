"""TransformerEngine's quantised weights stay on the device, the first step included.

With FP8 a module saves quantised copies of its weights like any tensor, unless TransformerEngine's
own offload is on, which would choose other kernels, and with them other bits. So none of its flags
is touched: what its functions return for a weight is marked. The engine asks for that at each
chunk, because the library may be imported at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_offload.engine.exchanges import Exchanges, imported
from megatron_offload.engine.marks import mark_everywhere

_MODULES = tuple(
    f"transformer_engine.pytorch.module.{name}"
    for name in ("base", "linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")
)

_exchanged = Exchanges()


def plain_parts(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of which tensors, and TransformerEngine's storages, are made."""
    for tensor in tensors:
        if hasattr(type(tensor), "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from plain_parts(getattr(tensor, name) for name in names)
        elif isinstance(tensor, torch.Tensor):
            yield tensor


def mark_not_offload(*tensors: Any) -> None:
    """Keep tensors on the device, what they consist of, and all that shares its storage."""
    for tensor in (*tensors, *plain_parts(tensors)):
        if isinstance(tensor, torch.Tensor):
            mark_everywhere(tensor)


def keep_quantised_weights() -> None:
    """Mark what TransformerEngine's modules quantise of weights, once they are imported.

    A second call changes nothing, and one before TransformerEngine's import costs a look.
    """
    found = [] if _exchanged else imported(_MODULES, last="GroupedLinear")
    if not found:
        return
    base, *modules = found
    for owner, name in (
        *((module, "quantize_weight") for module in modules),
        (getattr(modules[-1], "_GroupedLinear", None), "_prepare_weights_for_grouped_tensor_gemm"),
        # In earlier versions a method of all modules.
        (getattr(base, "TransformerEngineBaseModule", None), "get_weight_workspace"),
    ):
        if owner is not None and name in vars(owner):
            _exchanged.wrap(owner, name, _quantize)


uninstall = _exchanged.undo
"""Puts back what `keep_quantised_weights` found; the next chunk exchanges it again."""


def _quantize(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = theirs(*args, **kwargs)
    mark_not_offload(*tree_leaves(result))
    return result
