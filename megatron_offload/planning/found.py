"""What a run has found: each pipeline stage's plans of rows, and what those that it tried took.

A run that finds rows leaves it in its report; ``megatron-offload plan --from RUN`` reads it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_offload.core.row_config import RowConfig, ranges
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, read_model
from megatron_offload.files.text import read_json
from megatron_offload.planning.row_choice import MOST_DOUBT, RowChoice

NAME = "frontier.json"
_Size = Annotated[int, Field(ge=0, lt=2**63)]
_Percent = Annotated[float, Field(ge=-1e12, le=1e12)]


class FoundPlan(StrictModel):
    """One plan of a stage."""

    rows: tuple[RowConfig, ...]
    freed_bytes: _Size
    """Predicted, of what is allocated at most."""
    predicted_percent: _Percent
    """What a step is predicted to take longer."""
    measured_percent: tuple[_Percent, _Percent, _Percent] | None = None
    """Likewise measured, with the ends of its interval; None where it wasn't tried."""
    slow_link_percent: _Percent | None = None
    """Of a described job what it is predicted to take longer with a slower link, too."""
    reserved_bytes: _Size | None = None
    """What was reserved while it was tried, or would be on the fullest rank of a described job."""

    @property
    def percent(self) -> float:
        """What is known best of the time that it takes."""
        percent, low, high = self.measured_percent or (0.0, 0.0, math.inf)
        return percent if high - low <= MOST_DOUBT else self.predicted_percent


class FoundStage(StrictModel):
    """Ranks that have the same layers."""

    name: str = Field(max_length=200)
    bare_bytes: _Size
    """What is allocated at most without rows; 0 where that isn't known."""
    plans: tuple[FoundPlan, ...] = Field(min_length=1, max_length=10_000)
    """Each frees more than the one before; the first does nothing."""
    followed: _Size
    """The place of the one that the run has followed."""

    def model_post_init(self, _: object, /) -> None:
        """Refuse a place of no plan."""
        if self.followed >= len(self.plans):
            raise ConfigError(f"stage {self.name!r} follows plan {self.followed}, which it lacks")

    def needed_bytes(self) -> list[int]:
        """Return what each plan was seen to reserve, or is predicted to by what others were."""
        pairs = [(self.bare_bytes - one.freed_bytes, one.reserved_bytes) for one in self.plans]
        more_bytes = max((seen - size for size, seen in pairs if seen), default=0)
        return [seen or size + max(0, more_bytes) for size, seen in pairs]

    def under(self, target_bytes: int) -> int | None:
        """Return the first plan that fits, as far as is known; None where there is none."""
        sizes = self.needed_bytes() if self.bare_bytes else []
        return next((place for place, size in enumerate(sizes) if size <= target_bytes), None)

    def within(self, most_percent: float) -> int | None:
        """Return the last plan of those before the first that takes longer than it may, if any.

        Of a described job the last that takes no longer, with a slower link too.
        """
        kept = [max(x.percent, x.slow_link_percent or 0.0) <= most_percent for x in self.plans]
        if self.plans[0].slow_link_percent is None:
            kept = [*takewhile(bool, kept)]
        return max((place for place, keeps in enumerate(kept) if keeps), default=None)


class Alternative(StrictModel):
    """What a described job may do, and what the fullest rank and node then need: predicted."""

    what: str
    kind: str
    """Nothing, recompute, offload, or both; or that it was chosen."""
    fits: bool
    reserved_bytes: _Size
    node_host_bytes: _Size
    takes_longer_percent: _Percent
    slow_link_percent: _Percent | None = None
    """Likewise with a slower link, where that decides."""


class Alternatives(StrictModel):
    """What a described job may do, side by side."""

    title: str
    verdict: str
    device_bytes: _Size
    """What a GPU has."""
    each: tuple[Alternative, ...] = Field(min_length=1, max_length=100)


class RunFrontier(StrictModel):
    """All stages of a run."""

    said: str = Field(max_length=100_000)
    """What the run has said in the end."""
    besides: tuple[RowConfig, ...] = ()
    """Rows of what it does in every plan."""
    stages: tuple[FoundStage, ...] = Field(min_length=1)
    alternatives: Alternatives | None = None
    """Of a described job what it may do in place of these plans."""

    @classmethod
    def of(
        cls,
        choice: RowChoice,
        said: str,
        besides: tuple[RowConfig, ...] = (),
        *,
        is_followed: bool = True,
    ) -> RunFrontier:
        """Make it of the plans among which a run has chosen, and may follow none in the end."""
        stages = []
        for name, stage in choice.stages.items():
            plans = []
            for place, plan in enumerate(stage.plans):
                took, size = stage.tried.get(place, (None, 0))
                one = FoundPlan(
                    rows=plan.rows(),
                    freed_bytes=int(stage.freed_bytes(place)),
                    predicted_percent=100 * plan.us / max(1.0, choice.bare_us),
                    measured_percent=took if took and all(map(math.isfinite, took)) else None,
                    reserved_bytes=size or None,
                )
                plans.append(one)
            followed, bare = stage.place if is_followed else 0, stage.bare_bytes
            found = FoundStage(name=name, bare_bytes=bare, plans=tuple(plans), followed=followed)
            stages.append(found)
        return cls(said=said, besides=besides, stages=tuple(stages))

    @property
    def followed(self) -> str:
        """The rows that were followed, to be pasted; where there were none, why."""
        return self.pasted() if self.rows() else self.said

    def pasted(self, places: Sequence[int] | None = None) -> str:
        """Return `rows` for a YAML."""
        return f"rows: [{', '.join(map(str, self.rows(places)))}]"

    def rows(self, places: Sequence[int] | None = None) -> tuple[RowConfig, ...]:
        """Return the rows of a plan of each stage together: of what was followed, or at places.

        Where stages have the same layers, those of the first count.
        """
        places = [stage.followed for stage in self.stages] if places is None else places
        plans = (stage.plans[place] for stage, place in zip(self.stages, places, strict=True))
        everywhere, done = dict.fromkeys(self.besides), dict[tuple[str, int], RowConfig]()
        for row in (row for plan in plans for row in plan.rows):
            if row.layers == "all":
                everywhere[row] = None
            for number in row.numbers():
                done.setdefault((row.site, number), row.model_copy(update={"layers": "all"}))
        layers: dict[RowConfig, list[int]] = {}
        for (_, number), row in done.items():
            layers.setdefault(row, []).append(number)
        some = (row.model_copy(update={"layers": ranges(x)}) for row, x in layers.items())
        return (*everywhere, *some)


def read_frontier(folder: Path) -> RunFrontier:
    """Read what a run has left; `ConfigError` where it has found no rows, or left none."""
    path = folder if folder.name == NAME or folder.is_file() else folder / NAME
    if not os.path.lexists(path):
        what = f"holds no {NAME}" if folder.is_dir() else "doesn't exist"
        raise ConfigError(
            f"{folder} {what}: where rows are found the trainer leaves {NAME} in run.output, "
            "a Megatron job with --offload-report, others by offload.save_report(FOLDER)"
        )
    is_other = path.name != NAME and isinstance(data := read_json(path), dict)
    if is_other and "model_type" in data:
        raise ConfigError(f"{path} is a config.json of transformers: give it behind --hf")
    return read_model(RunFrontier, path)
