"""Profiles as files: what one rank has seen of a step, for whoever plans later and elsewhere.

Owns the JSON form of `StepProfile`, with every check that needs no second profile. Must not know
what a profile is used for.

Invariants: what is read was written by `save_profile`, or could have been; what is read again is
what was written, to the last digit. Read next: `megatron_offload.planning.footprint`.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_offload.core.profile import (
    GroupKey,
    GroupProfile,
    GroupTimes,
    MemorySample,
    RunShape,
    StepProfile,
)
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, validate
from megatron_offload.files.text import parse_json, read_text, replace_text

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_GROUPS",
    "Amount",
    "Duration",
    "Index",
    "Name",
    "Number",
    "Text",
    "load_profile",
    "parse_profile",
    "profile_to_json",
    "save_profile",
]

MAX_GROUPS = 100_000
"""Groups of one rank's step, at most."""

MAX_FILE_BYTES = 128 * 1024**2

_MOST_SAMPLES = 4 * MAX_GROUPS + 1
"""At the start, the commit, and backward's begin and end of each group, and at the step's end."""

Amount = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A number of bytes or of things; no text, no truth value."""

Duration = Annotated[float, Field(strict=True, ge=0)]
"""Microseconds."""

Name = Annotated[str, Field(strict=True, max_length=200)]

Text = Annotated[str, Field(strict=True, max_length=10_000)]
"""A few words, with a path or two among them."""

Index = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Number = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


class _Run(StrictModel):
    num_microbatches: Number
    pp_rank: Index
    pp_size: Number
    vp_size: Number
    rank: Index
    modules: Annotated[tuple[Name, ...], Field(max_length=1000)]
    versions: Annotated[dict[Name, Name], Field(max_length=100)]


class _Group(StrictModel):
    chunk: Index
    order: Index
    name: Name
    num_bytes: Amount
    committed_at_bytes: Amount
    elsewhere_bytes: Amount
    keeper: Name
    shared_bytes: Amount


class _Backward(StrictModel):
    chunk: Index
    order: Index
    at_bytes: Amount | None


class _Times(StrictModel):
    started_us: Duration
    committed_us: Duration
    backward_us: Duration
    done_us: Duration


class _Memory(StrictModel):
    at_us: Duration
    allocated_bytes: Amount
    reserved_bytes: Amount
    peak_bytes: Amount


class _Profile(StrictModel):
    format: Literal["megatron_offload profile"]
    version: Literal[1]
    run: _Run
    step_us: Duration
    offloaded_bytes: Amount
    counts_what_moved: bool = False
    groups: Annotated[tuple[_Group, ...], Field(max_length=MAX_GROUPS)]
    backward: Annotated[tuple[_Backward, ...], Field(max_length=MAX_GROUPS)]
    times: Annotated[tuple[_Times, ...], Field(max_length=MAX_GROUPS)]
    memory: Annotated[tuple[_Memory, ...], Field(max_length=_MOST_SAMPLES)]


def save_profile(profile: StepProfile, path: str | Path) -> None:
    """Write a profile in the place of the file that is there, if any.

    Raises:
        ConfigError: it holds what `load_profile` would refuse.
        OSError: it can't be written; the file that was there is untouched.
    """
    text = profile_to_json(profile)
    parse_profile(text, str(path))
    replace_text(path, text)


def load_profile(path: str | Path) -> StepProfile:
    """Read a profile.

    Raises:
        ConfigError: it is missing, unreadable, too large, or not what `save_profile` writes; all
            that is wrong, one line each.
    """
    return parse_profile(read_text(path, limit_bytes=MAX_FILE_BYTES), str(path))


def profile_to_json(profile: StepProfile) -> str:
    """Return the profile as JSON, the same text for the same profile."""
    run = profile.run
    at_bytes: tuple[int | None, ...] = profile.backward_at_bytes
    data: dict[str, Any] = {
        "format": "megatron_offload profile",
        "version": 1,
        "run": run._asdict() | {"versions": dict(run.versions)},
        "step_us": profile.step_us,
        "offloaded_bytes": profile.offloaded_bytes,
        "counts_what_moved": profile.counts_what_moved,
        "groups": [_flat(group) for group in profile.groups],
        "backward": [
            key._asdict() | {"at_bytes": at}
            for key, at in zip(
                profile.backward_order,
                at_bytes or (None,) * len(profile.backward_order),
                strict=True,
            )
        ],
        "times": [times._asdict() for times in profile.times],
        "memory": [sample._asdict() for sample in profile.memory],
    }
    return json.dumps(data) + "\n"


def parse_profile(text: str, source: str) -> StepProfile:
    """Return the profile that a JSON text holds.

    Args:
        text: the JSON.
        source: what to call it in an error, such as the file's path.

    Raises:
        ConfigError: as for `load_profile`.
    """
    data = parse_json(text, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a profile, got a {type(data).__name__}")
    read = validate(_Profile, data, source)
    at_bytes = [each.at_bytes for each in read.backward]
    known = tuple(at for at in at_bytes if at is not None)
    if len(known) not in (0, len(at_bytes)):
        raise ConfigError(f"{source}: some of 'backward' have 'at_bytes' and some have none")
    profile = StepProfile(
        groups=tuple(
            GroupProfile(
                GroupKey(each.chunk, each.order),
                each.name,
                each.num_bytes,
                each.committed_at_bytes,
                each.elsewhere_bytes,
                each.keeper,
                each.shared_bytes,
            )
            for each in read.groups
        ),
        backward_order=tuple(GroupKey(each.chunk, each.order) for each in read.backward),
        backward_at_bytes=known,
        times=tuple(GroupTimes(**dict(each)) for each in read.times),
        step_us=read.step_us,
        memory=tuple(MemorySample(**dict(each)) for each in read.memory),
        run=RunShape(**(dict(read.run) | {"versions": tuple(read.run.versions.items())})),
        offloaded_bytes=read.offloaded_bytes,
        counts_what_moved=read.counts_what_moved,
    )
    _check(profile, source)
    return profile


def _flat(group: GroupProfile) -> dict[str, Any]:
    fields = group._asdict()
    return {**fields.pop("key")._asdict(), **fields}


def _check(profile: StepProfile, source: str) -> None:
    """Refuse what no step can have shown."""

    def refuse(problem: str) -> None:
        raise ConfigError(f"{source}: {problem}")

    run = profile.run
    if run.pp_rank >= run.pp_size:
        refuse(f"'run': pipeline rank {run.pp_rank} of {run.pp_size}")
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
