"""What modules have besides their code, so that their forward can run again with the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from megatron_offload.engine.saved_tensor import changed_in_place
from megatron_offload.errors import StateError
from megatron_offload.recompute.recipe import lasting

_TABLES = itemgetter("_parameters", "_buffers", "_modules")
_COPY, _VALUES = methodcaller("copy"), methodcaller("values")
_PLAIN: set[type] = {dict, set}
"""Types of attributes that neither are tensors nor may change."""

_INNER = frozenset(vars(nn.Module()))
"""What each module has, besides what its class gives it: three dicts and a set among it."""


class ModuleState:
    """The attributes, children, parameters and buffers of modules as they are when this is made.

    Args:
        parts: the modules.
        copies: whether small parameters are copied, in case they are written to unseen.
    """

    def __init__(self, parts: Sequence[nn.Module], *, copies: bool) -> None:
        owns = [vars(part) for part in parts]
        self.training = tuple([own["training"] for own in owns])
        self._tables = [*chain.from_iterable(map(_TABLES, owns))]
        self._then: list[dict[str, Any]] = [*map(_COPY, self._tables)]
        values = chain.from_iterable(map(_VALUES, self._tables[::3]))
        self._parameters: list[torch.Tensor] = [x for x in values if x is not None]
        values = chain.from_iterable(map(_VALUES, self._tables[1::3]))
        self._state: list[torch.Tensor] = [x for x in values if x is not None]
        if copies:
            own_copies = {id(x): lasting(x) for x in self._parameters}
            self._parameters = [*own_copies.values()]
            for table in self._then[::3]:
                table.update(
                    (name, own_copies[id(x)]) for name, x in table.items() if x is not None
                )
        containers: dict[int, Any] = {}
        for own in owns:
            then, kinds = own.copy(), [*map(type, own.values())]
            has_more = kinds.count(dict) > 3 or kinds.count(set) > 1
            for name in own.keys() - _INNER if has_more or not _PLAIN.issuperset(kinds) else ():
                found, kind = own[name], type(own[name])
                if isinstance(found, torch.Tensor):
                    if found.grad_fn is not None:  # of an earlier call, whose graph may go
                        then[name] = found = found.detach().requires_grad_()
                    self._state.append(found)
                elif issubclass(kind, (list, dict, set)):
                    then[name] = containers.setdefault(id(found), copy.copy(found))
                else:
                    _PLAIN.add(kind)
            self._tables.append(own)
            self._then.append(then)
        self._versions = [x._version for x in self._parameters]
        self._state_versions = [x._version for x in self._state]
        self._values: list[torch.Tensor] | None = None

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
        kept = zip(changed, self._values or (), strict=False)
        values = {id(x): value.clone() for x, value in kept}
        before = [*map(_COPY, self._tables)]
        try:
            for table, then in zip(self._tables, self._then, strict=True):
                if values:  # it writes to copies
                    then = {name: values.get(id(x), x) for name, x in then.items()}
                _fill(table, then)
            yield
        finally:
            for table, now in zip(self._tables, before, strict=True):
                _fill(table, now)


def _fill(table: dict[str, Any], values: Mapping[str, Any]) -> None:
    if table.keys() != values.keys() or not all(map(is_, table.values(), values.values())):
        table.update(values)  # first, so that an interrupt leaves no empty module
        for name in table.keys() - values.keys():
            del table[name]
