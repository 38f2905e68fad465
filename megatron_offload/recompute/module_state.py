"""What modules have besides their code, so that their forward can run again with the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from operator import is_, itemgetter
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import nn

from megatron_offload.engine.saved_tensor import changed_in_place
from megatron_offload.errors import StateError
from megatron_offload.recompute.recipe import lasting

_INNER = frozenset(vars(nn.Module()))
"""What each module has, besides what its class gives it."""

_TABLES = "_parameters", "_buffers", "_modules"
_NUM_TABLES = len(_TABLES)

_PLAIN: set[tuple[type, ...]] = set()
"""Types of attributes of which none is a tensor or may change of itself."""


class Part:
    """A module: it itself, and what it has."""

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)  # which has a hook that has this
        self._names: tuple[str, ...] = ()
        self._num_attributes = -1
        self._read: Callable[[dict[str, Any]], tuple[Any, ...]]

    def read(self) -> _Had:
        """Return what it has now."""
        own = vars(self.module())
        try:
            values = self._read(own) if len(own) == self._num_attributes else ()
        except KeyError:
            values = ()
        if not values:
            self._num_attributes = len(own)
            self._names = *_TABLES, "training", *(own.keys() - _INNER)
            self._read = itemgetter(*self._names)
            values = self._read(own)
        return own, self._names, values, [x.copy() if x else x for x in values[:_NUM_TABLES]]

    def still_has(self, was: _Had) -> bool:
        """Whether it has what it had."""
        own, names, values, tables = was
        if names is not self._names or len(own) != self._num_attributes:
            return False
        try:
            if not all(map(is_, self._read(own), values)):
                return False
        except KeyError:
            return False
        for table, then in zip(values, tables, strict=False):
            if (table or then) and (
                [*then] != [*table] or not all(map(is_, then.values(), table.values()))
            ):
                return False
        return True


_Had: TypeAlias = tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...], list[dict[str, Any]]]
"""A module's attributes; names and values of its tables, its training flag and those that aren't
inner ones; and copies of the tables, but of empty ones."""


class ModuleState:
    """The attributes, children, parameters and buffers of modules as they are when this is made.

    Args:
        parts: the modules.
        copies: whether small parameters are copied, in case they are written to unseen.
    """

    def __init__(self, parts: Sequence[Part], *, copies: bool) -> None:
        self._parts = parts
        self._had = had = [part.read() for part in parts]
        self._parameters: list[torch.Tensor] = []
        self._state: list[torch.Tensor] = []
        known: dict[int, Any] = {}
        for place, (own, names, values, (parameters, buffers, children)) in enumerate(had):
            if copies and parameters:
                pairs = parameters.items()
                parameters = {key: x if x is None else _kept(x, known) for key, x in pairs}
            kinds = tuple(map(type, values))
            if kinds not in _PLAIN or copies:
                values = self._look_at(values, kinds, known)
                had[place] = own, names, values, [parameters, buffers, children]
            self._parameters += [x for x in parameters.values() if x is not None]
            if buffers:
                self._state += [x for x in buffers.values() if x is not None]
        self.training = tuple([values[_NUM_TABLES] for _, _, values, _ in had])
        self._versions = [x._version for x in self._parameters]
        self._state_versions = [x._version for x in self._state]
        self._values: list[torch.Tensor] | None = None

    def _look_at(
        self, values: tuple[Any, ...], kinds: tuple[type, ...], known: dict[int, Any]
    ) -> tuple[Any, ...]:
        """Find the tensors among some attributes, and copy what may change of itself."""
        found = [*values[: _NUM_TABLES + 1]]
        others = values[_NUM_TABLES + 1 :]
        for value in others:
            if isinstance(value, torch.Tensor):
                if value.grad_fn is not None:  # of an earlier call, whose graph may go
                    value = value.detach().requires_grad_()
                self._state.append(value)
            found.append(_copy_of(value, known))
        if not any(isinstance(x, (torch.Tensor, list, dict, set)) for x in others):
            _PLAIN.add(kinds)
        return tuple(found)

    def keep_values(self) -> None:
        """Copy the buffers and other tensors, in case that the call writes to them."""
        self._values = [x.detach().clone() for x in self._state]

    def is_unchanged(self) -> bool:
        """Whether the buffers and other tensors are as they were."""
        return [x._version for x in self._state] == self._state_versions

    @contextmanager
    def in_force(self, path: str, unit: str) -> Iterator[None]:
        """Give the modules what they had; behind it all is as it was before.

        Raises:
            InPlaceModificationError: a parameter was changed in place since.
            StateError: a buffer was, of which nothing is known; or a parameter has no memory now.
        """
        for x, version in zip(self._parameters, self._versions, strict=True):
            if x._version != version:
                what = f"a parameter of {path}, which is recomputed ({unit!r}),"
                raise changed_in_place(what, x._version, version)
            is_plain = type(x) in (torch.Tensor, nn.Parameter)
            if is_plain and x.nbytes and not x.untyped_storage().nbytes():
                raise StateError(
                    f"a parameter of {path} has no memory now, as where it is sharded until its "
                    f"own module's backward; leave {unit!r} out of recompute"
                )
        changed = [] if self.is_unchanged() else self._state
        if changed and self._values is None:
            raise StateError(
                f"a buffer or another tensor of {path} was written to since its forward; leave "
                f"{unit!r} out of recompute"
            )
        had = self._had
        if changed:  # it writes to copies
            kept = zip(changed, self._values or (), strict=True)
            written = {id(x): value.clone() for x, value in kept}
            had = [
                (
                    own,
                    names,
                    tuple(written.get(id(x), x) for x in values),
                    [{key: written.get(id(x), x) for key, x in table.items()} for table in tables],
                )
                for own, names, values, tables in had
            ]
        parts = self._parts
        before = [
            was if part.still_has(was) else part.read()
            for part, was in zip(parts, had, strict=True)
        ]
        try:
            for was, now in zip(had, before, strict=True):
                if was is not now:
                    _put_back(was)
            yield
        finally:
            for part, was in zip(parts, before, strict=True):
                if not part.still_has(was):
                    _put_back(was)


def _put_back(was: _Had) -> None:
    """Give a module what it had."""
    own, names, values, tables = was
    _fill(own, dict(zip(names, values, strict=True)), own.keys() - _INNER)
    for table, then in zip(values, tables, strict=False):
        _fill(table, then, table.keys())


def _fill(table: dict[str, Any], values: Mapping[str, Any], names: Set[str]) -> None:
    table.update(values)  # first, so that an interrupt leaves no empty module
    for name in names - values.keys():
        del table[name]


def _kept(parameter: torch.Tensor, known: dict[int, Any]) -> torch.Tensor:
    """Return a copy of a parameter where it is small, made once."""
    if id(parameter) not in known:
        known[id(parameter)] = lasting(parameter)
    copied: torch.Tensor = known[id(parameter)]
    return copied


def _copy_of(value: Any, known: dict[int, Any]) -> Any:
    """Return a container with copies of those in it, each made once."""
    if not isinstance(value, (list, dict, set)):
        return value
    if id(value) not in known:
        known[id(value)] = copied = copy.copy(value)
        if not isinstance(copied, set):
            for key, inner in list(
                copied.items() if isinstance(copied, dict) else enumerate(copied)
            ):
                copied[key] = _copy_of(inner, known)
    return known[id(value)]
