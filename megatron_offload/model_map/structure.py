"""A model's layers, and the parts of layers that libraries call by many names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from megatron_offload.model_map.module_hooks import expression_of

_LAYERS = ("TransformerLayer", "GradientCheckpointingLayer")
"""Classes, by their own name or that of a base, whose owners let them be recomputed."""

_NOTHING = {
    ("torch.nn.modules.linear", "Identity"),
    ("megatron.core.transformer.identity_op", "IdentityOp"),
}
"""Classes that return what they are given: Megatron's stand for what a layer goes without."""

PARTS = {
    "mlp": ("mlp", "feed_forward", "ffn", "ff"),
    "attention": ("self_attention", "cross_attention", "self_attn", "attn", "attention"),
}
"""What libraries call the parts of a layer."""


_A_NUMBER = re.compile("[0-9]{1,6}")


def modules_within(layer: str, site: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the modules of a layer that a site's name stands for."""
    if site == "layer" or site in PARTS:  # where that is a list, its members are meant by name
        names = [layer] if site == "layer" else [f"{layer}.{name}" for name in PARTS[site]]
        found = [path for path in names if path in modules and has_forward(modules[path])]
        return [path for path in found if not stands_for_nothing(modules[path])] or found
    expression = expression_of(f"{layer}.{site}")
    return [path for path in modules if expression.fullmatch(path)]


def layers_of(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the dotted name of each layer with its number, from 0.

    Layers are those of Megatron and Hugging Face, and the members of each list of modules, or of
    a dictionary ``layers`` by numbers, that have one class and parts, except within another layer.
    Megatron numbers them over all pipeline ranks, and behind them those that predict further
    tokens; others have their place in their list, each list from 0. A member that has another name
    first counts where no other layer is in there. In a model without other layers a list's only
    member is one, such as one that is called again and again.
    """
    known = {path for path, module in modules.items() if path and is_known_layer(module)}
    members = _members(modules) or ({} if known else _members(modules, least=1))
    first = {module: path for path, module in modules.items()}
    known |= {place for place, member in members.items() if modules.get(place) is member}
    within = tuple(f"{layer}." for layer in known)
    places = {path: path for path in known if not path.startswith(within)}
    for place, member in members.items():
        path = first.get(member, place)
        holds_layers = any(layer.startswith(f"{path}.") for layer in places)
        if not (path in members or path.startswith(within) or holds_layers):
            places[path] = place
    return {
        path: _number_of(places[path], modules[path], modules) for path in modules if path in places
    }


def other_numbers(modules: Mapping[str, nn.Module], layers: Mapping[str, int]) -> dict[int, str]:
    """Return numbers that no layer has, and layers that have these places in a second list."""
    names, found = {modules[path]: path for path in layers}, dict[int, str]()
    for place, member in _members(modules).items():
        if member in names:  # others, such as experts of Megatron, may have no number
            number = _number_of(place, member, modules)
            if number not in layers.values():
                found.setdefault(number, names[member])
    return found


def _members(modules: Mapping[str, nn.Module], least: int = 2) -> dict[str, nn.Module]:
    """Return the members of lists that may be layers, each by its name in its list.

    Lists have at ``least`` so many. An only member isn't one that does nothing but hold a list, and
    is in no `nn.Sequential`.
    """
    found = dict[str, nn.Module]()
    for path, module in modules.items():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        if isinstance(module, nn.ModuleDict) and path.rpartition(".")[2] == "layers":
            is_list = all(_A_NUMBER.fullmatch(name) for name in module._modules)  # torchtitan's
        if not is_list or len(module._modules) < least:
            continue
        members = {f"{path}.{name}".lstrip("."): x for name, x in module._modules.items()}
        if len(members) == 1:
            inner = [type(x) for one in members.values() if one is not None for x in one.children()]
            if isinstance(module, nn.Sequential) or inner == [nn.ModuleList]:
                continue
        if all(map(_may_be_layer, members.values())) and len({*map(type, members.values())}) == 1:
            found |= {name: member for name, member in members.items() if member is not None}
    return found


def _number_of(place: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> int:
    (home, _, name), layer = place.rpartition("."), cast(Any, module)
    if any(base.__module__.startswith("megatron.") for base in type(layer).__mro__):
        of_decoder = layer.config.num_layers if getattr(layer, "is_mtp_layer", False) else 0
        return int(layer.layer_number) - 1 + int(of_decoder)
    siblings = [*modules[home]._modules] if home in modules else [name]
    return int(name) if name.isdigit() else siblings.index(name)


def _may_be_layer(module: nn.Module | None) -> bool:
    """Whether a member of a list has parts, and is called itself."""
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    is_called = not is_list and type(module).__name__ != "MultiTokenPredictionLayer"  # has a layer
    return is_called and module is not None and next(module.children(), None) is not None


def is_known_layer(module: nn.Module) -> bool:
    """Whether its library lets a layer be recomputed, by the name of its class or a base."""
    return any(base.__name__ in _LAYERS for base in type(module).__mro__)


def has_forward(module: nn.Module) -> bool:
    """Whether a module is called itself, and takes hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def stands_for_nothing(module: nn.Module) -> bool:
    """Whether a module only returns what it is given."""
    return (type(module).__module__, type(module).__name__) in _NOTHING


def keeps_inside(module: nn.Module) -> bool:
    """Whether of a module only what it returns can be recomputed: it is torch's, without parts."""
    return type(module).__module__.startswith("torch.nn.") and not module._modules
