"""What of a model is recomputed: sites found by kind, by class and by pattern.

A site is a module of which each call may run again. What its inside saves is dropped in forward
(layers, MLPs, attentions, what a pattern names), or what it returns is, once that is saved (norms,
activations, what a pattern names). Classes are known by their exact names, under which no user's
code is. Hooks leave copies of modules alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.config import RECOMPUTE_SITES, recompute_patterns
from megatron_offload.engine.module_hooks import EagerHook, compiled_parts, expression_of, hooks_of
from megatron_offload.model_map.offload_site import FindManager
from megatron_offload.model_map.structure import find_sites, layers_of
from megatron_offload.recompute.site_call import Site

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
    sites: Mapping[str, tuple[str, int]],
    find_manager: FindManager,
) -> list[RemovableHandle]:
    """Let modules be recomputed, by their dotted name that of their unit and the fewest tokens.

    The hooks of an earlier call on the same modules go. ``find_manager`` returns whose forward it
    is when one of them runs; None where it is no manager's. Calls of fewer tokens run again only
    while rows are on trial.
    """
    layers, compiled = layers_of(modules), compiled_parts(modules.values())
    handles, said = [], set[str]()
    for path, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # no hook of it runs
        site, own = _site_of(module), hooks_of(Site, module)
        if path not in sites:
            continue
        unit, min_tokens = sites[path]
        if site is None or not site.is_still(unit, module):
            site = Site(path or type(module).__name__, unit, module, draws=unit_of(module) is None)
        site.serve(find_manager, said, min_tokens)
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


def _site_of(module: nn.Module) -> Site | None:
    """Return the site whose hooks a module has, and so what is known of it."""
    for hook in module._forward_pre_hooks.values():
        site = getattr(getattr(hook, "hook", None), "__self__", None)
        if isinstance(site, Site):
            return site
    return None


def _share_id(handle: RemovableHandle, *, last: bool) -> None:
    """Give the hooks of all modules one number: a compiler compiles each number anew."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            hooks[_SHARED_ID] = hooks.pop(handle.id)
            hooks.move_to_end(_SHARED_ID, last=last)
    handle.id = _SHARED_ID
