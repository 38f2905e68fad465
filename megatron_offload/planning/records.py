"""Plain records (named tuples, dataclasses) as the objects of a JSON file, each field checked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, Field, create_model

from megatron_offload.core.profile import GroupKey
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, validate
from megatron_offload.files.text import parse_json

MAX_GROUPS = 100_000
"""Groups of one rank's step, at most."""

MAX_FILE_BYTES = 128 * 1024**2

Amount = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A number of bytes or of things; no text, no truth value."""

Number = Annotated[int, Field(strict=True, ge=1, lt=2**31)]

Name = Annotated[str, Field(strict=True, max_length=200)]

_Duration = Annotated[float, Field(strict=True, ge=0)]

_FIELDS: dict[Any, Any] = {
    int: Amount,
    int | None: Amount | None,
    float: _Duration,
    float | None: _Duration | None,
    str: Name,
    bool: bool,
}

_Record = TypeVar("_Record")


def record_model(record: Any, **fields: Any) -> Any:
    """Return the model of a record's object: the record's fields, all required, checked by type.

    A `GroupKey` stands as its two numbers.

    Args:
        record: a class of records.
        **fields: as `pydantic.create_model` takes them, in place of the record's or besides; None
            for one that the object doesn't have.
    """
    own: dict[str, Any] = {}
    for name, hint in _hints(record).items():
        if hint is GroupKey:
            own |= {"chunk": (Amount, ...), "order": (Amount, ...)}
        elif name not in fields:
            own[name] = (_FIELDS[hint], ...)
    given = {name: field for name, field in fields.items() if field is not None}
    return create_model(record.__name__, __base__=StrictModel, **own, **given)


def many(model: Any, most: int = MAX_GROUPS, *, least: int = 0) -> Any:
    """Return a required field that holds so many of a model."""
    return Annotated[tuple[model, ...], Field(min_length=least, max_length=most)], ...


def read_model(model: type[BaseModel], text: str, source: str, what: str) -> Any:
    """Return what a JSON text holds; `ConfigError` says all that is wrong, one line each."""
    data = parse_json(text, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold {what}, got a {type(data).__name__}")
    return validate(model, data, source)


def record_of(record: Callable[..., _Record], read: BaseModel, **changed: Any) -> _Record:
    """Return the record that was read, with some fields in another form."""
    fields = dict(read) | changed
    if "key" in _hints(record):
        fields["key"] = GroupKey(fields["chunk"], fields["order"])
    return record(**{name: fields[name] for name in _hints(record)})


def to_data(record: Any) -> dict[str, Any]:
    """Return a record's fields as they stand in a file, one level deep."""
    fields = {name: getattr(record, name) for name in _hints(record.__class__)}
    key = fields.pop("key", None)
    return fields if key is None else key._asdict() | fields


@functools.cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)
