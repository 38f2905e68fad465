"""Where the commands write.

Owns what becomes of a file that can't be written. Must not know what is written.

Invariant: a folder that isn't there fails before anything long begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron_offload.errors import ConfigError

__all__ = ["PREDICTED", "check_place", "writing"]

PREDICTED = "predicted by simulation, not measured: hold it against a run before you rely on it"


def check_place(flag: str, path: Path | None) -> None:
    """Refuse a file that couldn't be written where it is asked for.

    Raises:
        ConfigError: it is a folder, or its folder doesn't exist.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{flag} {path}: name a file in a folder that exists")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a user's error.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}; choose another file") from error
