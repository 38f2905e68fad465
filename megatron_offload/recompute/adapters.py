"""The last product by frozen weights of a site with LoRA, which a rerun leaves out.

A layer of peft's LoRA multiplies by its frozen weights before it saves what its adapters need.
Where these are the last that a call saves, nothing is made of that product. So a rerun ends inside
of the layer, whose frozen product is taken of one row. What this adds up to is never returned: if
the layer comes to its end, the rerun ends there too, and the site runs again in full.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks

from megatron_offload.engine.hooks import graph_break, has_modes
from megatron_offload.memory.nested import first_tensor
from megatron_offload.model_map.module_hooks import ModuleHook, hook_calls
from megatron_offload.recompute.rerun import Rerun

_ADAPTED = "peft.tuners.lora.layer.Linear"

saves_alike = dict[Any, bool]()
"""Whether a rerun that ends in such a layer was seen to save what one in full does, by the code of
the layer's forward."""


class NotEnough(BaseException):
    """More is saved behind the layer in which a rerun was to end."""


def last_adapted(parts: Sequence[nn.Module]) -> int | None:
    """Return the position of the last layer with peft's LoRA among the parts of a site."""
    names = (f"{type(x).__module__}.{type(x).__qualname__}" for x in parts)
    return max((i for i, name in enumerate(names) if name == _ADAPTED), default=None)


def code_of(layer: nn.Module) -> Any:
    """Return the code of a layer's forward."""
    return type(layer).forward.__code__


def may_end_in(layer: Any) -> bool:
    """Whether a layer takes a product by frozen weights of its own first, and then has adapters.

    Nothing may be compiled: hooks would make the compiler compile parts of the site anew.
    """
    compiler, base = sys.modules.get("torch._dynamo.utils"), layer.base_layer
    if type(base) is not nn.Linear or base._forward_hooks or base._forward_pre_hooks:
        return False
    if (compiler is not None and compiler.counters["frames"]) or base._backward_hooks:
        return False
    weights = [x for x in (base.weight, base.bias) if x is not None]
    are_frozen = all(type(x) is nn.Parameter and not x.requires_grad for x in weights)
    variants = set(layer.active_adapters) & set(getattr(layer, "lora_variant", ()))
    replaced = "forward" in vars(layer) or "forward" in vars(base)
    return are_frozen and not (layer.disable_adapters or layer.merged or variants or replaced)


class _ReplacingHook(ModuleHook):
    """A hook before a forward that gives it something else."""

    __slots__ = ()

    @graph_break
    def __call__(self, *args: Any) -> Any:
        return self.hook(*args)


@contextmanager
def ends_in(layer: Any, rerun: Rerun) -> Iterator[None]:
    """End a rerun inside of a layer, if that is called by this thread and saved for the rerun."""
    thread, is_inside = get_ident(), False

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal is_inside
        if get_ident() == thread:
            x, hooks = first_tensor(args), _top_saved_tensors_default_hooks(True)
            is_plain = type(x) is torch.Tensor and x.dim() > 1 and x.requires_grad
            is_saved = hooks is not None and hooks[0] == rerun.keep and not has_modes()
            is_inside = is_plain and is_saved and not kwargs and len(args) == 1
            rerun.num_before = len(rerun.made)

    def take_one_row(_: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor | None:
        is_ours = is_inside and get_ident() == thread
        return args[0][(0,) * (args[0].dim() - 2)][:1] if is_ours else None

    def end(_: nn.Module, args: Any, output: Any) -> None:
        if is_inside and get_ident() == thread and output is not None:
            rerun.needs_more = True
            raise NotEnough

    handles = hook_calls(layer, begin, end)
    handles += [layer.base_layer.register_forward_pre_hook(_ReplacingHook(take_one_row))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
