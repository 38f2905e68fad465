"""A profile as a JSON file, to plan with later and elsewhere.

What is read is what was written, to the last digit; what no step can have shown is refused.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from megatron_offload.core.profile import (
    GroupKey,
    GroupProfile,
    GroupTimes,
    MemorySample,
    RemadeUnit,
    RunShape,
    StepProfile,
)
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import parse_json, read_text, replace_text
from megatron_offload.planning.records import (
    MAX_FILE_BYTES,
    MAX_GROUPS,
    Amount,
    Duration,
    Name,
    many,
    record_model,
    record_of,
    to_data,
)

_MOST_SAMPLES = 4 * MAX_GROUPS + 1
"""At the start, the commit, and backward's begin and end of each group, and at the step's end."""

_RUN = record_model(
    RunShape,
    modules=many(Name, 1000),
    versions=(
        Annotated[dict[Name, Name], Field(max_length=100), AfterValidator(lambda x: (*x.items(),))],
        ...,
    ),
)

_UNIT = record_model(RemadeUnit, needs=many(record_model(GroupKey)))

_PROFILE = record_model(
    StepProfile,
    format=(Literal["megatron_offload profile"], ...),
    version=(Literal[1], ...),
    run=(_RUN, ...),
    counts_what_moved=(bool, False),
    waited_us=(Duration | None, None),
    d2h_gbps=(Duration, 0.0),
    h2d_gbps=(Duration, 0.0),
    groups=many(record_model(GroupProfile, remade=(many(_UNIT)[0], ()))),
    backward=many(record_model(GroupKey, at_bytes=(Amount | None, ...))),
    backward_order=None,
    backward_at_bytes=None,
    times=many(record_model(GroupTimes)),
    memory=many(record_model(MemorySample), _MOST_SAMPLES),
)


def save_profile(profile: StepProfile, path: str | Path) -> None:
    """Write a profile in the place of the file that is there; a failed write leaves that."""
    text = profile_to_json(profile)
    parse_profile(text, str(path))
    replace_text(path, text)


def load_profile(path: str | Path) -> StepProfile:
    """Read a profile; `ConfigError` says all that is wrong, one line each."""
    return parse_profile(read_text(path, limit_bytes=MAX_FILE_BYTES), str(path))


def profile_to_json(profile: StepProfile) -> str:
    """Return the profile as JSON, the same text for the same profile."""
    data = {"format": "megatron_offload profile", "version": 1} | to_data(profile)
    data["run"]["versions"] = dict(profile.run.versions)
    keys = data.pop("backward_order")
    all_at_bytes = data.pop("backward_at_bytes") or [None] * len(keys)
    places = zip(keys, all_at_bytes, strict=True)
    data["backward"] = [key | {"at_bytes": at_bytes} for key, at_bytes in places]
    return json.dumps(data) + "\n"


def parse_profile(text: str, source: str) -> StepProfile:
    """Return the profile that a JSON text holds; ``source`` names it in errors."""
    read: Any = validate(_PROFILE, parse_json(text, source), source)
    at_bytes = tuple(each.at_bytes for each in read.backward if each.at_bytes is not None)
    if len(at_bytes) not in (0, len(read.backward)):
        raise ConfigError(f"{source}: some of 'backward' have 'at_bytes' and some have none")
    order = record_of(read.backward)
    profile: StepProfile = record_of(read, backward_order=order, backward_at_bytes=at_bytes)
    _check(profile, source)
    return profile


def _check(profile: StepProfile, source: str) -> None:
    """Refuse what no step can have shown."""

    def refuse(problem: str) -> None:
        raise ConfigError(f"{source}: {problem}")

    run = profile.run
    if run.pp_rank >= run.pp_size:
        refuse(f"'run': pipeline rank {run.pp_rank} of {run.pp_size}")
    if min(run.num_microbatches, run.vp_size) < 1:
        refuse("'run': a step has at least one microbatch, and a rank one virtual stage")
    keys = {group.key for group in profile.groups}
    if len(keys) != len(profile.groups):
        refuse("'groups': two have the same chunk and order")
    backwards = set(profile.backward_order)
    if len(backwards) != len(profile.backward_order):
        refuse("'backward': a group comes twice")
    for key in profile.backward_order:
        if key not in keys:
            refuse(f"'backward': chunk {key.chunk} has no group {key.order} among 'groups'")
    clocks = {
        "groups": [group.committed_at_bytes for group in profile.groups],
        "backward": profile.backward_at_bytes,
        "memory": [sample.at_us for sample in profile.memory],
    }
    for name, clock in clocks.items():
        if any(one > next_one for one, next_one in pairwise(clock)):
            refuse(f"{name!r} are not in the order of their clock")
    if len(profile.times) not in (0, len(profile.groups)):
        refuse(f"'times' holds {len(profile.times)} for {len(profile.groups)} groups")
    for group, times in zip(profile.groups, profile.times, strict=False):
        if list(times) != sorted(times) and group.key in backwards:
            refuse(f"'times' of group {group.name!r} (chunk {group.key.chunk}) run backwards")
    if any(sample.allocated_bytes > sample.reserved_bytes for sample in profile.memory):
        refuse("'memory': more is allocated than reserved")
