"""What rows mean in one model: which modules are recomputed, and of which what is offloaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from megatron_offload.config import MEGATRON_MODULES, RECOMPUTE_SITES
from megatron_offload.core.row_config import LOSS, UNITS, RowConfig
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.model_map.module_hooks import compiled_parts, named_modules
from megatron_offload.model_map.structure import (
    PARTS,
    has_forward,
    keeps_inside,
    layers_of,
    modules_within,
    other_numbers,
)

_logger = logging.getLogger(__name__)


class FoundRows(NamedTuple):
    """Rows by the dotted names of modules."""

    recomputed: dict[str, RowConfig]
    offloaded: dict[str, RowConfig]
    units: frozenset[str]
    """What is recomputed in functions as well, wherever these are."""

    @property
    def what(self) -> tuple[object, ...]:
        """What they do in calls of any length."""
        return [{p: (x.site, x.offload) for p, x in one.items()} for one in self[:2]], self.units

    def drops_output(self, path: str) -> bool:
        """Whether what a module returns is recomputed too, where it is saved."""
        return path in self.recomputed and self.recomputed[path].site not in RECOMPUTE_SITES


def find_rows(
    rows: Sequence[RowConfig],
    modules: Mapping[str, nn.Module],
    unit_of: Callable[[nn.Module], str | None],
    *,
    is_part: bool = False,
) -> FoundRows:
    """Return of which modules rows are.

    Args:
        rows: as in the configuration.
        modules: of the model, by dotted names.
        unit_of: returns what a module is whose class is known, such as ``norm``: a row may be about
            all that are.
        is_part: whether what isn't found may be in another part of the model, on another rank.

    Raises:
        ConfigError: a row names what the model doesn't have, or what can't be hooked, or two rows
            are about one module.
    """
    units = frozenset(row.site for row in rows if row.recompute).intersection(UNITS)
    found, layers = FoundRows({}, {}, units), layers_of(modules)
    compiled, others = compiled_parts(modules.values()), other_numbers(modules, layers)
    for row in rows:
        if row.site == LOSS:
            continue
        numbers = [*layers.items(), *((path, number) for number, path in others.items())]
        numbered = [*dict.fromkeys(path for path, number in numbers if row.has_layer(number))]
        paths = [path for layer in numbered for path in modules_within(layer, row.site, modules)]
        if not is_part and layers and row.last_layer > max(*layers.values(), *others, 0):
            raise ConfigError(f"row {row}: {_missing(row, layers, [], modules)}")
        if is_part and row.min_tokens and row.site in MEGATRON_MODULES:
            raise ConfigError(f"row {row}: groups that Megatron's layers mark take no min_tokens")
        if is_part and (row.site in MEGATRON_MODULES or not numbered):
            continue  # a group that Megatron's layers mark, or of another part
        if row.recompute and row.site in UNITS:
            starts = tuple(f"{layer}." for layer in numbered)
            inner = (path for path in modules if path.startswith(starts))
            of_kind = [path for path in inner if unit_of(modules[path]) == row.site]
            unlike = [x for x in paths if x not in of_kind]
            if of_kind and unlike:
                raise ConfigError(
                    f"row {row}: {row.site!r} is the kind of {of_kind[0]} and the name of "
                    f"{unlike[0]}: name both apart, the latter as '**.{row.site}'"
                )
            paths = of_kind or paths
            if is_part and (row.layers == "all" or row.site == "mlp_act") and not paths:
                continue  # what Megatron's layers do in functions
        if not paths:
            missing = f"row {row}: {_missing(row, layers, numbered, modules)}"
            if not is_part:
                raise ConfigError(missing)
            _logger.warning("%s (in this part of the model)", missing)
        is_whole = row.recompute and row.site in RECOMPUTE_SITES
        if is_whole and paths and all(keeps_inside(modules[path]) for path in paths):
            raise ConfigError(
                f"row {row}: {paths[0]} has no parts, so that nothing inside it can be recomputed; "
                "name what is around it, such as 'layer'"
            )
        for path in paths:
            if other := found.recomputed.get(path, found.offloaded.get(path)):
                raise ConfigError(f"rows {other} and {row} are both about {path}")
            if not has_forward(modules[path]):
                raise ConfigError(
                    f"row {row}: {path} has no forward of its own that takes hooks; "
                    f"{row.site + '.*'!r} names what is in it"
                )
            if modules[path] in compiled:
                raise ConfigError(
                    f"row {row}: {path} is compiled, and hooks would be part of its graph; name "
                    "what torch.compile() has returned, as module.compile() leaves no place"
                )
            (found.recomputed if row.recompute else found.offloaded)[path] = row
    return found


def _missing(
    row: RowConfig,
    layers: Mapping[str, int],
    numbered: Sequence[str],
    modules: Mapping[str, nn.Module],
) -> str:
    """Say what there is in place of a site that isn't."""
    if not layers:
        return "no repeated layers were found in this model, so there is no site but 'model'"
    if not numbered:
        return f"there are layers {min(layers.values())} to {max(layers.values())}"
    names = {"layer", *(kind for kind in PARTS if modules_within(numbered[0], kind, modules))}
    first = {module: path for path, module in modules.items()}
    for layer in numbered:
        parts = {f"{layer}.{name}": x for name, x in named_modules(modules[layer]).items()}
        for path in modules_within(layer, row.site, parts):
            if parts[path] in first:
                return f"{path} is {first[parts[path]]} again; name it there"
        names |= {path.removeprefix(f"{layer}.") for path in parts} - {""}
    if row.site in names:
        return f"{row.site!r} has no forward of its own; '{row.site}.*' names what is in it"
    return f"no layer has a site {row.site!r}{did_you_mean(row.site, names)}"
