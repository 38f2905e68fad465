"""Tensors that lie within others: in what a module is given and returns, and in wrappers.

Wrappers are distributed, quantised and nested tensors, which have no memory of their own. They are
taken apart by the protocol of PyTorch's own compiler (``__tensor_flatten__``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch


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
