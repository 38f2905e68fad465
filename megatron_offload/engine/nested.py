"""Tensors that lie within others: in what a module is given and returns, and in wrappers.

Wrappers are distributed, quantised and nested tensors, which have no memory of their own. Their
parts move, and a wrapper of the same type, size and meaning is made of them again, by the protocol
of PyTorch's own compiler (``__tensor_flatten__``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from megatron_offload.engine.saved_tensor import SavedTensor, changed_in_place


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in any nesting of tuples, lists, dictionaries and dataclasses.

    Each is looked into once, wherever it lies. Code of its own, as of a property, isn't run.
    """
    left, seen = [tree], set[int]()
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            parts: list[Any] = []
            if isinstance(one, tuple):
                parts = [*tuple.__iter__(one)]
            elif isinstance(one, list):
                parts = [*list.__iter__(one)]
            elif isinstance(one, dict):
                parts = [*dict.values(one)]
            elif hasattr(type(one), "__dataclass_fields__"):
                with suppress(AttributeError):  # it has slots
                    own = object.__getattribute__(one, "__dict__")
                    parts = [*map(own.get, type(one).__dataclass_fields__)]
            left += reversed(parts)


def first_tensor(
    given: Sequence[Any], is_one: Callable[[torch.Tensor], bool] = lambda _: True
) -> torch.Tensor | None:
    """Return the first tensor of which that is so: what is at hand is soon looked through."""
    for x in given:
        if isinstance(x, torch.Tensor) and is_one(x):
            return x
    return next(filter(is_one, tensors_in(given)), None)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be taken apart: a subclass with parts that is no parameter.

    A tensor that some collective is writing isn't: its part may not be there yet.
    """
    kind = type(tensor)
    return (
        kind is not torch.Tensor
        and not isinstance(tensor, torch.nn.Parameter)
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and not hasattr(kind, "trigger_wait")
    )


def inner_tensors(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of which tensors, and TransformerEngine's storages, are made."""
    for tensor in tensors:
        if hasattr(type(tensor), "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from inner_tensors(getattr(tensor, name) for name in names)
        elif isinstance(tensor, torch.Tensor):
            yield tensor


def hollow(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return an alias of a wrapper without its parts, for its version counter.

    What changes a wrapper in place counts on the wrapper alone, not on its parts. None where its
    class makes no such alias: then it has to be kept whole, or a change would go unnoticed.
    """
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    alias = tensor.detach()
    if alias is tensor:
        return None
    try:
        for name in names:
            is_its_own = not isinstance(getattr(type(alias), name, None), property)
            if is_its_own and isinstance(getattr(alias, name), torch.Tensor):
                setattr(alias, name, None)
    except (AttributeError, TypeError):  # they are read-only, or no None
        return None
    return alias


class SavedWrapper:
    """The record that stands for a saved wrapper in the autograd graph.

    ``alias`` is the wrapper's `hollow` one; ``pack`` records an inner tensor.
    """

    __slots__ = "_alias", "_context", "_inner", "_kind", "_others", "_size", "_stride", "_version"

    def __init__(
        self, tensor: torch.Tensor, alias: torch.Tensor, pack: Callable[[torch.Tensor], Any]
    ) -> None:
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        self._version = tensor._version
        self._alias = alias
        self._kind: Any = type(tensor)
        self._size = tensor.size()
        self._stride = tensor.stride()
        found, is_nested = {name: getattr(tensor, name) for name in names}, tensor.is_nested
        self._inner = {
            # What says how long a nested tensor's rows are has to be that very tensor.
            name: pack(x) if x.is_floating_point() or not is_nested else SavedTensor(x, name)
            for name, x in found.items()
            if isinstance(x, torch.Tensor)
        }
        # Newer versions of torch list a device mesh among the inner tensors.
        self._others = {name: inner for name, inner in found.items() if name not in self._inner}

    def unpack(self) -> torch.Tensor:
        """Return a wrapper like the one that was saved, around the inner tensors.

        Raises:
            InPlaceModificationError: it or an inner tensor was changed in place since it was saved.
        """
        if self._alias._version != self._version:
            what = f"a {self._kind.__name__} of shape {list(self._size)}"
            raise changed_in_place(what, self._alias._version, self._version)
        found = self._others | {name: inner.unpack() for name, inner in self._inner.items()}
        tensor: torch.Tensor = self._kind.__tensor_unflatten__(
            found, self._context, self._size, self._stride
        )
        return tensor
