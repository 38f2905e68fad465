"""What modules have besides their code, so that their forward can run again with the same."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import getitem, is_
from typing import Any
from weakref import ref

import torch
from torch import nn

from megatron_offload.engine.saved_tensor import changed_in_place
from megatron_offload.errors import StateError
from megatron_offload.recompute.recipe import lasting

_INNER = frozenset(vars(nn.Module()))
"""What each module has, besides what its class gives it."""

_TABLES = ("_parameters", "_buffers", "_modules")

_CONTAINERS = (list, dict, set, deque)


class ModuleTables:
    """Where the attributes, parameters, buffers and children of a module and its parts are.

    Read at each call, so all that is read is one list, in which parameters have their ``places``.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = [x for x in module.modules() if not isinstance(x, torch.jit.ScriptModule)]
        self.has_script = len(parts) < sum(1 for _ in module.modules())
        """Whether a part is in TorchScript, of which nothing is read."""
        owns = [vars(part) for part in parts]
        self.hooks = [own[f"_forward{kind}_hooks"] for own in owns[1:] for kind in ("", "_pre")]
        """The tables of the parts' forward hooks."""
        self._module = ref(module)  # which has a hook that has this
        self._num_own = len(owns)
        # A wrapper's flag may be a property, as that of a compiled module.
        flag = "training", "_is_full_backward_hook"
        names = [(*_TABLES, flag["training" not in own], *(own.keys() - _INNER)) for own in owns]
        tables: list[dict[str, Any]] = [own[name] for name in _TABLES for own in owns]
        self._dicts = [*owns[1:], *tables]
        self._names: list[tuple[str, ...]] = [*names, *map(tuple, tables)]
        self._sizes = [*map(len, self.dicts)]
        inner = [*zip(self._dicts, self._names[1:], strict=True)]
        self._keys = [name for _, names_of in inner for name in names_of]
        self._homes = [table for table, names_of in inner for _ in names_of]
        heads = (*("_modules",) * len(_TABLES), "flag")  # a table is as fixed as a child
        kinds = [k for own in names for k in (*heads, *("",) * (len(own) - len(heads)))]
        kinds += [name for name in _TABLES for own in owns for _ in own[name]]
        self.places, self._buffers, self._structure, self._flags, self._attributes = (
            [place for place, kind in enumerate(kinds) if kind == wanted]
            for wanted in (*_TABLES, "flag", "")
        )
        self._last: list[Any] = []
        # These four are as they were read last.
        self.training: tuple[bool, ...] = ()
        self.parameters: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.changing: list[int] = []
        """The places of attributes that are tensors, or may change of themselves."""

    @property
    def dicts(self) -> list[dict[str, Any]]:
        """All tables that are read; the first is of the module's own attributes."""
        return [vars(self._module()), *self._dicts]

    def read(self) -> list[Any] | None:
        """Return all values; the list of before where nothing has changed. None: other ones."""
        own = vars(self._module())
        try:
            if [len(own), *map(len, self._dicts)] != self._sizes:
                return None
            values = [*map(own.__getitem__, self._names[0]), *map(getitem, self._homes, self._keys)]
        except KeyError:
            return None
        last = self._last
        if last and all(map(is_, values, last)):
            return last
        if last and any(values[x] is not last[x] for x in self._structure):
            return None
        self.training = tuple([values[x] for x in self._flags])
        self.parameters = [values[x] for x in self.places if values[x] is not None]
        self.buffers = [values[x] for x in self._buffers if values[x] is not None]
        self.changing = [x for x in self._attributes if not isinstance(values[x], _CONSTANTS)]
        tensors = [x for x in self.changing if isinstance(values[x], torch.Tensor)]
        self._last = values
        if tensors:  # which may have a graph, and aren't kept here
            self._last = [None if x in tensors else value for x, value in enumerate(values)]
        return values

    def has(self, values: list[Any]) -> bool:
        """Whether all values are these."""
        found = self.read()
        return found is values or (found is not None and all(map(is_, found, values)))

    def fill(self, values: Iterable[Any]) -> None:
        """Put values back, and delete what came since."""
        following = iter(values)
        for place, (table, names) in enumerate(zip(self.dicts, self._names, strict=True)):
            then = {name: next(following) for name in names}
            _fill(table, then, table.keys() - _INNER if place < self._num_own else table.keys())


class ModuleState:
    """The attributes, children, parameters and buffers of modules as they are when this is made.

    ``copies`` says whether small parameters are copied, in case they are written to unseen.
    """

    def __init__(self, tables: ModuleTables, values: list[Any], *, copies: bool) -> None:
        self._tables = tables
        self.training = tables.training
        self._parameters, self._state = tables.parameters, tables.buffers
        if tables.changing:
            values, self._state = list(values), list(self._state)
            known: dict[int, Any] = {}
            for place in tables.changing:
                values[place] = _copy_of(values[place], known, self._state)
        if copies and self._parameters:
            small = {id(x): lasting(x) for x in self._parameters}
            self._parameters, values = [*small.values()], list(values)
            for place in tables.places:
                values[place] = small.get(id(values[place]))
        self._values, self._changing = values, tables.changing
        self._versions = [x._version for x in self._parameters]
        self._state_versions = [x._version for x in self._state]
        self._contents: list[torch.Tensor] | None = None

    def keep_contents(self) -> None:
        """Copy the buffers and other tensors, in case that the call writes to them."""
        self._contents = [x.detach().clone() for x in self._state]

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
        if [x._version for x in self._parameters] != self._versions:
            for x, version in zip(self._parameters, self._versions, strict=True):
                if x._version != version:
                    what = f"a parameter of {path}, which is recomputed ({unit!r}),"
                    raise changed_in_place(what, x._version, version)
        for x in self._parameters:
            is_plain = type(x) in (torch.Tensor, nn.Parameter)
            if is_plain and not x.data_ptr() and x.nbytes:
                raise StateError(
                    f"a parameter of {path} has no memory now, as where it is sharded until its "
                    f"own module's backward; leave {unit!r} out of recompute"
                )
        copies, values = dict[int, Any](), self._values
        if not self.is_unchanged():
            if self._contents is None:
                raise StateError(
                    f"a buffer or another tensor of {path} was written to since its forward; leave "
                    f"{unit!r} out of recompute"
                )
            for x, content in zip(self._state, self._contents, strict=True):
                copies[id(x)] = content.clone().requires_grad_(x.requires_grad)
        if copies or self._changing:  # it writes to copies, each time that it runs
            values = [copies.get(id(x), x) for x in values]
            for place in self._changing:
                values[place] = _copy_of(values[place], copies)
        tables = self._tables
        before = None if tables.has(values) else [(x, x.copy()) for x in tables.dicts]
        try:
            if before is not None:
                tables.fill(values)
            yield
        finally:
            if before is not None:
                for table, then in before:
                    _fill(table, then, table.keys())
            elif not tables.has(values):
                tables.fill(values)


_CONSTANTS = (bool, int, float, str, type(None), tuple, torch.dtype, torch.device, nn.Module)


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


def _fill(table: dict[str, Any], values: Mapping[str, Any], names: Iterable[str]) -> None:
    table.update(values)  # first, so that an interrupt leaves no empty module
    for name in set(names) - values.keys():
        del table[name]
