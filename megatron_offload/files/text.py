"""Files that were handed to us, and files that must survive a crash while they are written.

A reader never follows what a file says beyond plain data, and ends in `ConfigError`; a writer that
fails or is killed leaves the file that was there.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from megatron_offload.errors import ConfigError, shorten

MAX_TEXT_BYTES = 16 * 1024**2
"""Larger files are no configuration of a person."""


def read_text(path: str | Path, *, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a regular file of at most ``limit_bytes``; else a `ConfigError`."""
    why = "not a regular file"
    try:
        if stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            with open(path, "rb") as file:
                content = file.read(limit_bytes + 1)
            if len(content) <= limit_bytes:
                return content.decode("utf-8")
            why = f"it holds more than {limit_bytes} bytes"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"can't read {path}: {why}") from error
    raise ConfigError(f"can't read {path}: {why}")


def read_json(path: str | Path, *, limit_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Return what a JSON file holds, in time that grows with its length; else a `ConfigError`."""
    text = read_text(path, limit_bytes=limit_bytes)
    try:
        data = from_json(text, allow_inf_nan=False)  # nested no deeper than it can be read
        # No integer may be too large for a float.
        json.loads(text, object_pairs_hook=_once, parse_int=lambda digits: int(digits) / 1)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not plain JSON: {error}") from error
    return data


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a key that is given twice: one of its values would be ignored in silence."""
    keys = Counter(key for key, _ in pairs)
    if len(keys) < len(pairs):
        raise ValueError(f"key {shorten(keys.most_common(1)[0][0])!r} is given twice")


def replace_text(path: str | Path, text: str) -> None:
    """Write a file as a whole, with the permissions of a plain ``open``, into a folder that exists.

    An OSError leaves the file that was there untouched.
    """
    with replacing(Path(path)) as aside:
        aside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the file that takes a file's place once the block has written it without an error."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield aside
        with open(aside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
