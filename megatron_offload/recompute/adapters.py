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
from inspect import isbuiltin
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks

from megatron_offload.engine.hooks import graph_break, has_modes
from megatron_offload.memory.nested import first_tensor
from megatron_offload.model_map.module_hooks import ModuleHook, hook_calls, hooks_of, unhook
from megatron_offload.recompute.rerun import Rerun

_ADAPTED = "peft.tuners.lora.layer.Linear"

saves_alike = dict[Any, bool]()
"""Whether a rerun that ends in such a layer was seen to save what one in full does, by the layer's
forward."""


class NotEnough(BaseException):
    """More is saved behind the layer in which a rerun was to end."""


def last_adapted(parts: Sequence[nn.Module]) -> int | None:
    """Return the position of the last layer with peft's LoRA among the parts of a site."""
    names = (f"{type(x).__module__}.{type(x).__qualname__}" for x in parts)
    return max((i for i, name in enumerate(names) if name == _ADAPTED), default=None)


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
    replaced = not (_has_own_forward(layer) and _has_own_forward(base) and isbuiltin(F.linear))
    return are_frozen and not (layer.disable_adapters or layer.merged or variants or replaced)


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is that of its library."""
    code = getattr(type(module).forward, "__code__", None)
    file = getattr(sys.modules[type(module).__module__], "__file__", "")
    return "forward" not in vars(module) and code is not None and code.co_filename == file


class _ReplacingHook(ModuleHook):
    """A hook before a forward that gives it something else."""

    __slots__ = ()

    @graph_break
    def __call__(self, *args: Any) -> Any:
        return self.hook(*args)


@contextmanager
def ends_in(layer: Any, rerun: Rerun) -> Iterator[None]:
    """End a rerun inside of a layer; one for a proof is seen to have saved all when that is over.

    What other threads call, or other hooks are given, runs as ever.
    """
    thread: int | None = get_ident()
    state = _OUTSIDE

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal state
        if get_ident() == thread:
            x, hooks = first_tensor(args), _top_saved_tensors_default_hooks(True)
            is_plain = type(x) is torch.Tensor and x.requires_grad and x.shape[:-1].numel() > 1
            is_saved = hooks is not None and hooks[0] == rerun.keep and not has_modes()
            is_cut = not rerun.proves and is_plain and is_saved and not kwargs and len(args) == 1
            state, rerun.num_before = _BEFORE_BASE if is_cut else _OUTSIDE, len(rerun.made)

    def take_one_row(_: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor | None:
        nonlocal state
        if get_ident() != thread or state is not _BEFORE_BASE:
            return None
        state = _CUT
        return args[0][(0,) * (args[0].dim() - 2)][:1]

    def end(_: nn.Module, args: Any, output: Any) -> None:
        nonlocal state
        if get_ident() == thread:
            before, state = state, _OUTSIDE
            rerun.num_at_ends.append(len(rerun.made))
            if before is _CUT:  # what it returns, or has raised, is of one row
                rerun.needs_more = True
                raise NotEnough

    try:
        hook_calls(layer, begin, end, owner=ends_in)
        base = layer.base_layer
        hooks_of(ends_in, base).append(base.register_forward_pre_hook(_ReplacingHook(take_one_row)))
        yield
    finally:
        rerun.is_cut, thread = rerun.is_cut or state is _CUT, None
        unhook({ends_in}, (layer, layer.base_layer))


_OUTSIDE, _BEFORE_BASE, _CUT = range(3)
"""Where a rerun is that may end in a layer: outside, before its frozen product, behind that."""
