"""Plain YAML from anyone: mappings with text keys, lists, texts, numbers, true, false and null.

Nothing that a text says makes the reader run code, wait, or build more than the text itself holds.
Anchors, aliases and tags, which could, are refused where they stand; so are the forms that surprise
(merge keys, times, numbers to the base 60).
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any, NoReturn

import yaml

from megatron_offload.errors import ConfigError, shorten

MAX_YAML_BYTES = 256 * 1024
"""Longer texts are no configuration of a person, and take long to read."""

MAX_NODES = 10_000
"""Keys, values, lists and mappings in one text, at most."""

MAX_DEPTH = 32
"""Lists and mappings within one another, at most."""


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


def _refuse(problem: str, mark: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class _StrictLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` less all that is more than plain data."""

    _depth = 0
    _num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._num_nodes += 1
        self._depth += 1
        if isinstance(event, yaml.AliasEvent):
            _refuse(f"alias *{shorten(str(event.anchor))}: write the value out", event.start_mark)
        if event.anchor is not None:
            _refuse(f"anchor &{shorten(event.anchor)}: write the value out", event.start_mark)
        if event.tag is not None:
            _refuse(f"tag {shorten(event.tag)!r}: only plain values are read", event.start_mark)
        if self._num_nodes > MAX_NODES:
            _refuse(f"more than {MAX_NODES} keys and values", event.start_mark)
        if self._depth > MAX_DEPTH:
            _refuse(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            is_scalar = isinstance(key_node, yaml.ScalarNode)
            key = self.construct_object(key_node, deep=True) if is_scalar else None
            if not isinstance(key, str):
                shown = shorten(key_node.value) if is_scalar else "a list or a mapping"
                _refuse(f"a key must be text, got {shown}", key_node.start_mark)
            if key == "<<" and key_node.style is None:
                _refuse("merge key <<: write the values out", key_node.start_mark)
            if key in mapping:
                _refuse(f"key {shorten(key)!r} is given twice", key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def text(self, node: yaml.ScalarNode) -> str:
        if re.search("[\0\ud800-\udfff]", node.value):
            problem = "a text can't hold the character \\0, nor half of one (a surrogate)"
            _refuse(problem, node.start_mark)
        return str(node.value)

    def number(self, node: yaml.ScalarNode) -> int | float:
        is_int = node.tag.endswith(":int")
        value: int | float = math.nan
        if len(node.value) <= 64 and ":" not in node.value:  # no base 60
            with contextlib.suppress(ValueError):
                value = (self.construct_yaml_int if is_int else self.construct_yaml_float)(node)
        if not math.isfinite(value) or (is_int and not -(2**63) <= value < 2**63):
            _refuse(f"{shorten(node.value)} is no number that can be used here", node.start_mark)
        return value


for _construct, *_kinds in (
    (_StrictLoader.mapping, "map"),
    (_StrictLoader.text, "str", "timestamp", "value", "merge"),
    (_StrictLoader.number, "int", "float"),
):
    for _kind in _kinds:
        _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _construct)
