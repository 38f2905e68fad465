"""Every error that the package raises on purpose, the nearest valid name, and missing packages.

The text of an error says what happened, the numbers, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec

_LONGEST_COMPARED = 200
_MOST_LISTED = 50

_NAMES = {"megatron.core": "megatron-core", "vl_convert": "vl-convert-python"}
"""What ``pip`` calls packages that are imported by another name."""


class OffloadError(Exception):
    """Base of all errors of this package."""

    exit_status = 1
    """Of a command that ends with it."""


class ConfigError(OffloadError, ValueError):
    """A user's input (YAML, flag, argument) is wrong; nothing was started."""

    exit_status = 2


class TargetError(ConfigError):
    """A memory target that no choice of groups keeps; the text says by how much it is missed."""

    exit_status = 1


class StateError(OffloadError, RuntimeError):
    """A group was asked for a move that its state table does not have: a bug in the caller."""


class InPlaceModificationError(OffloadError, RuntimeError):
    """A tensor needed for backward was changed in place after it was saved."""


class CorruptionError(OffloadError, RuntimeError):
    """A tensor was reloaded, or was recomputed, other than it was; checking mode compares bits."""


class HazardError(OffloadError, RuntimeError):
    """The simulated backend saw two accesses that no wait orders."""


class IntegrationError(OffloadError, RuntimeError):
    """Another library is absent, or of a version that the package can't work with."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest valid name, or a list of the first ones."""
    names = sorted({str(v) for v in valid})
    # Comparing takes the product of both lengths.
    compared = [one[:_LONGEST_COMPARED] for one in names]
    nearest = difflib.get_close_matches(name[:_LONGEST_COMPARED], compared, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    listed = ", ".join(one[:_LONGEST_COMPARED] for one in names[:_MOST_LISTED])
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"; valid names are {listed}{more}" if names else ""


def shorten(text: str, limit: int = 80) -> str:
    """Return at most ``limit`` characters of a text that goes into an error."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it isn't."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # nor can the package around it
        return False


def require(what: str, *packages: str) -> None:
    """See that the packages for ``what`` are there; else a `ConfigError` says how to get them."""
    missing = [_NAMES.get(package, package) for package in packages if not is_installed(package)]
    if missing:
        needed = f"{what} needs {' and '.join(missing)}"
        raise ConfigError(f"{needed}; run: pip install {' '.join(missing)}")
