"""Models of plain data from outside: strict, immutable, and clear about what is wrong.

Whatever is wrong ends in one `ConfigError` that names the key, what was given, and the nearest
valid name.
"""

from __future__ import annotations

import contextlib
import functools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import core_schema

from megatron_offload.errors import ConfigError, did_you_mean, shorten
from megatron_offload.files.renames import with_current_names
from megatron_offload.files.strict_yaml import parse_yaml
from megatron_offload.files.text import read_json, replace_text

_A_SIZE = "a size is 0 or more bytes, as a number or a text such as '64MiB'"
_UNITS = ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")


_SIZE = re.compile(r"\s*\+?(\d+\.?\d*|\.\d+)[\w\s]*")


def _plain_size(value: Any) -> Any:
    """Refuse what `ByteSize` takes for a number and shouldn't, or reads the beginning of."""
    text = str(value)
    is_wrong = isinstance(value, str) and not _SIZE.fullmatch(value)
    if isinstance(value, bool) or len(text) > 64 or text.startswith("-") or is_wrong:
        raise ValueError(_A_SIZE)
    return value


Bytes = Annotated[ByteSize, BeforeValidator(_plain_size), Field(lt=2**63)]
"""A number of bytes, or a text such as ``64MiB`` or ``1.5GB``."""


def _with_unit(size: ByteSize) -> ByteSize:
    """Refuse what no step fits into, and what was meant in another unit."""
    if size < 1024:
        said = f"{size} is {size} bytes; write {size}GiB or {size}MiB"
        raise ValueError(said if size else "a size of memory is above 0, such as 26GiB")
    return size


TargetBytes = Annotated[Bytes, AfterValidator(_with_unit)]
"""What a step has to fit into."""


if TYPE_CHECKING:
    _Read = TypeVar("_Read")
    _Given = TypeVar("_Given")

    class Converted(Generic[_Read, _Given]):
        """A field that is read as the first type, and may be given as the second."""

        def __get__(self, instance: object, owner: object) -> _Read: ...

        def __set__(self, instance: object, value: _Given) -> None: ...
else:
    Converted = Annotated  # pydantic converts by itself, and sees the first type alone


BytesField = Converted[Bytes, int | str]
OptionalBytesField = Converted[Bytes | None, int | str | None]


OneOrMany = BeforeValidator(lambda x: (x,) if isinstance(x, str) else x)
Names = Annotated[tuple[str, ...], OneOrMany]
"""A list of names; one text is a list of it."""

NamesField = Converted[Names, list[str] | tuple[str, ...] | str]


def default(value: Any) -> Any:
    """Return the default of a `Converted` field, for whose sake its type is hidden."""
    return value


def _no_switch(value: Any) -> Any:
    """Refuse true and false, which pydantic takes for 1 and 0, where a number is meant."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    return value


def _refuse_switches(schema: Any) -> None:
    """Let all numbers of a schema refuse true and false; sections inside do by themselves."""
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict) and part.get("type") in ("int", "float"):
            checked = core_schema.no_info_before_validator_function(_no_switch, {**part})
            part.clear()
            part.update(checked)
        elif isinstance(part, (dict, list, tuple)) and "cls" not in part:
            _refuse_switches(part)


class StrictModel(BaseModel):
    """A configuration section: immutable, and every unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return the schema in which no number is true or false."""
        own = schema = handler(source)
        while "cls" not in own and "schema" in own:  # checks of the section as a whole
            own = own["schema"]
        _refuse_switches(own.get("schema", own))
        return schema

    if not TYPE_CHECKING:  # a checker knows the keys without

        def __init__(self, /, **data: Any) -> None:
            """Build a section; `ConfigError` says all that is wrong, as of `validate`."""
            data = with_current_names(data)
            try:
                super().__init__(**data)
            except ValidationError as error:
                name = type(self).__name__
                raise _refusal(type(self), data, name, error) from error

        # So pydantic doesn't call it for sections within others.
        __init__.__pydantic_base_init__ = True


T = TypeVar("T")

_adapter_of = functools.cache(TypeAdapter)

_MOST_ISSUES = 20
"""So many of a configuration's errors are said one by one."""


def validate(model: type[T], data: Any, source: str, typed: Mapping[str, str] | None = None) -> T:
    """Build a model, or a record, from a mapping of plain values, which errors call ``source``.

    ``typed`` has by key the flags that gave a value in the place of ``source``.

    Raises:
        ConfigError: all that is wrong, one line each, with the nearest valid key.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{source} must hold a mapping of keys to values, got a {type(data).__name__}"
        )
    data = with_current_names(data)
    try:
        return cast(T, _adapter_of(model).validate_python(data))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except ValidationError as error:
        raise _refusal(model, data, source, error, typed) from error


def read_model(model: type[T], path: Path) -> T:
    """Build ``model`` from a JSON file; ConfigError as for `read_json` and `validate`."""
    return validate(model, read_json(path), str(path))


def write_model(path: Path, model: BaseModel) -> None:
    """Write a JSON file that `read_model` reads, as `replace_text` does."""
    replace_text(path, model.model_dump_json(indent=1) + "\n")


def _refusal(model: Any, data: Any, source: str, error: Any, typed: Any = None) -> ConfigError:
    issues, lines = error.errors(), dict[str, str]()
    for issue in issues[:_MOST_ISSUES]:
        where, kind = _place_of(data, issue["loc"])
        name, prefix = where and repr(shorten(where)), f"{source}: "
        place = f"{where}.kind" if issue["type"] == "union_tag_invalid" else where
        for key in (key for key in typed or () if f"{place}.".startswith(f"{key}.")):
            name, prefix = shorten(typed[key] + place.removeprefix(key).removesuffix(".0")), ""
        if issue["type"] == "literal_error" and name in lines:  # other words would do, too
            expected = f", {issue['ctx']['expected']} (got"
            lines[name] = lines[name].replace(" (got", expected, 1)
        # Of the types that a value may have the first says what is wrong.
        lines.setdefault(name, prefix + _explain(model, issue, name, kind))
    said = [*lines.values()]
    if len(issues) > _MOST_ISSUES:
        said.append(f"{source}: and {len(issues) - _MOST_ISSUES} more")
    return ConfigError("\n".join(said))


def _place_of(data: Any, loc: Sequence[int | str]) -> tuple[str, str]:
    """Return the keys that lead to what is wrong, as they were given, and their section's kind.

    A part of ``loc`` that is no key is a section's kind, or one of the types that a value may have.
    """
    keys, kind, kind_of_section = [], "", ""
    for part in loc:
        if isinstance(data, str):  # it may have been read as YAML
            with contextlib.suppress(ConfigError):
                data = parse_yaml(data)
        if part == 0 and isinstance(data, Mapping):
            continue  # the one of a list that may stand without it
        is_key = isinstance(data, Mapping) and (kind or part != data.get("kind"))
        if is_key or (isinstance(data, (list, tuple)) and isinstance(part, int)):
            keys.append(str(part))
            data = (data if is_key else dict(enumerate(data))).get(part)
            kind, kind_of_section = "", kind
        else:
            data, kind = {} if part == data else data, str(part)
    return ".".join(keys), kind_of_section


def _explain(model: Any, issue: Any, name: str, kind: str) -> str:
    path = [part for part in issue["loc"] if isinstance(part, str)]
    if issue["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        sections = set(_sections_at(model, path[:-1]))
        keys = _fields_of(*sections) if len(sections) == 1 else ()
        of_kind, key = f" of kind {kind!r}" if kind else "", str(issue["loc"][-1])
        inner = next(_inner_places(keys, key), "") if keys else ""
        hint = f"; did you mean {inner}?" if inner else did_you_mean(key, keys)
        return f"unknown key {name}{of_kind}{hint}"
    if issue["type"] == "missing":
        return f"{name} is required"
    if issue["input"] is None:
        return f"{name} has no value; give one, or leave the key out for its default"
    given = shorten(repr(issue["input"]), 81)
    message = issue["msg"].removeprefix("Value error, ")
    if issue["type"].startswith("union_tag"):
        fields = map(_fields_of, _sections_at(model, path))
        kinds = dict.fromkeys(one for each in fields for one in typing.get_args(each.get("kind")))
        if "tag" not in issue["ctx"]:
            return f"{name} needs a kind, one of {', '.join(kinds)} (got {given})"
        tag = str(issue["ctx"]["tag"])
        return f"{name}: there is no kind {shorten(repr(tag))}{did_you_mean(tag, kinds)}"
    if issue["type"] == "tuple_type":
        message = "a list is wanted, as in [a, b]"
    elif issue["type"] == "byte_size_unit":
        unit = issue["ctx"]["unit"]
        message = f"there is no unit {unit!r}{did_you_mean(unit.capitalize(), _UNITS)}"
    elif issue["type"] == "byte_size":
        message = _A_SIZE
    got = "" if given in message or len(given) > 80 else f" (got {given})"
    # What is wrong with all of it together stands at no key.
    key = name and f"{name}: "
    return f"{key}{message[0].lower()}{message[1:]}{got}"


def _sections_at(annotation: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield the sections that keys lead to from a type; a kind may stand for one of a union's."""
    fields = _fields_of(annotation)
    if not fields:
        for inner in typing.get_args(annotation):
            yield from _sections_at(inner, path)
    elif not path:
        yield annotation
    else:
        found = [*_sections_at(fields.get(path[0]), path[1:])]
        if not found and any(path[0] in typing.get_args(each) for each in fields.values()):
            found = [*_sections_at(annotation, path[1:])]
        yield from found


def _inner_places(fields: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yield where in the sections of a section a key is, and how it is given there."""
    for name, annotation in fields.items():
        for section in _sections_at(annotation, ()):
            if key in (own := _fields_of(section)):
                kinds = typing.get_args(own.get("kind"))
                given = f"{{'kind': {kinds[0]!r}, {key!r}: ...}}" if kinds else f"{{{key!r}: ...}}"
                yield f"'{name}.{key}', in Python {name}={given}"


def _fields_of(section: Any) -> dict[str, Any]:
    if not isinstance(section, type):
        return {}
    if issubclass(section, BaseModel):
        fields = section.model_fields.items()
        return {field.alias or name: field.annotation for name, field in fields}
    is_record = is_dataclass(section) or hasattr(section, "_fields")
    return typing.get_type_hints(section) if is_record else {}
