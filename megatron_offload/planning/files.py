"""Plans and profiles as JSON files, each field checked by its type.

An unknown key or a value of another type is refused, and so is what no step can have shown; what
has a default may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_offload.core.profile import StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import parse_json, read_text, replace_text
from megatron_offload.planning.plan import OffloadPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordFiles(Generic[T]):
    """Files that hold one record (named tuples, dataclasses) of a kind."""

    record: type[T]
    kind: str
    version: int
    problems: Callable[[T], Iterator[str]]
    """Yields what is wrong with a record whose fields are fine one by one."""
    indent: int | None = None

    def save(self, record: T, path: str | Path) -> None:
        """Write a record in the place of the file that is there; a failed write leaves that."""
        text = self.to_json(record)
        self.parse(text, str(path))
        replace_text(path, text)

    def load(self, path: str | Path) -> T:
        """Read a record; `ConfigError` says all that is wrong, one line each."""
        return self.parse(read_text(path, limit_bytes=128 * 1024**2), str(path))

    def to_json(self, record: T) -> str:
        """Return a record as JSON, the same text for the same record."""
        header = {"format": f"megatron_offload {self.kind}", "version": self.version}
        return json.dumps(header | _to_data(record), indent=self.indent) + "\n"

    def parse(self, text: str, source: str) -> T:
        """Return the record that a JSON text holds; ``source`` names it in errors."""
        data = parse_json(text, source)
        wanted = f"megatron_offload {self.kind}", self.version
        if not isinstance(data, dict) or (data.pop("format", 0), data.pop("version", 0)) != wanted:
            raise ConfigError(
                f"{source}: 'format' and 'version' must be {wanted[0]!r} and {self.version}"
            )
        record = validate(self.record, data, source)
        for problem in self.problems(record):
            raise ConfigError(f"{source}: {problem}")
        return record


def _to_data(record: Any) -> Any:
    if is_dataclass(record):
        names = [each.name for each in fields(record)]
    elif hasattr(record, "_fields"):
        names = record._fields
    else:
        return list(map(_to_data, record)) if isinstance(record, tuple) else record
    return {name: _to_data(getattr(record, name)) for name in names}


def _plan_problems(plan: OffloadPlan) -> Iterator[str]:
    if not plan.ranks or min(plan.num_microbatches, plan.vp_size) < 1:
        yield "'num_microbatches', 'vp_size' or 'ranks' is none"
    for pp_rank, rank in enumerate(plan.ranks):
        if len({choice.key for choice in rank.choices}) != len(rank.choices):
            yield f"two groups of rank {pp_rank} have one key"


def _profile_problems(profile: StepProfile) -> Iterator[str]:
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


PLANS = RecordFiles(OffloadPlan, "plan", 3, _plan_problems, indent=1)
PROFILES = RecordFiles(StepProfile, "profile", 3, _profile_problems)

save_plan, load_plan = PLANS.save, PLANS.load
save_profile, load_profile = PROFILES.save, PROFILES.load
