"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
"""``note``: worth knowing; ``warning``: offload works and costs more than it should; ``error``: it
can't work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    title: str
    """What was looked at."""
    found: str
    """What was found, with the numbers."""
    advice: str = ""
    """What to do about it; empty where nothing is to be done."""
