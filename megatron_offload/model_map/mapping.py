"""The map of a model: what its sites save, as one forward has shown, and what may run again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from megatron_offload.backends import create_backend, current_device
from megatron_offload.config import OffloadConfig
from megatron_offload.core.row_config import ranges
from megatron_offload.core.units import byte_unit, format_bytes, format_us
from megatron_offload.engine.hooks import is_recording
from megatron_offload.engine.marks import is_parameter
from megatron_offload.errors import ConfigError
from megatron_offload.model_map import sites
from megatron_offload.model_map.module_hooks import (
    compiled_parts,
    named_modules,
    sweep,
    tokens_of,
)
from megatron_offload.model_map.structure import has_forward, layers_of
from megatron_offload.model_map.watch import MayMove, SavedMemory


class Growth(NamedTuple):
    """What is saved, as a line over the tokens of a layer's call; NaN where it is none."""

    bytes_per_token: float
    fixed_bytes: float

    def __str__(self) -> str:
        if math.isnan(self.bytes_per_token):
            return "not linear"
        size, fixed_bytes = self
        fixed = f" {'+-'[fixed_bytes < 0]} {format_bytes(abs(fixed_bytes))}"
        is_shown = 20 * abs(fixed_bytes) > byte_unit(size)[0]
        return format_bytes(size) + fixed * is_shown


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
    recompute: str
    """What may recompute it: ``search``, a run's own, or a row; ``row``, one that names it;
    ``none``. Empty of what is in no layer."""
    refusal: str
    """Why no search may, or not even a row; empty of a site that no search looks at."""
    growth: Growth | None = None
    """None unless `ModelMap.fit` was asked."""
    us: float = 0.0
    """What its forward takes in one layer, on average, with all inside; 0 where unknown."""


class ModelMap(NamedTuple):
    """The sites that save anything, layers, MLPs and attentions, in the order of the model."""

    modules: Mapping[str, Site]
    """By dotted name, each module as a site of its own layer alone."""
    tokens: float
    """The most that a layer was given in a call (without layers the model), as rows count them for
    ``min_tokens``: elements of the first tensor but for its last dimension."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Modules by site; those of layers that differ in their times alone are one."""
        alike = defaultdict[Site, list[Site]](list)
        for site in self.modules.values():
            alike[site._replace(layers=(), us=0.0)].append(site)
        names = [site.site for site in alike]
        return tuple(
            site._replace(
                layers=tuple(number for one in alike[site] for number in one.layers),
                us=mean(one.us for one in alike[site]),
            )
            for site in sorted(alike, key=lambda site: names.index(site.site))
        )

    @property
    def num_bytes(self) -> int:
        """What the whole model saves."""
        return sum(site.num_bytes for site in self.modules.values())

    @property
    def growth(self) -> Growth | None:
        """Of that; None unless `fit` was asked."""
        found = [site.growth for site in self.modules.values() if site.growth is not None]
        return Growth(*map(sum, zip(*found, strict=True))) if found else None

    def fit(self, *others: ModelMap) -> ModelMap:
        """Return this map with the growth of each site, of forwards of at least two other lengths.

        Raises:
            ConfigError: there are no three `tokens` in all, by which a line would show.
        """
        maps = {one.tokens: one.modules for one in (self, *others)}
        if len(maps) < 3:
            raise ConfigError("whether memory grows by tokens shows in maps of three lengths")
        (low, *_, high), grown = sorted(maps), dict[str, Site]()
        for path, site in self.modules.items():
            bytes_at = {
                x: found[path].num_bytes if path in found else 0 for x, found in maps.items()
            }
            slope = (bytes_at[high] - bytes_at[low]) / (high - low)
            fixed = {round(size - slope * tokens) for tokens, size in bytes_at.items()}
            line = (slope, fixed.pop()) if len(fixed) == 1 else (math.nan, math.nan)
            grown[path] = site._replace(growth=Growth(*line))
        return self._replace(modules=grown)

    def __str__(self) -> str:
        sites = self.sites
        notes = [*dict.fromkeys(site.refusal for site in sites if site.refusal)]
        marks = {note: f" ({number})" for number, note in enumerate(notes, 1)}
        columns = {
            "layers": [ranges(site.layers) or "-" for site in sites],
            "site": [site.site for site in sites],
            "class": [site.kind for site in sites],
            "saves": [format_bytes(site.num_bytes) for site in sites],
            "per token": ["" if site.growth is None else str(site.growth) for site in sites],
            "tensors": [str(site.num_tensors) for site in sites],
            "forward": [format_us(site.us) if site.us else "" for site in sites],
            "recompute": [site.recompute + marks.get(site.refusal, "") for site in sites],
            "saved too by": [", ".join(_near(x, site.site) for x in site.others) for site in sites],
        }
        cells = [[head, *column] for head, column in columns.items() if any(column)]
        widths = [max(map(len, column)) for column in cells]
        lines = [
            "  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*cells, strict=True)
        ]
        lines += [f"{mark.strip()} {note}" for note, mark in marks.items()]
        growth = "" if self.growth is None else f", per token {self.growth}"
        return "\n".join([*lines, f"in all: {format_bytes(self.num_bytes)}{growth}"])


def _near(name: str, site: str) -> str:
    """Name a site as seen from another: what is inside begins with a dot."""
    if name.startswith((f"{site}.", f"{site} of")):
        return name[len(site) :].removeprefix(" of ")
    return name.removeprefix(f"{site.rpartition('.')[0]}.")


class _Watch(SavedMemory):
    """Sees besides what calls are given: the most tokens, and what can't be given again."""

    def __init__(self, may_move: MayMove) -> None:
        super().__init__(may_move)
        self.tokens, self.refusals = defaultdict[str, float](float), defaultdict[str, str](str)

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        super()._enter(path, module, args, kwargs)
        self.tokens[path] = max(self.tokens[path], tokens_of(args, kwargs))
        leaves = [x for x in tree_leaves((args, kwargs)) if not isinstance(x, FakeTensor)]
        refusal = sites.call_refusal(module, leaves) or sites.parts_of(module)[1]
        refusal = refusal if is_recording() else "it runs without grad, or in a checkpoint"
        self.refusals[path] = self.refusals[path] or refusal


def map_model(model: nn.Module, *args: Any, **kwargs: Any) -> ModelMap:
    """Run one forward of a model with these arguments, and return what it saves where.

    Where all of it is on the current GPU, a second forward is timed, with the device held back
    behind the host: random numbers are drawn, and buffers written, once more. Nothing is offloaded
    meanwhile. Works on any device, on ``meta`` too, where nothing is computed and no memory is
    needed. Inside what is compiled or recomputed by others nothing is seen.

    Raises:
        ConfigError: it has saved nothing, as without grad.
    """
    modules = named_modules(model)
    kept = {
        x.untyped_storage()._cdata
        for x in (*model.parameters(), *model.buffers())
        if x.layout is torch.strided and not nn.parameter.is_lazy(x)
    }

    def may_move(tensor: torch.Tensor) -> bool:
        is_strided = tensor.layout is torch.strided and not is_parameter(tensor)
        return is_strided and tensor.untyped_storage()._cdata not in kept

    seen = _Watch(may_move)
    try:
        seen.watch(modules)
        output = model(*args, **kwargs)
    finally:
        seen.end()
        sweep(modules.values())
    found = _sites(seen, modules, sites.sites_of_layers(model))
    del output  # until here, so that no memory is another's
    if not seen.sizes:
        raise ConfigError("the forward has saved nothing: is grad on, and does anything need it?")
    compiled = compiled_parts(modules.values())
    timed = {x: modules[x] for x in found if has_forward(modules[x]) and modules[x] not in compiled}
    us = _forward_us(model, timed, partial(model, *args, **kwargs))
    found = {path: site._replace(us=us.get(path, 0.0)) for path, site in found.items()}
    sizes = [seen.tokens[path] for path in layers_of(modules)]
    return ModelMap(found, max(sizes, default=tokens_of(args, kwargs)))


def _forward_us(
    model: nn.Module, modules: Mapping[str, nn.Module], forward: Callable[[], object]
) -> dict[str, float]:
    """Return how long modules run in a forward; nothing unless a device with a clock has all."""
    config = OffloadConfig()
    if current_device(config) is None:
        return {}
    backend = create_backend(config)
    if any(isinstance(x, FakeTensor) or not backend.owns(x) for x in model.parameters()):
        return {}
    timed = {path: sites.Site(0, path, module) for path, module in modules.items()}
    times = sites.CallTimes(timed, backend, holds_back=True)
    try:
        times.begin()
        forward()
    finally:
        times.end()
    return {path: times.us(path) for path in timed}


def _sites(
    seen: _Watch, modules: Mapping[str, nn.Module], known: Mapping[str, sites.Site]
) -> dict[str, Site]:
    """Return modules that save, whole layers and their ``known`` parts, each in its own layer."""
    layers, compiled = layers_of(modules), compiled_parts(modules.values())
    tensors, others = defaultdict[str, list[int]](list), defaultdict[str, set[str]](set)
    places = {path: _place(path, layers) for path in modules}
    for key, paths in seen.savers.items():
        savers = [*dict.fromkeys(paths)]
        tensors[savers[0]].append(seen.sizes[key])
        for saver in savers:
            others[saver].update(
                name if at in ("", places[saver][0]) else f"{name} of other layers"
                for at, name in (places[one] for one in savers if one != saver)
            )
    found = dict[str, Site]()
    for path, module in modules.items():
        has_parts = path in known and module._modules  # else it may do nothing
        if not (path in others or path in layers or has_parts):
            continue
        layer, site = places[path]
        refusal = "it is compiled" if module in compiled else seen.refusals[path]
        recompute = "none" if refusal else "row"
        if path in known and not refusal:
            refusal = known[path].refusal
            recompute = "row" if refusal else "search"
        may = (recompute, refusal) if layer else ("", "")
        saved = len(tensors[path]), sum(tensors[path]), tuple(sorted(others[path]))
        numbers = (layers[layer],) if layer else ()
        found[path] = Site(numbers, site, type(module).__name__, *saved, *may)
    return found


def _place(path: str, layers: Iterable[str]) -> tuple[str, str]:
    """Return the layer of a module and its name in there, or nothing and its whole name."""
    for layer in layers:
        if f"{path}.".startswith(f"{layer}."):
            return layer, path[len(layer) + 1 :] or "layer"
    return "", path or "model"
