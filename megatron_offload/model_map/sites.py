"""Layers and their parts: which may run again, and how long they run; for searches and the map.

A layer may be recomputed unasked if its library lets it be: those of transformers and Megatron; of
any other what it saves may be offloaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from megatron_offload.backends.base import Backend
from megatron_offload.core.row_config import EXPERTS, MOE_ACT
from megatron_offload.engine.marks import is_parameter
from megatron_offload.model_map.module_hooks import (
    compiled_parts,
    hook_calls,
    is_own_hook,
    named_modules,
    remove,
)
from megatron_offload.model_map.structure import (
    PARTS,
    has_forward,
    is_known_layer,
    layers_of,
    stands_for_nothing,
)

LIBRARIES = (
    *("torch.nn.", "torch.distributed.fsdp.", "transformers.", "peft.", "megatron.core."),
    *("transformer_engine.", "builtins.", "abc.", "typing."),
)
"""Whose classes a layer may have if it is to be recomputed without being named: their forwards run
again with the same effect, as those of anyone else need not."""

_EMPTIED = {
    "layernorm": {"layer"},
    "mla_up_proj": {"layer", "attention"},
    MOE_ACT: {"layer", "mlp", f"mlp{EXPERTS}"},
}
"""Of Megatron's ``recompute_modules`` those whose outputs it empties, and the sites around them."""

_NUM_PAUSES = 100  # of a millisecond: in so many the host launches a forward
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)


class Site:
    """A layer, or a part of one.

    Attributes:
        layer: its number.
        name: as a row names it.
        module: returns it; None once its model, which alone holds it, has lost it.
        refusal: why a search doesn't recompute it; empty where it may.
    """

    def __init__(self, layer: int, name: str, module: nn.Module, refusal: str = "") -> None:
        self.layer, self.name, self.refusal = layer, name, refusal
        self.module = ref(module)


def modules_of(sites: Mapping[str, Site]) -> dict[str, nn.Module]:
    """Return the modules of sites that their model still has."""
    found = ((path, site.module()) for path, site in sites.items())
    return {path: module for path, module in found if module is not None}


def sites_of_layers(model: nn.Module, named: Collection[str] | None = None) -> dict[str, Site]:
    """Return layers and their parts by dotted name, but for what runs in a compiled graph.

    ``named`` are the kinds of sites that may be recomputed; None: those that libraries let be.
    """
    modules = named_modules(model)
    compiled = compiled_parts(modules.values())
    found: dict[str, Site] = {}
    for path, number in layers_of(modules).items():
        names = {path: "layer"} | {
            f"{path}.{one}": kind for kind, all_ in PARTS.items() for one in all_
        }
        names |= {f"{path}.{one}{EXPERTS}": f"{one}{EXPERTS}" for one in PARTS["mlp"]}
        settings = [getattr(one, "config", None) for one in (modules[path], model)]
        for place, name in names.items():
            module = modules.get(place)
            is_called = module is not None and has_forward(module)
            if module is None or module in compiled or not is_called or stands_for_nothing(module):
                continue
            refusals = (_collectives(one, name) or emptied_inside(one, name) for one in settings)
            refusal = next(filter(None, refusals), "")
            if named is None:
                refusal = refusal or _library_refusal(modules[path], module)
            elif name.split(".")[0] not in named:
                refusal = refusal or "'recompute' names other sites"
            found[place] = Site(number, name, module, refusal)
    return found


def _library_refusal(layer: nn.Module, module: nn.Module) -> str:
    """Return why a module may not run again without being named: its forward may do more."""
    if not is_known_layer(layer):
        return f"no library lets class {type(layer).__name__} run again"
    if "_orig_mod" in module._modules:  # its parts are none of ours
        return "it is compiled"
    other = foreign_class(module)
    return "" if other is None else f"{other.__name__} is a class of {other.__module__}"


def foreign_class(module: nn.Module) -> type | None:
    """Return a class of a module or of a part that none of the `LIBRARIES` has, if there is one."""
    bases = (base for part in module.modules() for base in type(part).__mro__)
    others = (base for base in bases if not f"{base.__module__}.".startswith(LIBRARIES))
    return next(others, None)


def _collectives(config: Any, site: str) -> str:
    """Return why a site of a Megatron model with these settings isn't recomputed, if it is one.

    A rank alone may find that a site can't run again, by the bits of its kernels, hooks or memory.
    Others would then wait for it in a collective.
    """
    if not hasattr(config, "tensor_model_parallel_size"):
        return ""
    size, experts_size = config.tensor_model_parallel_size, config.expert_model_parallel_size
    if site.endswith(EXPERTS):
        holds = (getattr(config, "expert_tensor_parallel_size", None) or size) > 1
    else:
        in_attention = size > 1 or config.context_parallel_size > 1
        in_mlp = size > 1 or (config.num_moe_experts is not None and experts_size > 1)
        parts = {"attention": in_attention, "mlp": in_mlp}
        holds = parts.get(site, in_attention or in_mlp)
    return "its forward holds collectives" if holds else ""


def emptied_inside(config: Any, site: str) -> str:
    """Return why a site can't run again with these settings of Megatron's, if it can't.

    What Megatron recomputes itself it has emptied when a rerun would compare it.
    """
    is_selective = getattr(config, "recompute_granularity", None) == "selective"
    names = (getattr(config, "recompute_modules", None) or ()) if is_selective else ()
    inside = sorted(name for name in names if site in _EMPTIED.get(name, ()))
    return f"recompute_modules recomputes {', '.join(inside)} inside it" if inside else ""


def parts_of(module: nn.Module) -> tuple[list[nn.Module], str]:
    """Return a module and all inside it, and why it can't run again, by what they are."""
    parts, seen = [module], {module}
    for part in parts:
        if isinstance(part, torch.jit.ScriptModule):
            return parts, "a part of it is in TorchScript"
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            if hooks and part is not module and not all(map(is_own_hook, hooks.values())):
                return parts, "a part of it has hooks"
        for inner in part._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                parts.append(inner)
    return parts, ""


def call_refusal(module: nn.Module, leaves: Sequence[Any]) -> str:
    """Return why a call of a module can't run again, of what it is given."""
    if "forward" in vars(module):
        return "its forward was replaced"
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            is_plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
            if not is_plain and not is_parameter(leaf):
                return "it is given a tensor that is sparse or of a class of its own"
            if is_functorch_wrapped_tensor(leaf) or leaf.is_inference():
                return "it is given a tensor of a transform, or of inference mode"
        elif not (leaf is None or isinstance(leaf, _CONSTANTS)):
            return f"it is given a {type(leaf).__name__}, which may change (use_cache=False?)"
    return ""


class CallTimes:
    """Sees how long the sites of a model run in one forward.

    Where it ``holds_back`` the device behind the host, as long as the device alone needs for them.
    """

    def __init__(
        self, sites: Mapping[str, Site], backend: Backend, *, holds_back: bool = False
    ) -> None:
        self._sites, self._backend, self.holds_back = sites, backend, holds_back
        self._began: list[tuple[Any, float]] = []
        self._spans: list[tuple[str, Any, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._us: dict[str, float] | None = None
        self.scale = 1.0
        """How large the forward is of which times are asked, beside the one that was timed."""

    def begin(self) -> None:
        """Time what comes."""
        for _ in range(_NUM_PAUSES if self.holds_back else 0):
            self._backend.pause()
        for path, module in modules_of(self._sites).items():
            end = partial(self._end, path)
            self._handles += hook_calls(module, self._begin, end, is_outer=True)

    def end(self) -> None:
        """Time no more."""
        remove(self._handles)

    def _now(self) -> Any:
        return self._backend.timestamp(self._backend.compute_stream())

    def _begin(self, *_: Any) -> None:
        self._began.append((self._now(), self._backend.host_us()))

    def _end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._began:
            began, began_us = self._began.pop()
            self._spans.append((path, began, self._now()))
            self._ended(path, began_us, args, output)

    def _ended(self, path: str, began_us: float, args: Any, output: Any) -> None:
        """Note a call that is over; it began when the host's clock showed ``began_us``."""

    def us(self, path: str) -> float:
        """Return how long all calls of a site have run; waits for the device at first."""
        if self._us is None:
            self._us = defaultdict(float)
            for name, began, ended in self._spans:
                self._us[name] += self._backend.sync_elapsed_us(began, ended)
        return self.scale * self._us[path]
