"""A profile as a JSON file, to plan with later and elsewhere.

What no step can have shown is refused.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from megatron_offload.core.profile import StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.files.text import read_text, replace_text
from megatron_offload.planning.records import MAX_FILE_BYTES, from_json, to_json

_KIND = "profile", 2


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
    return to_json(profile, *_KIND)


def parse_profile(text: str, source: str) -> StepProfile:
    """Return the profile that a JSON text holds; ``source`` names it in errors."""
    profile = from_json(StepProfile, text, source, *_KIND)
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
        refuse("'backward_order': a group comes twice")
    if len(profile.backward_at_bytes) not in (0, len(backwards)):
        refuse(f"'backward_at_bytes' holds {len(profile.backward_at_bytes)} for {len(backwards)}")
    for key in profile.backward_order:
        if key not in keys:
            refuse(f"'backward_order': chunk {key.chunk} has no group {key.order} among 'groups'")
    clocks = {
        "groups": [group.committed_at_bytes for group in profile.groups],
        "backward_at_bytes": profile.backward_at_bytes,
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
