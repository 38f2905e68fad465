"""What settings of one job cost in memory and in time."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_offload.files.strict_model import StrictModel

TRADEOFF_NAME = "tradeoff.json"
"""Beside a plan; a report looks for it in its run's folder."""


class TradeOffPoint(StrictModel):
    """One setting of a job."""

    label: str = Field(max_length=200)

    peak_bytes: int = Field(ge=0, lt=2**63)
    """Peak device memory of the rank that needs most."""

    step_time_percent: float = Field(ge=-100.0, le=1e6)
    """Step time against no offload: 3.1 means 3.1 % longer."""

    kind: Literal["measured", "predicted", "plan"] = "measured"
    """How it is known; the plan of the file beside it is predicted, too."""


class TradeOff(StrictModel):
    """The points of one job."""

    memory: str = Field(max_length=200)
    """What ``peak_bytes`` is the peak of, such as "reserved memory"."""

    points: Annotated[tuple[TradeOffPoint, ...], Field(min_length=1, max_length=10_000)]

    @property
    def by_memory(self) -> list[TradeOffPoint]:
        """The points, that of the least memory first."""
        return sorted(self.points, key=lambda point: (point.peak_bytes, point.step_time_percent))
