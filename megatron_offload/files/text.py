"""Files that were handed to us, and files that must survive a crash while they are written.

A reader never follows what a file says beyond plain data, and ends in `ConfigError`; a writer that
fails or is killed leaves the file that was there.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from io import BufferedReader
from pathlib import Path
from typing import Any

from megatron_offload.errors import ConfigError, shorten

MAX_TEXT_BYTES = 16 * 1024**2
"""Larger files are no configuration of a person."""

MAX_DEPTH = 32
"""Lists and mappings within one another, at most."""


def read_text(path: str | Path, *, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a regular file of at most ``limit_bytes``.

    Raises:
        ConfigError: it is missing, no regular file, too large, unreadable or not UTF-8.
    """
    with open_regular(path) as file:
        try:
            content = file.read(limit_bytes + 1)
            if len(content) > limit_bytes:
                raise ConfigError(f"can't read {path}: it holds more than {limit_bytes} bytes")
            return content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read {path}: {error}") from error


def open_regular(path: str | Path, *, follow_link: bool = True) -> BufferedReader:
    """Open a regular file for reading bytes; the caller closes it.

    Args:
        path: the file's.
        follow_link: whether ``path`` itself may be a symbolic link.

    Raises:
        ConfigError: it is missing, something else such as a folder or a pipe, or unreadable.
    """
    try:
        # Opening a pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags if follow_link else flags | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"can't read {path}: not a regular file")
    return open(descriptor, "rb")


def read_json(path: str | Path, *, limit_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Return what a JSON file holds, as `parse_json` reads it.

    Raises:
        ConfigError: as for `read_text` and `parse_json`.
    """
    return parse_json(read_text(path, limit_bytes=limit_bytes), str(path))


def parse_json(text: str, source: str, *, allow_nan: bool = False) -> Any:
    """Return what a JSON text holds, in time that grows with its length alone.

    A key given twice and a number that no float holds are refused.

    Args:
        text: the JSON.
        source: what to call it in an error, such as the file's path.
        allow_nan: take ``NaN`` and ``Infinity`` too, as Python itself writes them.

    Raises:
        ConfigError: it isn't JSON, or nested deeper than `MAX_DEPTH`.
    """
    constant = float if allow_nan else _no_constant
    try:
        data = json.loads(
            text, object_pairs_hook=_mapping, parse_constant=constant, parse_float=_finite
        )
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deep") from error
    except ValueError as error:
        raise ConfigError(f"{source} is not plain JSON: {error}") from error
    if isinstance(data, (dict, list)) and _is_deeper(data, MAX_DEPTH):
        raise ConfigError(f"{source} is nested deeper than {MAX_DEPTH} levels")
    return data


def replace_text(path: str | Path, text: str) -> None:
    """Write a file as a whole: aside first, then put in place of the one before.

    The folder must exist. The file gets the permissions that a plain ``open`` would give.

    Raises:
        OSError: it can't be written; the file that was there is untouched.
    """
    path = Path(path)
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.umask(mask := os.umask(0o077))
            os.fchmod(file.fileno(), 0o666 & ~mask)
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the operating system keep the names in a folder, over a loss of power too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"key {shorten(key)!r} is given twice")
        mapping[key] = value
    return mapping


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shorten(text)} is more than a number can be")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _is_deeper(data: dict[str, Any] | list[Any], depth: int) -> bool:
    """Whether lists and mappings lie deeper within one another."""
    inner = data.values() if isinstance(data, dict) else data
    return depth == 0 or any(
        _is_deeper(one, depth - 1) for one in inner if isinstance(one, (dict, list))
    )
