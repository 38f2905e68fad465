"""The map of a model: what its sites save for backward, as one forward has shown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
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
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.module_hooks import (
    ModuleHook,
    compiled_parts,
    named_modules,
    tokens_of,
)
from megatron_offload.errors import ConfigError
from megatron_offload.model_map.call_times import CallTimes
from megatron_offload.model_map.sites import Site as RowSite
from megatron_offload.model_map.sites import call_refusal, sites_of_layers
from megatron_offload.model_map.structure import has_forward, layers_of
from megatron_offload.model_map.watch import SavedMemory


class Growth(NamedTuple):
    """What is saved, as a line over the tokens of a layer's call; NaN where it is none."""

    bytes_per_token: float
    fixed_bytes: float

    def __str__(self) -> str:
        if math.isnan(self.bytes_per_token):
            return "not linear"
        is_shown = abs(self.fixed_bytes) > byte_unit(self.bytes_per_token)[0] / 20
        fixed = f" + {format_bytes(self.fixed_bytes)}" if is_shown else ""
        return f"{format_bytes(self.bytes_per_token)}{fixed}"


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
    """What the forward of one layer's takes, on average, with all modules inside; 0 if unknown."""


class ModelMap(NamedTuple):
    """The sites that save anything, layers, MLPs and attentions, in the order of the model."""

    modules: Mapping[str, Site]
    """By dotted name, each module as a site of its own layer alone."""
    tokens: float
    """The most that a layer was given in one call, without layers the model: elements of the first
    tensor but for its last dimension, as ``min_tokens`` of rows counts."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Modules by site, those of layers that differ in their times alone as one."""
        alike = defaultdict[tuple[bool, str], defaultdict[Site, list[Site]]](
            lambda: defaultdict(list)
        )
        for one in self.modules.values():
            alike[bool(one.layers), one.site][one._replace(layers=(), us=0.0)].append(one)
        return tuple(
            what._replace(
                layers=tuple(number for one in found for number in one.layers),
                us=mean(one.us for one in found),
            )
            for by_site in alike.values()
            for what, found in by_site.items()
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
        """Return this map with what each site saves by token, of two more forwards or any number.

        Raises:
            ConfigError: there are no three maps of different `tokens`, by which a line would show.
        """
        maps = sorted((self, *others), key=lambda one: one.tokens)
        if len({one.tokens for one in maps}) < 3:
            raise ConfigError("whether memory grows by tokens shows in maps of three lengths")
        low, high = maps[0], maps[-1]

        def growth_of(path: str) -> Growth:
            sizes = [one.modules[path].num_bytes if path in one.modules else 0 for one in maps]
            slope = (sizes[-1] - sizes[0]) / (high.tokens - low.tokens)
            fixed = sizes[0] - slope * low.tokens
            is_line = all(
                math.isclose(size, fixed + slope * one.tokens, abs_tol=0.5)
                for size, one in zip(sizes, maps, strict=True)
            )
            return Growth(slope, round(fixed)) if is_line else Growth(math.nan, math.nan)

        modules = {path: x._replace(growth=growth_of(path)) for path, x in self.modules.items()}
        return self._replace(modules=modules)

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
    """Sees besides what calls are given.

    Attributes:
        refusals: by module, why a call of it can't run again.
        tokens: the most that one of the ``layers`` was given.
    """

    def begin_in(self, modules: Mapping[str, nn.Module], layers: Collection[str]) -> None:
        """Watch what comes, in modules by their dotted names, of which some are layers."""
        self.refusals, self.tokens, self._layers = dict[str, str](), 0.0, layers
        self.begin(modules)
        compiled = compiled_parts(modules.values())
        for path, module in modules.items():
            if has_forward(module) and module not in compiled:
                hook = ModuleHook(partial(self._note_given, path))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _note_given(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if path in self._layers:
            self.tokens = max(self.tokens, tokens_of(args, kwargs))
        leaves = [x for x in tree_leaves((args, kwargs)) if not isinstance(x, FakeTensor)]
        refusal = call_refusal(module, [*module.modules()][1:], leaves)
        self.refusals[path] = self.refusals.get(path) or refusal


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
    layers = layers_of(modules)
    kept = {
        x.untyped_storage()._cdata
        for x in (*model.parameters(), *model.buffers())
        if x.layout is torch.strided
    }

    def may_move(tensor: torch.Tensor) -> bool:
        is_strided = tensor.layout is torch.strided and not is_parameter(tensor)
        return is_strided and tensor.untyped_storage()._cdata not in kept

    seen = _Watch(may_move)
    try:
        seen.begin_in(modules, layers or {""})
        output = model(*args, **kwargs)
    finally:
        seen.end()
    found = _sites(seen, model, modules, layers)
    del output  # until here, so that no memory is another's
    if not seen.sizes:
        raise ConfigError("the forward has saved nothing: is grad on, and does anything need it?")
    times = _times_of(model, found)
    if times is not None:
        try:
            times.begin()
            model(*args, **kwargs)
        finally:
            times.end()
        found = {path: site._replace(us=times.us(path)) for path, site in found.items()}
    return ModelMap(found, seen.tokens)


def _times_of(model: nn.Module, paths: Iterable[str]) -> CallTimes | None:
    """Return what times modules, where the model is on a device that has a clock."""
    config = OffloadConfig()
    if current_device(config) is None:
        return None
    backend, modules = create_backend(config), named_modules(model)
    if not all(backend.owns(x) and not isinstance(x, FakeTensor) for x in model.parameters()):
        return None
    return CallTimes({x: RowSite(0, x, modules[x]) for x in paths}, backend, holds_back=True)


def _sites(
    seen: _Watch, model: nn.Module, modules: Mapping[str, nn.Module], layers: Mapping[str, int]
) -> dict[str, Site]:
    """Return modules as sites of their own layer: those that save, and whole layers and parts."""
    tensors, row_sites = defaultdict[str, list[int]](list), sites_of_layers(model)
    others: defaultdict[str, set[str]] = defaultdict(set)
    places = {path: _place(path, layers) for path in modules}
    for key, paths in seen.savers().items():
        savers = [*dict.fromkeys(paths)]
        tensors[savers[0]].append(seen.sizes[key])
        for saver in savers:
            others[saver].update(
                name if at in ("", places[saver][0]) else f"{name} of other layers"
                for one in savers
                for at, name in [places[one]]
                if one != saver
            )
    compiled = compiled_parts(modules.values())
    found = dict[str, Site]()
    for path in modules:
        if not (path in others or path in layers or path in row_sites):
            continue
        layer, site = places[path]
        by, refusal = "row", ""
        if not layer:
            by = ""
        elif modules[path] in compiled:
            by, refusal = "none", "it is compiled"
        elif seen.refusals.get(path):
            by, refusal = "none", seen.refusals[path]
        elif path in row_sites:
            refusal = row_sites[path].refusal
            by = "row" if refusal else "search"
        numbers = (layers[layer],) if layer else ()
        kind = type(modules[path]).__name__
        saved = len(tensors[path]), sum(tensors[path]), tuple(sorted(others[path]))
        found[path] = Site(numbers, site, kind, *saved, by, refusal)
    return found


def _place(path: str, layers: Iterable[str]) -> tuple[str, str]:
    """Return the layer of a module and its name in there, or nothing and its whole name."""
    for layer in layers:
        if f"{path}.".startswith(f"{layer}."):
            return layer, path[len(layer) + 1 :] or "layer"
    return "", path or "model"
