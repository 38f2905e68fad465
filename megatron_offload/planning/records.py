"""Records (named tuples, dataclasses) as JSON files, each field checked by its type.

An unknown key or a value of another type is refused; what has a default may be left out.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import parse_json

MAX_FILE_BYTES = 128 * 1024**2

T = TypeVar("T")


def to_json(record: Any, kind: str, version: int, *, indent: int | None = None) -> str:
    """Return a record as the text of a file of this kind, the same for the same record."""
    data = {"format": f"megatron_offload {kind}", "version": version} | _to_data(record)
    return json.dumps(data, indent=indent) + "\n"


def from_json(record: type[T], text: str, source: str, kind: str, version: int) -> T:
    """Return the record that a text holds, which errors call ``source``."""
    data = parse_json(text, source)
    wanted = f"megatron_offload {kind}", version
    if not isinstance(data, dict) or (data.pop("format", 0), data.pop("version", 0)) != wanted:
        raise ConfigError(f"{source}: 'format' and 'version' must be {wanted[0]!r} and {version}")
    return validate(record, data, source)


def _to_data(record: Any) -> Any:
    if is_dataclass(record):
        names = [each.name for each in fields(record)]
    elif isinstance(record, tuple):
        if not hasattr(record, "_fields"):
            return list(map(_to_data, record))
        names = list(record._fields)
    else:
        return record
    return {name: _to_data(getattr(record, name)) for name in names}
