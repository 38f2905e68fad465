"""Plans and profiles as JSON files, each field checked by its type.

An unknown key or a value of another type is refused; what has a default may be left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_offload.core.profile import StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import parse_json, read_text, replace_text
from megatron_offload.planning.plan import OffloadPlan

_VERSION = 3
"""Of both kinds of files."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordFiles(Generic[T]):
    """Files that hold one record (named tuples, dataclasses) of a kind."""

    record: type[T]
    kind: str
    indent: int | None = None

    def save(self, record: T, path: str | Path) -> None:
        """Write a record in the place of the file that is there; a failed write leaves that."""
        replace_text(path, self.to_json(record))

    def load(self, path: str | Path) -> T:
        """Read a record; `ConfigError` says all that is wrong, one line each."""
        return self.parse(read_text(path, limit_bytes=128 * 1024**2), str(path))

    def to_json(self, record: T) -> str:
        """Return a record as JSON, the same text for the same record."""
        header = {"format": f"megatron_offload {self.kind}", "version": _VERSION}
        return json.dumps(header | _to_data(record), indent=self.indent) + "\n"

    def parse(self, text: str, source: str) -> T:
        """Return the record that a JSON text holds; ``source`` names it in errors."""
        data = parse_json(text, source)
        wanted = f"megatron_offload {self.kind}", _VERSION
        if not isinstance(data, dict) or (data.pop("format", 0), data.pop("version", 0)) != wanted:
            raise ConfigError(
                f"{source}: 'format' and 'version' must be {wanted[0]!r} and {_VERSION}"
            )
        return validate(self.record, data, source)


def _to_data(record: Any) -> Any:
    if is_dataclass(record):
        names = [each.name for each in fields(record)]
    elif hasattr(record, "_fields"):
        names = record._fields
    else:
        return list(map(_to_data, record)) if isinstance(record, tuple) else record
    return {name: _to_data(getattr(record, name)) for name in names}


PLANS = RecordFiles(OffloadPlan, "plan", indent=1)
PROFILES = RecordFiles(StepProfile, "profile")

save_plan, load_plan = PLANS.save, PLANS.load
save_profile, load_profile = PROFILES.save, PROFILES.load
