"""Argument lists of two eras of Megatron-core's offload API, as signatures for Python to bind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any


def _form(*required: str, **optional: Any) -> Signature:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    defaults = dict.fromkeys(required, Parameter.empty) | optional
    return Signature([Parameter(name, kind, default=value) for name, value in defaults.items()])


_COMMIT = (_form("forced_released_tensors"), _form("name", "forced_released_tensors"))
FORMS = {
    "init_model_chunk_offload_handler": (
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
    ),
    "on_group_commit_forward": _COMMIT,
    "bulk_offload": _COMMIT,
    "push_offload_groups": (
        _form("group_hook", "forced_released_tensors"),
        _form("group_hook", "name", "forced_released_tensors"),
    ),
    "find_group_with_name": (_form("name", start_index=0), _form("groups", "name", start_index=0)),
}
"""By callable the form of megatron-core 0.16, then that of 0.17 to 0.19."""


def read_arguments(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names; `TypeError` where they fit neither form.

    Where they fit both, that one counts in which a stage lies within its size and a name is a text,
    and the first where both do.
    """
    readings = []
    for form in FORMS[function]:
        try:
            bound = form.bind(*args, **kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        readings.append(bound.arguments)
    if not readings:
        given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        known = " or ".join(f"{function}{form}" for form in FORMS[function])
        raise TypeError(f"{function}({given}) fits none of its call forms; write {known}")
    return next(filter(_is_plausible, readings), readings[0])


def _is_plausible(arguments: Mapping[str, Any]) -> bool:
    size, stage = arguments.get("vp_size"), arguments.get("vp_stage")
    if size is not None and size < 1:
        return False
    is_within = stage is None or 0 <= stage < (size or 1)
    return is_within and isinstance(arguments.get("name", ""), str)
