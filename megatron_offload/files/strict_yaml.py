"""Plain YAML from anyone: mappings with text keys, lists, texts, numbers, true, false and null.

Nothing that a text says makes the reader run code, wait, or build more than the text itself holds.
Anchors, aliases and tags, which could, are refused where they stand; so are the forms that surprise
(merge keys, times, numbers to the base 60).
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from megatron_offload.errors import ConfigError, shorten

MAX_YAML_BYTES = 256 * 1024
"""Longer texts are no configuration of a person, and take long to read."""

MAX_NODES = 10_000
"""Keys, values, lists and mappings in one text, at most."""

MAX_DEPTH = 32
"""Lists and mappings within one another, at most."""

_MAX_NUMBER_LENGTH = 64


def parse_yaml(text: str) -> Any:
    """Return what a YAML text holds; None for an empty one. A `ConfigError` names the line."""
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(f"the text is longer than {MAX_YAML_BYTES} characters")
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = shorten(error.problem or error.context or "it can't be parsed", 200)
        raise ConfigError(f"line {mark.line + 1}: {problem}" if mark else problem) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {shorten(' '.join(str(error).split()))}") from error


class _StrictLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` less all that is more than plain data."""

    _depth = 0
    _num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._num_nodes += 1
        self._depth += 1
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = f"alias *{shorten(str(event.anchor))}: write the value out"
        elif event.anchor is not None:
            problem = f"anchor &{shorten(event.anchor)}: write the value out"
        elif event.tag is not None:
            problem = f"tag {shorten(event.tag)!r}: only plain values are read"
        elif self._num_nodes > MAX_NODES:
            problem = f"more than {MAX_NODES} keys and values"
        elif self._depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            is_scalar = isinstance(key_node, yaml.ScalarNode)
            key = self.construct_object(key_node, deep=True) if is_scalar else None
            problem = None
            if not isinstance(key, str):
                shown = shorten(key_node.value) if is_scalar else "a list or a mapping"
                problem = f"a key must be text, got {shown}"
            elif key == "<<" and key_node.style is None:
                problem = "merge key <<: write the values out"
            elif key in mapping:
                problem = f"key {shorten(key)!r} is given twice"
            if problem:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            mapping[str(key)] = self.construct_object(value_node, deep=True)
        return mapping

    def text(self, node: yaml.ScalarNode) -> str:
        text: str = node.value
        if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text):
            problem = "a text can't hold the character \\0, nor half of one (a surrogate)"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return text

    def number(self, node: yaml.ScalarNode) -> int | float:
        text = node.value
        is_int = node.tag.endswith(":int")
        try:
            if len(text) > _MAX_NUMBER_LENGTH or ":" in text:
                raise ValueError
            value = self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)
            if not math.isfinite(value) or (is_int and not -(2**63) <= value < 2**63):
                raise ValueError
        except ValueError as error:
            problem = f"{shorten(text)} is no number that can be used here"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error
        return value


_StrictLoader.yaml_implicit_resolvers = {  # all other plain words are text
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.endswith((":null", ":bool", ":int", ":float"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _construct in (
    ("map", _StrictLoader.mapping),
    ("str", _StrictLoader.text),
    ("int", _StrictLoader.number),
    ("float", _StrictLoader.number),
):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _construct)
