"""The tensors in what a module is given and what it returns, however deep they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
