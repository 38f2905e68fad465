"""Old names of what users read and write: each works for one version, and warns once."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

RENAMED = {
    "device-target": "memory-target",
    "held_elsewhere_bytes": "externally_referenced_bytes",
    "is_settled": "is_converged",
    "max-cost": "most-slowdown-percent",
    "num_early_returns": "num_cancelled_offloads",
    "peak_away_bytes": "peak_released_bytes",
    "peak_away_bytes_by_name": "peak_released_bytes_by_name",
    "remade_bytes": "recomputed_bytes",
    "remake": "recompute",
    "target_bytes": "memory_target",
}


@functools.cache
def current_name(old: str) -> str:
    """Return what an old name is called now, and warn at the first use; else a `KeyError`."""
    name = re.split(r"[/.]|^--", old)[-1]
    new = old.removesuffix(name) + RENAMED[name]
    warnings.warn(f"{old!r} is now {new!r}", DeprecationWarning, stacklevel=3)
    return new


class OldAttributes:
    """Base of classes whose attributes are found by their old names, too."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a checker is to refuse them

        def __getattr__(self, name: str) -> Any:
            """Return an attribute by its old name."""
            if name not in RENAMED:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            return getattr(self, current_name(name))


class OldKeys(dict[str, Any]):
    """Metrics by name, found by their old names, too, and among all counters."""

    counters: Mapping[str, Any] = {}

    def __missing__(self, key: str) -> Any:
        if key not in self.counters:
            if f"offload/{RENAMED.get(key.removeprefix('offload/'))}" not in self.counters:
                raise KeyError(key)
            return self.counters[current_name(key)]
        said = f"{key!r} is in metrics(all_counters=True) now"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return self.counters[key]


def with_current_names(data: Any) -> Any:
    """Return plain data, as for a version before, with each key's current name."""
    if isinstance(data, dict):
        items = data.items()
        return {current_name(k) if k in RENAMED else k: with_current_names(v) for k, v in items}
    return list(map(with_current_names, data)) if isinstance(data, list) else data
