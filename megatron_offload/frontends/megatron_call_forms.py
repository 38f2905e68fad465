"""Argument lists of two eras of Megatron-core's offload API, read by one callable each.

Owns the forms and the choice between them. Must not know what the calls do. Python's own binding
does the reading: a form is a signature.

Invariant: arguments that fit one form only are never read as the other.
Read next: `megatron_offload.fine_grained_activation_offload`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "read_chunk_arguments",
    "read_commit_arguments",
    "read_find_arguments",
    "read_push_arguments",
]

Arguments = dict[str, Any]


def _form(*required: str, **optional: Any) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            *(inspect.Parameter(name, kind) for name in required),
            *(inspect.Parameter(name, kind, default=value) for name, value in optional.items()),
        ]
    )


# In each pair: megatron-core 0.16, then 0.17 to 0.19.
_CHUNK = (
    _form("vp_size", "vp_stage", min_offloaded_tensor_size=1024 * 1024),
    _form(
        "pp_rank",
        "vp_size",
        "vp_stage",
        min_offloaded_tensor_size=1024 * 1024,
        delta_offload_bytes_across_pp_ranks=0,
        activation_offload_fraction=1.0,
        max_inflight_offloads=None,
    ),
)
_COMMIT = (_form("forced_released_tensors"), _form("name", "forced_released_tensors"))
_PUSH = (
    _form("group_hook", "forced_released_tensors"),
    _form("group_hook", "name", "forced_released_tensors"),
)
_FIND = (_form("name", start_index=0), _form("groups", "name", start_index=0))


def read_chunk_arguments(
    function: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Arguments:
    """Read the arguments of ``init_model_chunk_offload_handler`` and ``init_chunk_handler``.

    Three bare positions are ``(vp_size, vp_stage, min_offloaded_tensor_size)`` or
    ``(pp_rank, vp_size, vp_stage)``: the form counts whose stage lies within its size, the former
    where both do.

    Raises:
        TypeError: the arguments fit neither form.
    """
    return _read(function, _CHUNK, args, kwargs, _has_stage_within_size)


def read_commit_arguments(
    function: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Arguments:
    """Read the arguments of ``on_group_commit_forward``.

    Raises:
        TypeError: the arguments fit neither form.
    """
    return _read(function, _COMMIT, args, kwargs)


def read_push_arguments(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Read the arguments of ``push_offload_groups``.

    Raises:
        TypeError: the arguments fit neither form.
    """
    return _read(function, _PUSH, args, kwargs)


def read_find_arguments(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Read the arguments of ``find_group_with_name``.

    Raises:
        TypeError: the arguments fit neither form.
    """
    return _read(function, _FIND, args, kwargs, lambda found: isinstance(found["name"], str))


def _has_stage_within_size(arguments: Arguments) -> bool:
    size, stage = arguments["vp_size"], arguments["vp_stage"]
    if size is not None and size < 1:
        return False
    return stage is None or 0 <= stage < (size or 1)


def _read(
    function: str,
    forms: Sequence[inspect.Signature],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_plausible: Callable[[Arguments], bool] = lambda arguments: True,
) -> Arguments:
    readings = []
    for form in forms:
        try:
            bound = form.bind(*args, **kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        readings.append(dict(bound.arguments))
    if not readings:
        given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        known = " or ".join(f"{function}{form}" for form in forms)
        raise TypeError(f"{function}({given}) fits none of its call forms; write {known}")
    return next(filter(is_plausible, readings), readings[0])
