"""What settings of one job cost in memory and in time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_offload.files.strict_model import StrictModel, write_model

TRADEOFF_NAME = "tradeoff.json"


class TradeOffPoint(StrictModel):
    """One setting of a job."""

    label: str = Field(max_length=200)

    peak_bytes: int = Field(ge=0, lt=2**63)
    """Peak device memory of the rank that needs most."""

    step_time_percent: float | None = Field(ge=-100.0, le=1e6)
    """Step time against no offload: 3.1 means 3.1 % longer. None where it was not measured."""

    is_predicted: bool = False
    """Simulated, and not measured."""

    is_plan: bool = False
    """The plan of the file beside it, whether or not a run has followed it."""


class TradeOff(StrictModel):
    """The points of one job."""

    memory: str = Field(default="device memory", max_length=200)
    """What ``peak_bytes`` is the peak of, such as "reserved memory"."""

    points: Annotated[tuple[TradeOffPoint, ...], Field(min_length=1, max_length=10_000)]

    @property
    def by_memory(self) -> list[TradeOffPoint]:
        """The points, that of the least memory first."""
        return sorted(self.points, key=lambda point: point.peak_bytes)


def frontier(points: Iterable[TradeOffPoint]) -> list[TradeOffPoint]:
    """Return the points of a known time that no other beats in both, by memory, the least first."""
    timed = [(p.peak_bytes, x, p) for p in points if (x := p.step_time_percent) is not None]
    best: list[TradeOffPoint] = []
    lowest = math.inf
    for _, percent, point in sorted(timed, key=lambda one: one[:2]):
        if percent < lowest:
            lowest = percent
            best.append(point)
    return best


def write_tradeoff(path: str | Path, memory: str, points: Iterable[TradeOffPoint]) -> None:
    """Write points of one job; a report looks for `TRADEOFF_NAME` in its run's folder."""
    write_model(Path(path), TradeOff(memory=memory, points=tuple(points)))
