"""Plain YAML from anyone: mappings with text keys, lists, texts, numbers, true, false and null.

Owns what of YAML is read, and how much. Must not know torch, nor what the values mean.

Invariants: nothing that a text says makes the reader run code, wait, or build more than the text
itself holds. Anchors, aliases and tags, which could, are refused where they stand; so are the
forms that surprise (merge keys, times, numbers to the base 60). Everything else that is wrong ends
in a `ConfigError` of one line as well. Read next: `megatron_offload.config`.
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from megatron_offload.errors import ConfigError
from megatron_offload.files.text import MAX_DEPTH

__all__ = ["MAX_NODES", "MAX_YAML_BYTES", "parse_yaml", "shorten"]

MAX_YAML_BYTES = 256 * 1024
"""Longer texts are no configuration of a person, and take long to read."""

MAX_NODES = 10_000
"""Keys, values, lists and mappings in one text, at most."""

_MAX_NUMBER_LENGTH = 64
_PLAIN = ("null", "bool", "int", "float")
"""The plain words that mean something else than their text."""


def parse_yaml(text: str) -> Any:
    """Return what a YAML text holds; None for an empty one.

    Raises:
        ConfigError: it is not plain YAML; the text names the line.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(f"the text is longer than {MAX_YAML_BYTES} characters")
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "it can't be parsed"
        raise _wrong(shorten(problem), error.problem_mark or error.context_mark) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {shorten(' '.join(str(error).split()))}") from error


def shorten(text: str, limit: int = 80) -> str:
    """Return at most ``limit`` characters of a text that goes into an error."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _wrong(problem: str, mark: Any) -> ConfigError:
    return ConfigError(f"line {mark.line + 1}: {problem}" if mark is not None else problem)


class _StrictLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` less all that is more than plain data."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node, unless it is one of those that are refused."""
        event = self.peek_event()
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise _wrong(f"alias *{shorten(str(event.anchor))}: write the value out", mark)
        if event.anchor is not None:
            raise _wrong(f"anchor &{shorten(event.anchor)}: write the value out", mark)
        if event.tag is not None:
            raise _wrong(f"tag {shorten(event.tag)!r}: only plain values are read", mark)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _wrong(f"more than {MAX_NODES} keys and values", mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _wrong(f"nested deeper than {MAX_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _construct_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        is_scalar = isinstance(key_node, yaml.ScalarNode)
        key = loader.construct_object(key_node, deep=True) if is_scalar else None
        mark = key_node.start_mark
        if not isinstance(key, str):
            shown = shorten(key_node.value) if is_scalar else "a list or a mapping"
            raise _wrong(f"a key must be text, got {shown}", mark)
        if key == "<<" and key_node.style is None:
            raise _wrong("merge key <<: write the values out", mark)
        if key in mapping:
            raise _wrong(f"key {shorten(key)!r} is given twice", mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _construct_text(loader: _StrictLoader, node: yaml.ScalarNode) -> str:
    text: str = node.value
    if "\0" in text:
        raise _wrong("a text can't hold the character \\0", node.start_mark)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _wrong("a text can't hold half a character (a surrogate)", node.start_mark) from error
    return text


def _construct_int(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    return int(_number(loader, node, yaml.SafeLoader.construct_yaml_int))


def _construct_float(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    return float(_number(loader, node, yaml.SafeLoader.construct_yaml_float))


def _number(loader: _StrictLoader, node: yaml.ScalarNode, construct: Any) -> int | float:
    text = node.value
    problem = f"{shorten(text)} is no number that can be used here"
    if len(text) > _MAX_NUMBER_LENGTH or ":" in text:
        raise _wrong(problem, node.start_mark)
    try:
        value: int | float = construct(loader, node)
    except ValueError as error:
        raise _wrong(problem, node.start_mark) from error
    if not math.isfinite(value) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        raise _wrong(problem, node.start_mark)
    return value


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in _PLAIN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_StrictLoader.add_constructor("tag:yaml.org,2002:str", _construct_text)
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)
