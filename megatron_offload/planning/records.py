"""Plain records (named tuples, dataclasses) as the objects of a JSON file, each field checked."""

from __future__ import annotations

import functools
from dataclasses import is_dataclass
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from pydantic import AfterValidator, Field, create_model

from megatron_offload.core.profile import GroupKey
from megatron_offload.files.strict_model import StrictModel

MAX_GROUPS = 100_000
"""Groups of one rank's step, at most."""

MAX_FILE_BYTES = 128 * 1024**2

Amount = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A number of bytes or of things; no text, no truth value."""

Number = Annotated[int, Field(strict=True, ge=1, lt=2**31)]

Name = Annotated[str, Field(strict=True, max_length=200)]

Duration = Annotated[float, Field(strict=True, ge=0)]

_FIELDS: dict[Any, Any] = {
    int: Amount,
    int | None: Amount | None,
    float: Duration,
    float | None: Duration | None,
    str: Name,
    bool: bool,
}


class _Object(StrictModel):
    """What a file holds of a record."""

    record: ClassVar[Any]


def record_model(record: Any, **fields: Any) -> Any:
    """Return the model of a record's object: the record's fields, all required, checked by type.

    A `GroupKey` stands as its two numbers. Other ``fields`` come in place of the record's, or
    besides, as `pydantic.create_model` takes them; None for one that the object doesn't have.
    """
    own: dict[str, Any] = {}
    for name, hint in _hints(record).items():
        if hint is GroupKey:
            own |= {"chunk": (Amount, ...), "order": (Amount, ...)}
        elif name not in fields:
            own[name] = (_FIELDS[hint], ...)
    given = {name: field for name, field in fields.items() if field is not None}
    model = create_model(record.__name__, __base__=_Object, **own, **given)
    model.record = record
    return model


def many(model: Any, most: int = MAX_GROUPS, *, least: int = 0) -> Any:
    """Return a required field that holds so many of a model."""
    return Annotated[tuple[model, ...], Field(min_length=least, max_length=most)], ...


def either(words: Any) -> Any:
    """Return a required field, ``choice`` in a file: whether it is the first of two words."""
    first, _ = get_args(words)
    return Annotated[words, AfterValidator(lambda word: word == first)], Field(alias="choice")


def record_of(read: Any, **changed: Any) -> Any:
    """Return the record that was read, with all in it, and some fields in another form."""
    if isinstance(read, tuple):
        return tuple(map(record_of, read))
    if not isinstance(read, _Object):
        return read
    fields = {name: record_of(value) for name, value in read} | changed
    hints = _hints(read.record)
    if "key" in hints:
        fields["key"] = GroupKey(fields["chunk"], fields["order"])
    return read.record(**{name: fields[name] for name in hints})


def to_data(record: Any) -> Any:
    """Return a record, with all in it, as it stands in a file."""
    is_named = hasattr(record, "_fields")
    if isinstance(record, tuple) and not is_named:
        return [to_data(one) for one in record]
    if not (is_named or is_dataclass(record)):
        return record
    fields = {name: to_data(getattr(record, name)) for name in _hints(record.__class__)}
    return fields.pop("key", {}) | fields


@functools.cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)
