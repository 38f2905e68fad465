"""What a run has found: each pipeline stage's plans of rows, and what those that it tried took.

A run that finds rows leaves it in its report; ``megatron-offload plan --from RUN`` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, read_model
from megatron_offload.planning.row_choice import RowChoice

NAME = "frontier.json"
_Size = Annotated[int, Field(ge=0)]


class FoundPlan(StrictModel):
    """One plan of a stage."""

    rows: tuple[RowConfig, ...]
    freed_bytes: _Size
    """Predicted, of what is allocated at most."""
    predicted_percent: float
    """What a step is predicted to take longer."""
    measured_percent: tuple[float, float, float] | None = None
    """Likewise measured, with the ends of its interval; None where it wasn't tried."""
    reserved_bytes: _Size | None = None
    """What was reserved while it was tried."""

    @property
    def percent(self) -> float:
        """What is known best of the time that it takes."""
        return self.measured_percent[0] if self.measured_percent else self.predicted_percent


class FoundStage(StrictModel):
    """Ranks that have the same layers."""

    name: str = Field(max_length=200)
    bare_bytes: _Size
    """What is allocated at most without rows."""
    plans: tuple[FoundPlan, ...] = Field(min_length=1)
    """Each frees more than the one before; the first does nothing."""
    followed: _Size
    """The place of the one that the run has followed."""

    def model_post_init(self, _: object, /) -> None:
        """Refuse a place of no plan."""
        if self.followed >= len(self.plans):
            raise ConfigError(f"stage {self.name!r} follows plan {self.followed}, which it lacks")

    def under(self, target_bytes: int) -> int | None:
        """Return the first plan that is predicted to fit; None where there is none."""
        least_bytes = self.bare_bytes - target_bytes
        fit = (place for place, plan in enumerate(self.plans) if plan.freed_bytes >= least_bytes)
        return next(fit, None)

    def within(self, most_percent: float) -> int:
        """Return the last plan of those before the first that takes longer than it may."""
        slow = (x for x, plan in enumerate(self.plans) if plan.percent > most_percent)
        return max(0, next(slow, len(self.plans)) - 1)


class RunFrontier(StrictModel):
    """All stages of a run."""

    said: str = Field(max_length=100_000)
    """What the run has said in the end."""
    besides: tuple[RowConfig, ...] = ()
    """Rows of what it does in every plan."""
    stages: tuple[FoundStage, ...]

    @classmethod
    def of(cls, choice: RowChoice, said: str, besides: tuple[RowConfig, ...] = ()) -> RunFrontier:
        """Make it of the plans among which a run has chosen."""
        stages = []
        for name, stage in choice.stages.items():
            tried = {place: (found, size) for place, found, size in stage.tried}
            plans = []
            for place, plan in enumerate(stage.plans):
                found, size = tried.get(place, (None, 0))
                plans.append(
                    FoundPlan(
                        rows=plan.rows(),
                        freed_bytes=int(stage.num_inflight * plan.freed_bytes),
                        predicted_percent=100 * plan.us / choice.bare_us,
                        measured_percent=found,
                        reserved_bytes=size or None,
                    )
                )
            stages.append(
                FoundStage(
                    name=name,
                    bare_bytes=stage.bare_bytes,
                    plans=tuple(plans),
                    followed=stage.place,
                )
            )
        return cls(said=said, besides=besides, stages=tuple(stages))

    def rows_of(self, plans: Iterable[FoundPlan]) -> tuple[RowConfig, ...]:
        """Return the rows of a plan of each stage together."""
        return tuple(dict.fromkeys((*self.besides, *(row for plan in plans for row in plan.rows))))


def read_frontier(folder: Path) -> RunFrontier:
    """Read what a run has left; `ConfigError` where it has found no rows, or left none."""
    path = folder / NAME
    if not path.exists():
        raise ConfigError(
            f"{folder} holds no {NAME}: a Megatron job that finds rows leaves it with "
            "--offload-report FOLDER, any other program by offload.manager.tuner.save(FOLDER)"
        )
    return read_model(RunFrontier, path)
