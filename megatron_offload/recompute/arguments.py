"""What a call is given, as tensors and constants in one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from torch.utils import _pytree as pytree

_CONTAINERS = (list, tuple, dict)
_NODES = pytree.SUPPORTED_NODES.keys()
"""Classes that torch takes apart."""


def taken_apart(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return a call as one of a function that takes what the arguments' lists and dicts hold.

    So tensors in them are inputs as any other, and who changes a list afterwards changes nothing.
    """
    leaves = (*args, *kwargs.values()) if kwargs else args
    has_lists = any(map(isinstance, leaves, repeat(_CONTAINERS)))
    if has_lists or not _NODES.isdisjoint(map(type, leaves)):
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        return partial(_call, function, spec), leaves
    if not kwargs:
        return function, args
    return partial(_call_by_name, function, tuple(kwargs)), leaves


def _call(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return function(*args, **kwargs)


def _call_by_name(function: Callable[..., Any], names: Sequence[str], *leaves: Any) -> Any:
    first = len(leaves) - len(names)
    return function(*leaves[:first], **dict(zip(names, leaves[first:], strict=True)))
