"""The configurations that come with the package, found by their names from any folder.

Owns where they lie and how a name becomes a path. Must not know torch, nor what is in them.

Invariant: a path that exists wins over a name. Read next: `megatron_offload.config`.
"""

from __future__ import annotations

from pathlib import Path

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_yaml import shorten

__all__ = ["find_config"]


def find_config(given: str | Path, *, kind: str = "") -> Path:
    """Return the file of ``--config`` or ``--model``: a path, or a name such as ``quickstart``.

    Args:
        given: what the user wrote. With a suffix or a folder in it, it is a path.
        kind: the folder among the package's configurations that holds such files.

    Raises:
        ConfigError: a name that neither is a file nor one of the package's.
    """
    path = Path(given)
    is_other_file = path.exists() and not path.is_dir()
    if path.suffix or len(path.parts) != 1 or is_other_file:
        return path
    known = {file.stem: file for file in sorted((_folder() / kind).glob("*.yaml"))}
    if path.name not in known:
        raise ConfigError(
            f"there is no file {shorten(path.name)!r}, and no configuration of that name; "
            f"names are {', '.join(known)}"
        )
    return known[path.name]


def _folder() -> Path:
    """Return where they lie: in an installed package inside it, in a checkout beside it."""
    package = Path(__file__).parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
