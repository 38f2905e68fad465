"""Profiles as JSON files, each field checked by its type.

An unknown key or a value of another type is refused, and so is what no step can have shown; what
has a default may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron_offload.core.profile import StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import parse_json, read_text, replace_text

_HEADER = {"format": "megatron_offload profile", "version": 3}


def save_profile(profile: StepProfile, path: str | Path) -> None:
    """Write a profile in the place of the file that is there; a failed write leaves that."""
    text = to_json(profile)
    parse_profile(text, str(path))
    replace_text(path, text)


def load_profile(path: str | Path) -> StepProfile:
    """Read a profile; `ConfigError` says all that is wrong, one line each."""
    return parse_profile(read_text(path, limit_bytes=128 * 1024**2), str(path))


def to_json(profile: StepProfile) -> str:
    """Return a profile as JSON, the same text for the same profile."""
    return json.dumps(_HEADER | _to_data(profile)) + "\n"


def parse_profile(text: str, source: str) -> StepProfile:
    """Return the profile that a JSON text holds; ``source`` names it in errors."""
    data = parse_json(text, source)
    if not isinstance(data, dict) or {key: data.pop(key, 0) for key in _HEADER} != _HEADER:
        raise ConfigError(f"{source}: 'format' and 'version' must be {list(_HEADER.values())}")
    profile = validate(StepProfile, data, source)
    for problem in _problems(profile):
        raise ConfigError(f"{source}: {problem}")
    return profile


def _to_data(record: Any) -> Any:
    if is_dataclass(record):
        names = [each.name for each in fields(record)]
    elif hasattr(record, "_fields"):
        names = record._fields
    else:
        return list(map(_to_data, record)) if isinstance(record, tuple) else record
    return {name: _to_data(getattr(record, name)) for name in names}


def _problems(profile: StepProfile) -> Iterator[str]:
    run, order, at_bytes = profile.run, profile.backward_order, profile.backward_at_bytes
    keys, backwards = {group.key for group in profile.groups}, set(order)
    if run.pp_rank >= run.pp_size:
        yield f"'run': pipeline rank {run.pp_rank} of {run.pp_size}"
    if min(run.num_microbatches, run.vp_size) < 1:
        yield "'run': a step has at least one microbatch, and a rank one virtual stage"
    if len(keys) != len(profile.groups):
        yield "'groups': two have the same chunk and order"
    if len(backwards) != len(order):
        yield "'backward_order': a group comes twice"
    if len(at_bytes) not in (0, len(order)):
        yield f"'backward_at_bytes' holds {len(at_bytes)} for {len(order)}"
    for key in backwards - keys:
        yield f"'backward_order': chunk {key.chunk} has no group {key.order} among 'groups'"
    clocks = {
        "groups": [group.committed_at_bytes for group in profile.groups],
        "backward_at_bytes": at_bytes,
    }
    for name, clock in clocks.items():
        if list(clock) != sorted(clock):
            yield f"{name!r} are not in the order of their clock"
    if len(profile.times) not in (0, len(profile.groups)):
        yield f"'times' holds {len(profile.times)} for {len(profile.groups)} groups"
    for group, times in zip(profile.groups, profile.times, strict=False):
        if list(times) != sorted(times) and group.key in backwards:
            yield f"'times' of group {group.name!r} (chunk {group.key.chunk}) run backwards"
    if profile.peak_allocated_bytes > profile.peak_reserved_bytes:
        yield "'peak_allocated_bytes' are more than 'peak_reserved_bytes'"
