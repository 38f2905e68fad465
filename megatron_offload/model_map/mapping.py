"""The map of a model: what its sites save for backward, as one forward has shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_offload.core.row_config import ranges
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.module_hooks import named_modules
from megatron_offload.errors import ConfigError
from megatron_offload.model_map.structure import layers_of
from megatron_offload.model_map.watch import SavedMemory


class Site(NamedTuple):
    """What one module of each of some layers saves by itself, not by the modules inside it."""

    layers: tuple[int, ...]
    """Their numbers; empty of what is in no layer."""
    site: str
    """As a row names it; of what is in no layer the module's whole name."""
    kind: str
    """The module's class."""
    num_tensors: int
    """That one layer saves here first, in memory that no site before has saved."""
    num_bytes: int
    """Of these."""
    others: tuple[str, ...]
    """Sites that save some of it too: what is offloaded is freed only where all of them have
    rows."""


class ModelMap(NamedTuple):
    """The sites that save anything, in the order of the forward."""

    sites: tuple[Site, ...]

    @property
    def num_bytes(self) -> int:
        """What the whole model saves."""
        return sum(site.num_bytes * max(1, len(site.layers)) for site in self.sites)

    def __str__(self) -> str:
        head = "layers", "site", "class", "saves a layer", "tensors", "saved too by"
        rows = [head] + [
            (
                *(ranges(site.layers) or "-", site.site, site.kind, format_bytes(site.num_bytes)),
                *(str(site.num_tensors), ", ".join(site.others)),
            )
            for site in self.sites
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"in all: {format_bytes(self.num_bytes)}"])


def map_model(model: nn.Module, *args: Any, **kwargs: Any) -> ModelMap:
    """Run one forward of a model with these arguments, and return what it saves where.

    Nothing is offloaded meanwhile. Works on any device, on ``meta`` too, where nothing is computed
    and no memory is needed. Inside what is compiled or recomputed by others nothing is seen.

    Raises:
        ConfigError: it has saved nothing, as without grad.
    """
    modules = named_modules(model)
    kept = {
        x.untyped_storage()._cdata
        for x in (*model.parameters(), *model.buffers())
        if x.layout is torch.strided
    }

    def may_move(tensor: torch.Tensor) -> bool:
        is_strided = tensor.layout is torch.strided and not is_parameter(tensor)
        return is_strided and tensor.untyped_storage()._cdata not in kept

    seen = SavedMemory(may_move)
    try:
        seen.begin(modules)
        output = model(*args, **kwargs)
    finally:
        seen.end()
    found = _sites(seen, modules)
    del output  # until here, so that no memory is another's
    if not found:
        raise ConfigError("the forward has saved nothing: is grad on, and does anything need it?")
    return ModelMap(tuple(found))


def _sites(seen: SavedMemory, modules: Mapping[str, nn.Module]) -> list[Site]:
    layers, tensors = layers_of(modules), defaultdict[str, list[int]](list)
    others: defaultdict[str, set[str]] = defaultdict(set)
    for key, paths in seen.savers().items():
        savers = [*dict.fromkeys(paths)]
        tensors[savers[0]].append(seen.sizes[key])
        places = [_place(saver, layers) for saver in savers]
        for saver, (layer, _) in zip(savers, places, strict=True):
            others[saver].update(
                name if at in ("", layer) else f"{name} of other layers"
                for (at, name), one in zip(places, savers, strict=True)
                if one != saver
            )
    alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for path in modules:
        if path in others:
            layer, site = _place(path, layers)
            what = len(tensors[path]), sum(tensors[path]), tuple(sorted(others[path]))
            numbers = alike[site, type(modules[path]).__name__, *what, bool(layer)]
            numbers += [layers[layer]] if layer else []
    return [Site(tuple(numbers), *what[:-1]) for what, numbers in alike.items()]


def _place(path: str, layers: Iterable[str]) -> tuple[str, str]:
    """Return the layer of a module and its name in there, or nothing and its whole name."""
    for layer in layers:
        if f"{path}.".startswith(f"{layer}."):
            return layer, path[len(layer) + 1 :] or "layer"
    return "", path or "model"
