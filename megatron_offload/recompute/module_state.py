"""What modules have besides their code, so that their forward can run again with the same."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_offload.errors import StateError
from megatron_offload.recompute.recipe import Constants, lasting

_OF_ALL = frozenset(vars(nn.Module()))
"""The names of what each module has: none of it is a state of its forward that changes."""

_CONTAINERS = (list, dict, set, deque)

_Table = dict[str, Any]
T = TypeVar("T")


class ModulePlaces:
    """Where a module and its parts have what may change of itself: tensors and containers.

    It is looked for once, and again where names or classes are others. Of the modules nothing is
    kept.
    """

    def __init__(self) -> None:
        self._names: list[list[str]] = []
        self._types: list[type] = []
        self._found: list[tuple[int, str]] = []

    def of(self, tables: Sequence[_Table]) -> list[tuple[int, str]]:
        """Return the places in these tables, each by the table's number and its name there."""
        names = [*map(list, tables)]
        types = [*map(type, chain.from_iterable(map(dict.values, tables)))]
        if names != self._names or types != self._types:
            self._names, self._types = names, types
            self._found = [
                (i, name)
                for i, table in enumerate(tables)
                for name, value in table.items()
                if name not in _OF_ALL
                and isinstance(value, (torch.Tensor, torch.Generator, *_CONTAINERS))
            ]
        return self._found


class ModuleState:
    """What a module and its parts have when this is made, in the tables of their attributes.

    ``copies`` says whether small parameters are copied, in case they are written to unseen.
    """

    def __init__(self, parts: Sequence[nn.Module], places: ModulePlaces, *, copies: bool) -> None:
        owns, count = [vars(part) for part in parts], len(parts)
        self.training = tuple([bool(own.get("training")) for own in owns])
        # Attributes, buffers, parameters and children; what a library has in place of a dict too.
        self._tables: list[_Table] = [
            *owns,
            *[own["_buffers"] for own in owns],
            *[own["_parameters"] for own in owns],
            *[own["_modules"] for own in owns],
        ]
        self._then = [{**table} for table in self._tables]
        self._changing = places.of(self._then[: 2 * count])
        known: dict[int, Any] = {}
        tensors: list[torch.Tensor] = []
        for i, name in self._changing:
            self._then[i][name] = _copy_of(self._then[i][name], known, tensors)
        given = self._then[2 * count : 3 * count]
        own_parameters = {id(x): x for table in given for x in table.values() if x is not None}
        if copies:
            own_parameters = {key: lasting(x) for key, x in own_parameters.items()}
            for table in given:
                table.update({name: own_parameters.get(id(x)) for name, x in table.items()})
        self._given = Constants([*own_parameters.values()])
        self._tensors = Constants(tensors)
        self._contents: list[torch.Tensor] | None = None

    def keep_contents(self) -> None:
        """Copy the buffers and other tensors, in case that the call writes to them."""
        self._contents = [x.detach().clone() for x in self._tensors.tensors]

    def is_unchanged(self) -> bool:
        """Whether the buffers and other tensors are as they were."""
        return self._tensors.are_unchanged()

    def run(self, function: Callable[[], T], path: str, unit: str) -> T:
        """Call a function while the modules have this; behind it all is as it was before.

        Raises:
            InPlaceModificationError: a parameter was changed in place since.
            StateError: a buffer was, of which nothing is known; or a parameter has no memory now.
        """
        self._given.check(f"a parameter of {path}", unit)
        copies = dict[int, Any]()
        if not self.is_unchanged():
            if self._contents is None:
                raise StateError(
                    f"a buffer or another tensor of {path} was written to since its forward; leave "
                    f"{unit!r} out of recompute"
                )
            for x, content in zip(self._tensors.tensors, self._contents, strict=True):
                copies[id(x)] = content.clone().requires_grad_(x.requires_grad)
        now = [{**table} for table in self._tables]
        try:
            _put(self._tables, self._then)
            for i, name in self._changing:  # it writes to copies, each time that it runs
                self._tables[i][name] = _copy_of(self._then[i][name], copies)
            return function()
        finally:
            try:
                _put(self._tables, now)
            except BaseException:  # an interrupt has come meanwhile
                _put(self._tables, now)
                raise


def _put(tables: Sequence[_Table], values: Sequence[_Table]) -> None:
    """Give tables these values, and nothing besides."""
    # These are put first, so that an interrupt leaves no empty module.
    for table, own in zip(tables, values, strict=True):
        table.update(own)
        if len(table) != len(own):
            for name in [*table]:
                if name not in own:
                    del table[name]


def _copy_of(value: Any, known: dict[int, Any], tensors: list[torch.Tensor] | None = None) -> Any:
    """Return a container with copies of those in it, or of a generator, each made once.

    Tensors are added to the list, where there is one.
    """
    if id(value) in known:
        return known[id(value)]
    copied: Any = value
    if isinstance(value, torch.Tensor) and tensors is not None:
        if value.grad_fn is not None:  # of an earlier call, whose graph may go
            copied = value.detach().requires_grad_()
        known[id(value)] = copied
        tensors.append(copied)
    elif isinstance(value, torch.Generator):
        known[id(value)] = copied = value.clone_state()
    elif isinstance(value, _CONTAINERS):
        with suppress(Exception):  # one of a class of its own may let nothing be set
            known[id(value)] = copied = copy.copy(value)
            ordered = () if isinstance(value, set) else enumerate(value)
            for key, inner in [*(value.items() if isinstance(value, dict) else ordered)]:
                other = _copy_of(inner, known, tensors)
                if other is not inner:
                    copied[key] = other
    return copied
