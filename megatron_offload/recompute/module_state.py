"""What modules have besides their code, so that their forward can run again with the same."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from megatron_offload.errors import StateError
from megatron_offload.recompute.recipe import Constants, lasting

_INNER = frozenset(vars(nn.Module()))
"""What each module has, besides what its class gives it."""

_CONTAINERS = (list, dict, set, deque)
_CHANGING = (torch.Tensor, torch.Generator, *_CONTAINERS)
"""Classes of what is a tensor, or may change of itself."""


class ModuleState:
    """What a module and its ``parts`` have as they are when this is made.

    Their attributes, children, parameters and buffers. ``copies`` says whether small parameters are
    copied, in case they are written to unseen.
    """

    def __init__(self, parts: Sequence[nn.Module], *, copies: bool) -> None:
        self.training = tuple([part.training for part in parts])
        owns = [vars(part) for part in parts]
        self._attributes = [(own, own.copy()) for own in owns]
        self._parameters, self._buffers, self._children = (
            [(own[name], own[name].copy()) for own in owns]
            for name in ("_parameters", "_buffers", "_modules")
        )
        self._changing: list[tuple[dict[str, Any], str]] = []
        known: dict[int, Any] = {}
        tensors: list[torch.Tensor] = []
        for table, then in (*self._attributes, *self._buffers):
            for name, value in then.items():
                if name not in _INNER and issubclass(type(value), _CHANGING):
                    self._changing.append((table, name))
                    then[name] = _copy_of(value, known, tensors)
        given = {id(x): x for _, then in self._parameters for x in then.values() if x is not None}
        if copies and given:
            given = {key: lasting(x) for key, x in given.items()}
            for _, then in self._parameters:
                then.update((name, given.get(id(x))) for name, x in [*then.items()])
        self._given, self._tensors = Constants([*given.values()]), Constants(tensors)
        self._contents: list[torch.Tensor] | None = None

    def keep_contents(self) -> None:
        """Copy the buffers and other tensors, in case that the call writes to them."""
        self._contents = [x.detach().clone() for x in self._tensors.tensors]

    def is_unchanged(self) -> bool:
        """Whether the buffers and other tensors are as they were."""
        return self._tensors.are_unchanged()

    @contextmanager
    def in_force(self, path: str, unit: str) -> Iterator[None]:
        """Give the modules what they had; behind it all is as it was before.

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
        tables = (*self._attributes, *self._parameters, *self._buffers, *self._children)
        before = [(table, table.copy()) for table, _ in tables]
        try:
            for table, then in tables:
                _fill(table, then)
            for table, name in self._changing:  # it writes to copies, each time that it runs
                table[name] = _copy_of(table[name], copies)
            yield
        finally:
            for table, then in before:
                _fill(table, then)


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


def _fill(table: dict[str, Any], values: Mapping[str, Any]) -> None:
    table.update(values)  # first, so that an interrupt leaves no empty module
    if len(table) > len(values):
        for name in table.keys() - values.keys():
            del table[name]
