"""What of a model is recomputed: sites found by kind, by class and by pattern, and their hooks.

A site is a module of which each call may run again. What its inside saves is dropped in forward
(layers, MLPs, attentions, what a pattern names), or what it returns is, once that is saved (norms,
activations, what a pattern names). Classes are known by their exact names, under which no user's
code is. Hooks leave copies of modules alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import eq
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from megatron_offload.config import RECOMPUTE_SITES, recompute_patterns
from megatron_offload.engine.hooks import (
    is_in_backward,
    is_recording,
    owner_of_hooks,
    put_on,
    take_off,
)
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.modes import has_modes, is_traced
from megatron_offload.engine.module_hooks import (
    EagerHook,
    compiled_parts,
    expression_of,
    hooks_of,
    is_own_hook,
)
from megatron_offload.model_map.structure import find_sites, layers_of
from megatron_offload.model_map.watch import SavedMemory
from megatron_offload.recompute.module_state import ModuleState
from megatron_offload.recompute.recipes import recipes_of
from megatron_offload.recompute.site_call import ModuleCall, Site, SiteCall, TriedCall
from megatron_offload.recompute.transformer_engine import is_quantising

_logger = logging.getLogger(__name__)

_KNOWN = {
    "norm": """
        torch.nn.modules.normalization.LayerNorm torch.nn.modules.normalization.RMSNorm
        megatron.core.fusions.fused_layer_norm.FusedLayerNorm
        megatron.core.transformer.torch_norm.L2Norm
        transformer_engine.pytorch.module.layernorm.LayerNorm
        transformer_engine.pytorch.module.rmsnorm.RMSNorm""",
    "mlp_act": """
        torch.nn.modules.activation.GELU torch.nn.modules.activation.SiLU
        torch.nn.modules.activation.Mish torch.nn.modules.activation.Softplus
        torch.nn.modules.activation.Hardswish torch.nn.modules.activation.LeakyReLU""",
}
"""Classes that do nothing but compute, of what they are given and have, by the unit that they are.

Of activations those whose backward saves their input: one that saves its output would need more."""

_UNIT_OF = {name: unit for unit, names in _KNOWN.items() for name in names.split()}

_SHARED_ID = RemovableHandle(OrderedDict()).id

_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)


FindManager = Callable[[], PipelineOffloadManager | None]


def unit_of(module: nn.Module) -> str | None:
    """Return the unit of a module of a known class, ``norm`` or ``mlp_act``."""
    kind = type(module)
    return _UNIT_OF.get(f"{kind.__module__}.{kind.__qualname__}")


def sites_of(modules: Mapping[str, nn.Module], units: Collection[str]) -> dict[str, str]:
    """Return the unit of each module that these name by its kind, its class or a pattern.

    What is named and isn't there is said in a warning.
    """
    kinds = [kind for kind in RECOMPUTE_SITES if kind in units]
    patterns = {pattern: expression_of(pattern) for pattern in recompute_patterns(units)}
    found = find_sites(modules, kinds)
    for kind in kinds:
        if kind not in found.values():
            _logger.warning("recompute: no module here is a site of kind %r", kind)
    for pattern, expression in patterns.items():
        if not any(expression.fullmatch(path) for path in modules):
            _logger.warning("recompute: no module here matches %r", pattern)
    for path, module in modules.items():
        named = next((name for name, e in patterns.items() if e.fullmatch(path)), "")
        unit = found.get(path) or named or unit_of(module) or ""
        if unit in units:
            found[path] = unit
    return found


def recompute_modules(
    modules: Mapping[str, nn.Module],
    sites: Mapping[str, str],
    find_manager: FindManager,
    min_tokens: Mapping[str, int] = MappingProxyType({}),
) -> list[RemovableHandle]:
    """Let modules be recomputed, by their dotted name that of their unit.

    The hooks of an earlier call on the same modules go. ``find_manager`` returns whose forward it
    is when one of them runs; None where it is no manager's. ``min_tokens`` are those of a call that
    runs again, unless rows are on trial.
    """
    layers, compiled = layers_of(modules), compiled_parts(modules.values())
    handles, said = [], set[str]()
    for path, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # no hook of it runs
        site, own = _site_of(module), hooks_of(_HookedSite, module)
        unit = sites.get(path)
        if unit is None:
            continue
        if site is None or not site.is_still(unit, module):
            site = _HookedSite(path or type(module).__name__, unit, module)
        site.serve(find_manager, said, min_tokens.get(path, 0))
        if module in compiled:  # a hook would be part of its graph, and change its random numbers
            site.warn("it is compiled")
            continue
        # A layer's output is what the next one is given, and runs again from.
        site.drops_output &= path not in layers
        own.append(module.register_forward_pre_hook(EagerHook(site.begin), with_kwargs=True))
        own.append(module.register_forward_hook(EagerHook(site.end), always_call=True))
        for handle, last in zip(own, (True, False), strict=True):
            _share_id(handle, last=last)
        handles += own
    return handles


def unproven_sites(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return which modules that are to be recomputed haven't proven yet that they can be."""
    sites = ((path, _site_of(module)) for path, module in modules.items())
    return [path for path, site in sites if site and (site.refusal or not site.proven_in)]


def _site_of(module: nn.Module) -> _HookedSite | None:
    """Return the site whose hooks a module has, and so what is known of it."""
    for hook in module._forward_pre_hooks.values():
        site = getattr(getattr(hook, "hook", None), "__self__", None)
        if isinstance(site, _HookedSite):
            return site
    return None


class _HookedSite(Site):
    """A site with the hooks of its module."""

    def __init__(self, path: str, unit: str, module: nn.Module) -> None:
        is_of_torch = type(module).__module__.startswith("torch.nn.") and not module._modules
        draws = unit_of(module) is None
        super().__init__(
            path,
            unit,
            type(module).forward,
            draws=draws,
            drops_inside=draws and not is_of_torch,
            drops_output=unit not in RECOMPUTE_SITES,
        )
        self._type = type(module)
        self._find_manager: FindManager
        self._calls: list[ModuleCall | None] = []
        """Under way, where the inside is kept: no hooks say so."""

    def serve(self, find_manager: FindManager, said: set[str], min_tokens: int) -> None:
        """Ask another for the manager; ``said`` is why sites of the model were kept so far."""
        self._find_manager, self._said, self._min_tokens = find_manager, said, min_tokens

    def is_still(self, unit: str, module: nn.Module) -> bool:
        """Whether what is known of it holds for a module of this unit."""
        return (self.unit, self._type) == (unit, type(module))

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what the call begins with, and replace by numbers what it saves."""
        if not self.drops_inside:
            if not is_in_backward():  # a rerun, which may end without `end`
                self._calls.append(self._call(module, args, kwargs))
            return
        around = owner_of_hooks()
        if isinstance(around, SiteCall) and around.site is self:
            around.depth += 1  # it calls itself
        call = self._call(module, args, kwargs)
        if isinstance(call, SiteCall):
            put_on(call.pack, call.unpack)

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> ModuleCall | None:
        """Return the call that begins now, if it may run again."""
        manager = self._find_manager()
        if manager is None or not manager.do_offload or not is_recording() or is_traced():
            return None
        may = manager.may_drop if self.drops_inside else manager.may_recompute
        if not may(self.unit):
            return None
        if manager.is_too_short(self._min_tokens, args, kwargs):
            return None
        leaves, spec = args, None
        if kwargs or any(isinstance(x, (tuple, list, dict)) for x in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        parts = [*module.modules()]
        refusal = self.refusal or self._refusal(module, parts[1:], leaves)
        if refusal:
            is_asked_for = not manager.rows_are_own
            self.warn(refusal, logging.WARNING if is_asked_for else logging.INFO)
            return None
        state = ModuleState(parts, copies=self.drops_output)
        how = self, manager, module, state, leaves, spec
        if not self.drops_inside:
            return ModuleCall(*how)
        if not manager.rows_are_on_trial:
            return SiteCall(*how)
        tried = TriedCall(*how)
        return tried if tried.can_prove else None

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the call, which may have raised."""
        if not self.drops_inside:
            if is_in_backward() or not self._calls:
                return
            call = self._calls.pop()
        else:
            call = owner_of_hooks()
            if not isinstance(call, SiteCall) or call.site is not self:
                return
            if call.depth:
                call.depth -= 1
                return
            take_off(partial(eq, call.pack))
        if call is None:
            return
        leaves = call.leaves
        if not call.close(output) or isinstance(owner_of_hooks(), SavedMemory):
            return  # in the latter it isn't known yet who saves it
        chunk = call.manager.recorded_chunk() if self.drops_output else None
        call.picks_first = isinstance(output, (tuple, list))
        made = output[0] if call.picks_first else output
        if chunk is not None and isinstance(made, torch.Tensor):
            how: dict[str, Any] = {"proof": self.proof, "runs": not self.drops_inside}
            how["holds"] = self.drops_inside or not self.draws
            recipes_of(chunk).add(made, call.output, leaves, self.unit, **how)

    def _refusal(self, module: nn.Module, parts: Sequence[nn.Module], leaves: Sequence[Any]) -> str:
        if has_modes():
            return "a mode of dispatch or of functions was entered"
        if self.drops_inside and is_quantising():
            return "its quantisers' scales change with every call"
        if type(module) is not self._type or "forward" in vars(module):
            return "its forward was replaced"
        if forward_ad._current_level >= 0:
            return "it runs under forward-mode differentiation"
        last = next(reversed(module._forward_pre_hooks.values()))
        first = next(iter(module._forward_hooks.values()))
        if getattr(last, "hook", None) != self.begin or getattr(first, "hook", None) != self.end:
            return "another hook of it comes in between"
        if _global_forward_hooks or _global_forward_pre_hooks:
            return "there are global hooks of forwards"
        for part in parts:
            if isinstance(part, torch.jit.ScriptModule):
                return "a part of it is in TorchScript"
            hooks = *part._forward_hooks.values(), *part._forward_pre_hooks.values()
            if not all(map(is_own_hook, hooks)):
                return "a part of it has hooks"
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


def _share_id(handle: RemovableHandle, *, last: bool) -> None:
    """Give the hooks of all modules one number: a compiler compiles each number anew."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            hooks[_SHARED_ID] = hooks.pop(handle.id)
            hooks.move_to_end(_SHARED_ID, last=last)
    handle.id = _SHARED_ID
