"""What of a model is recomputed: sites found by kind, by class and by pattern.

A site is a module of which each call may run again. What its inside saves is dropped in forward
(layers, MLPs, attentions, what a pattern names), or what it returns is, once that is saved (norms,
activations, what a pattern names). Classes are known by their exact names, under which no user's
code is. Hooks leave copies of modules alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._C import _current_graph_task_id
from torch._C._autograd import _pop_saved_tensors_default_hooks
from torch.autograd import forward_ad
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

from megatron_offload.config import RECOMPUTE_SITES, recompute_patterns
from megatron_offload.engine.hooks import (
    has_modes,
    is_recording,
    is_traced,
    owner_of_hooks,
    put_on,
)
from megatron_offload.model_map.module_hooks import (
    compiled_parts,
    expression_of,
    has_tokens,
    hook_calls,
    renumber,
    unhook,
)
from megatron_offload.model_map.offload_site import FindManager
from megatron_offload.model_map.sites import call_refusal, parts_of
from megatron_offload.model_map.structure import layers_of, modules_within
from megatron_offload.model_map.watch import SavedMemory
from megatron_offload.recompute.arguments import taken_apart
from megatron_offload.recompute.call_state import (
    RandomStates,
    are_captured,
    devices_of,
    generators_of,
)
from megatron_offload.recompute.module_state import ModuleState
from megatron_offload.recompute.recipes import note_recipe
from megatron_offload.recompute.site_call import ModuleCall, Site, SiteCall, TriedCall, first_of
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
    named = [(kind, layer) for kind in kinds for layer in layers_of(modules)]
    found = {path: kind for kind, layer in named for path in modules_within(layer, kind, modules)}
    for kind in kinds:
        if kind not in found.values():
            _logger.warning("recompute: no module here is a site of kind %r", kind)
    for pattern, expression in patterns.items():
        if not any(expression.fullmatch(path) for path in modules):
            _logger.warning("recompute: no module here matches %r", pattern)
    for path, module in modules.items():
        pattern = next((name for name, e in patterns.items() if e.fullmatch(path)), "")
        unit = found.get(path) or pattern or unit_of(module) or ""
        if unit in units:
            found[path] = unit
    return found


class SiteHooks:
    """The hooks of a site's module: what begins a call of it, and ends that.

    ``find_manager`` returns whose forward it is; None where it is no manager's. Calls of fewer than
    ``min_tokens`` are recomputed only while rows are on trial.
    """

    def __init__(self, site: Site, find_manager: FindManager, min_tokens: int) -> None:
        self.site, self._find_manager, self._min_tokens = site, find_manager, min_tokens
        self._last: ModuleCall | None = None
        """Under way, or ended by an interrupt, where the inside is kept: no hooks say so."""

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what the call begins with, and replace by numbers what it saves."""
        if _current_graph_task_id() != -1:  # a rerun, which may end without `end`
            return
        around = owner_of_hooks()
        if isinstance(around, SiteCall) and around.site is self.site:
            around.depth += 1  # it calls itself
        call = self._call(module, args, kwargs)
        if not self.site.drops_inside:
            self._last = call
        elif isinstance(call, SiteCall):
            put_on(call.pack, call.unpack)

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> ModuleCall | None:
        """Return the call that begins now, if it may run again."""
        site, manager = self.site, self._find_manager()
        if manager is None or not manager.do_offload or not is_recording() or is_traced():
            return None
        is_long = manager.rows_are_on_trial or has_tokens(self._min_tokens, args, kwargs)
        if not (manager.may_recompute(site.unit, drops=site.drops_inside) and is_long):
            return None
        if site.transfers() is not manager.transfers:
            site.prove_for(ref(manager.transfers))
        function, leaves = taken_apart(module.forward, args, kwargs)
        parts, refusal = parts_of(module)
        refusal = site.refusal or self._refusal(module, leaves) or refusal
        if refusal:
            site.warn(refusal, is_asked_for=not manager.rows_are_own)
            return None
        state = ModuleState(parts, site.layout, copies=site.drops_output)
        site.layout = state.layout
        devices = devices_of(leaves) if site.draws else ()
        is_captured = site.draws and are_captured(devices)
        if is_captured and state.training not in site.proven_in.keys() - site.drawn_in:
            site.warn("it draws random numbers, or may, and a graph is captured")
            return None
        states = None if is_captured or not site.draws else RandomStates(generators_of(devices))
        how = site, manager, state, function, leaves, states
        if not site.drops_inside:
            return ModuleCall(*how)
        if not manager.rows_are_on_trial:
            return SiteCall(*how)
        tried = TriedCall(*how)
        return tried if tried.proves else None

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the call, which may have raised."""
        site = self.site
        if _current_graph_task_id() != -1:
            return
        if not site.drops_inside and self._find_manager() is None:
            return  # another thread's
        call, self._last = owner_of_hooks() if site.drops_inside else self._last, None
        if not isinstance(call, ModuleCall) or call.site is not site:
            return
        if isinstance(call, SiteCall):
            if call.depth:
                call.depth -= 1
                return
            _pop_saved_tensors_default_hooks()
        leaves = call.leaves
        may_run = call.close(output) and site.drops_output
        chunk = call.manager.recorded_chunk() if may_run else None
        # While a forward is watched it isn't known yet who saves it.
        if chunk is not None and not isinstance(owner_of_hooks(), SavedMemory):
            made = first_of(output)
            has_graph = isinstance(made, torch.Tensor) and made.requires_grad
            note_recipe(
                chunk,
                made,
                call.output,
                leaves,
                site.unit,
                site.proof,
                runs=not site.drops_inside,
                holds=(site.drops_inside or not site.draws) and has_graph,
            )

    def _refusal(self, module: nn.Module, leaves: Sequence[Any]) -> str:
        if has_modes():
            return "a mode of dispatch or of functions was entered"
        if self.site.drops_inside and is_quantising():
            return "its quantisers' scales change with every call"
        if type(module) is not self.site.type:
            is_compiled = self.site.type.__module__.startswith("torch._dynamo")
            return "it is compiled" if is_compiled else "its forward was replaced"
        if forward_ad._current_level >= 0:
            return "it runs under forward-mode differentiation"
        last, first = next(reversed(module._forward_pre_hooks)), next(iter(module._forward_hooks))
        if last != _SHARED_ID or first != _SHARED_ID:
            return "another hook of it comes in between"
        if _global_forward_hooks or _global_forward_pre_hooks:
            return "there are global hooks of forwards"
        return call_refusal(module, leaves)


def recompute_modules(
    modules: Mapping[str, nn.Module],
    sites: Mapping[str, tuple[str, int]],
    find_manager: FindManager,
) -> None:
    """Let modules be recomputed, by their dotted name that of their unit and the fewest tokens.

    The hooks of an earlier call on the same modules go. ``find_manager`` is as in `SiteHooks`.
    """
    layers, compiled = layers_of(modules), compiled_parts(modules.values())
    known = {path: _site_of(modules[path]) for path in sites}
    said = next((site.said for site in known.values() if site is not None), set[str]())
    unhook({SiteHooks}, modules.values())
    for path, (unit, min_tokens) in sites.items():
        module, site = modules[path], known[path]
        if isinstance(module, torch.jit.ScriptModule):
            continue  # no hook of it runs
        if site is None or (site.unit, site.type) != (unit, type(module)):
            site = Site(path or type(module).__name__, unit, module, draws=unit_of(module) is None)
        site.said = said
        if module in compiled:  # a hook would be part of its graph, and change its random numbers
            site.warn("it is compiled")
            continue
        # A layer's output is what the next one is given, and runs again from.
        site.drops_output &= path not in layers
        hooks = SiteHooks(site, find_manager, min_tokens)
        own = hook_calls(module, hooks.begin, hooks.end, owner=SiteHooks)
        for handle, last in zip(own, (True, False), strict=True):
            renumber(handle, _SHARED_ID, last=last)


def unproven_sites(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return which modules that are to be recomputed haven't proven yet that they can be."""
    sites = ((path, _site_of(module)) for path, module in modules.items())
    return [path for path, site in sites if site and (site.refusal or not site.proven_in)]


def _site_of(module: nn.Module) -> Site | None:
    """Return what is known of a module that has the hooks of a site."""
    hook = getattr(module._forward_pre_hooks.get(_SHARED_ID), "hook", None)
    return getattr(getattr(hook, "__self__", None), "site", None)
