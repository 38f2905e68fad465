"""Packages that only some commands need.

Owns which extra brings which of them, and the words where one is missing. Must not know what they
are for beyond that.

Invariant: what will be needed is asked for before any work is done. Read next: ``pyproject.toml``,
section ``project.optional-dependencies``.
"""

from __future__ import annotations

from importlib.util import find_spec

from megatron_offload.errors import ConfigError

__all__ = ["is_installed", "require"]

_EXTRAS = {
    "highspy": ("plan", "planning for a memory target"),
    "jinja2": ("report", "the HTML report"),
    "matplotlib": ("plots", "drawing a picture"),
    "megatron.core": ("megatron", "training"),
    "simpy": ("plan", "simulating a step"),
}


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it isn't."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # nor can the package around it
        return False


def require(*packages: str) -> None:
    """See that packages are there.

    Raises:
        ConfigError: one is missing; the text says what installs it.
    """
    for package in packages:
        if not is_installed(package):
            extra, what = _EXTRAS[package]
            raise ConfigError(
                f"{what} needs {package}, which is missing; run: "
                f"pip install 'megatron-offload[{extra}]'"
            )
