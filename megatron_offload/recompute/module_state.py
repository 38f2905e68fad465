"""What a call reads besides activations, so that it can run again with the same.

Parameters and other constants, and what modules have besides their code.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter, getitem, is_, itemgetter, setitem
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.saved_tensor import changed_in_place
from megatron_offload.errors import StateError
from megatron_offload.model_map.module_hooks import is_own_hook

_TABLES = ("_parameters", "_buffers", "_modules")
_UNREAD = frozenset(vars(nn.Module())) - {"training", *_TABLES}
"""What each module has that no forward reads."""

_CONTAINERS = (list, dict, set, deque)
_CHANGING = (torch.Tensor, torch.Generator, *_CONTAINERS)
"""Classes of what is a tensor, or may change of itself."""

_Table = dict[str, Any]
T = TypeVar("T")

_MOST_COPIED_BYTES = 1 << 20

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_version_of, _needs_grad = attrgetter("_version"), attrgetter("requires_grad")


def lasting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that holds a parameter's values until backward: a copy where it is small.

    A library may release a parameter after its own layer, and reload it for that layer's
    backward, too late for what a later layer has saved; and no version counts what is written
    through ``.data``, as where weights are clipped or averaged.
    """
    if tensor.layout is not torch.strided or tensor.nbytes > _MOST_COPIED_BYTES:
        return tensor
    copied = tensor.detach().clone()
    if copied.stride() != tensor.stride():  # it was expanded
        return tensor
    if is_parameter(tensor):
        if type(copied) is torch.Tensor:  # of whatever class of parameters
            copied = torch.Tensor._make_subclass(type(tensor), copied)
        else:
            copied = torch.nn.Parameter(copied, tensor.requires_grad)
        vars(copied).update(vars(tensor))
    return copied.requires_grad_(tensor.requires_grad)


class Constants:
    """Tensors that are never offloaded, and must be as they are when this is made."""

    __slots__ = ("_versions", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors, self._versions = tensors, [*map(_version_of, tensors)]

    def are_unchanged(self) -> bool:
        """Whether none was changed in place."""
        return [*map(_version_of, self.tensors)] == self._versions

    def check(self, what: str, unit: str) -> None:
        """Raise where one was changed in place, or has no memory; ``what`` they are is said."""
        is_plain = _PLAIN.issuperset(map(type, self.tensors))
        if self.are_unchanged() and is_plain and all(map(torch.Tensor.data_ptr, self.tensors)):
            return  # as nearly always
        for x, version in zip(self.tensors, self._versions, strict=True):
            has_memory = type(x) not in _PLAIN or not x.nbytes or x.untyped_storage().nbytes()
            if has_memory and x._version == version:
                continue
            what = f"{what} of shape {list(x.shape)}, which is read when {unit!r} is recomputed,"
            if has_memory:
                raise changed_in_place(what, x._version, version)
            raise StateError(
                f"{what} has no memory now, as where a parameter is sharded until its own module's "
                f"backward; leave {unit!r} out of recompute"
            )


class ModuleLayout:
    """Where a module and its parts have what their forward reads: tables, names and classes.

    It is seen once, and holds until any of that is another. Of the modules nothing is kept.

    Attributes:
        changing: the positions of values that are tensors, or may change of themselves.
        parameters: the positions of parameters.
    """

    def __init__(self, tables: Sequence[_Table]) -> None:
        self._sizes = [*map(len, tables)]
        places = [(i, x) for i, table in enumerate(tables) for x in table if x not in _UNREAD]
        self._numbers, self._names = zip(*places, strict=True)
        self._owners = itemgetter(*self._numbers)
        values = [*map(getitem, self._owners(tables), self._names)]
        self._types = [*map(type, values)]
        of_parameters = range(len(tables) // 4, len(tables) // 2)
        changing = [i for i, kind in enumerate(self._types) if _may_change(kind)]
        changing = [i for i in changing if self._names[i] not in _TABLES]
        self.parameters = [i for i in changing if self._numbers[i] in of_parameters]
        self.changing = [i for i in changing if self._numbers[i] not in of_parameters]

    def read(self, tables: Sequence[_Table]) -> list[Any] | None:
        """Return the values in these tables; None where their names or classes are others."""
        if [*map(len, tables)] != self._sizes:
            return None
        try:
            values = [*map(getitem, self._owners(tables), self._names)]
        except KeyError:
            return None
        return values if [*map(type, values)] == self._types else None

    def put(self, tables: Sequence[_Table], values: Sequence[Any]) -> None:
        """Give the tables these values, and nothing besides."""
        # These are put first, so that an interrupt leaves no empty module.
        deque(map(setitem, self._owners(tables), self._names, values), maxlen=0)
        if [*map(len, tables)] != self._sizes:
            known = {*zip(self._numbers, self._names, strict=True)}
            for i, table in enumerate(tables):
                for name in [x for x in table if x not in _UNREAD and (i, x) not in known]:
                    del table[name]


def _read(tables: Sequence[_Table], layout: ModuleLayout | None) -> tuple[ModuleLayout, list[Any]]:
    """Return where values are in these tables, as in a known layout if that holds, and these."""
    if layout is None or (values := layout.read(tables)) is None:
        layout = ModuleLayout(tables)
        values = layout.read(tables)
        assert values is not None
    return layout, values


class ModuleState:
    """What a module and its parts have when this is made, by the positions of a layout.

    ``copies`` says whether small parameters are copied, in case they are written to unseen.
    """

    def __init__(
        self, parts: Sequence[nn.Module], known: ModuleLayout | None, *, copies: bool
    ) -> None:
        owns = [*map(vars, parts)]
        self._tables = tables = [*owns, *[own[name] for name in _TABLES for own in owns]]
        self.layout, self._values = layout, values = _read(tables, known)
        self.training = tuple([bool(own.get("training")) for own in owns])
        copied: dict[int, Any] = {}
        tensors: list[torch.Tensor] = []
        for i in layout.changing:
            values[i] = _copy_of(values[i], copied, tensors)
        given = [*map(values.__getitem__, layout.parameters)]
        if copies:
            own = {id(x): lasting(x) for x in given}
            for i in layout.parameters:
                values[i] = own[id(values[i])]
            given = [*own.values()]
        self._given = Constants(given)
        self._need_grad = [*map(_needs_grad, given)]
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
            StateError: a buffer was, of which nothing is known; a parameter has no memory now; or a
                part was given hooks, which would run with it.
        """
        for own in self._tables[1 : len(self._tables) // 4]:
            for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
                if hooks and not all(map(is_own_hook, hooks.values())):
                    raise StateError(
                        f"a part of {path} was given hooks since its forward, which would run "
                        f"again with it; leave {unit!r} out of recompute"
                    )
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
        values = [*self._values]
        for i in self.layout.changing:  # it writes to copies, each time that it runs
            values[i] = _copy_of(values[i], copies)
        layout, now = _read(self._tables, self.layout)
        given = self._given.tensors
        flags_now = [*map(_needs_grad, given)]

        def put_back() -> None:
            _set_flags(given, flags_now)
            layout.put(self._tables, now)

        try:
            _set_flags(given, self._need_grad)  # else the call might save other tensors
            if layout is not self.layout or not all(map(is_, values, now)):
                self.layout.put(self._tables, values)
            return function()
        finally:
            try:
                put_back()
            except BaseException:  # an interrupt has come meanwhile
                put_back()
                raise


def _set_flags(tensors: Sequence[torch.Tensor], flags: list[bool]) -> None:
    """Freeze or unfreeze tensors, if any isn't so."""
    if [*map(_needs_grad, tensors)] != flags:
        for x, flag in zip(tensors, flags, strict=True):
            x.requires_grad_(flag)


@cache
def _may_change(kind: type) -> bool:
    """Whether a class is one of tensors, or of what may change of itself."""
    return issubclass(kind, _CHANGING)


def _copy_of(value: Any, known: dict[int, Any], tensors: list[torch.Tensor] | None = None) -> Any:
    """Return a container with copies of those in it, or of a generator, each made once.

    Tensors are added to the list, where there is one.
    """
    if (name := id(value)) in known:
        return known[name]
    copied: Any = value
    if type(value) in _CONTAINERS:  # as nearly all are
        known[name] = copied = value.copy()
        if value:
            _copy_inner(value, copied, known, tensors)
    elif isinstance(value, torch.Tensor):
        if tensors is not None:
            if value.grad_fn is not None:  # of an earlier call, whose graph may go
                copied = value.detach().requires_grad_()
            known[name] = copied
            tensors.append(copied)
    elif isinstance(value, torch.Generator):
        known[name] = copied = value.clone_state()
    else:
        with suppress(Exception):  # one of a class of its own may let nothing be set
            known[name] = copied = copy.copy(value)
            _copy_inner(value, copied, known, tensors)
    return copied


def _copy_inner(
    value: Any, copied: Any, known: dict[int, Any], tensors: list[torch.Tensor] | None
) -> None:
    is_dict = isinstance(value, dict)
    inner = value.values() if is_dict else value
    if not any(map(_may_change, map(type, inner))) or isinstance(value, set):
        return
    for key, one in [*(value.items() if is_dict else enumerate(value))]:
        if isinstance(one, _CHANGING) and (other := _copy_of(one, known, tensors)) is not one:
            copied[key] = other
