"""What a run leaves behind: numbers of every step over all ranks, and whether two runs are equal.

Numbers are written with all their bits, as the shortest decimal that is read as the same double.
What was not measured in both runs counts as different.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatron_offload.engine.stats import GroupStats, StepStats
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, validate
from megatron_offload.files.text import open_regular, parse_json
from megatron_offload.observe.run_report import LOG_NAME

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

COMPARISON_NAME = "compare.json"

FOLDERS = ("without_offload", "with_offload")
"""Where the two runs lie in the comparison's own folder."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """One training step on one rank. Sizes in bytes."""

    rank: int
    pp_rank: int
    dp_rank: int
    loss: float | None
    """Mean over this rank's microbatches; None where another rank has the last stage."""
    grad_norm: float
    step_time_s: _Seconds
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    recomputed_bytes: int = 0
    num_late_reloads: int = 0
    num_cancelled_offloads: int = 0
    num_refused_blocks: int = 0
    num_unpinnable_blocks: int = 0
    num_memory_shortages: int = 0
    peak_host_bytes: int = 0
    pinned_host_bytes: int = 0
    """Host memory that was pinned when the step ended, in use or not."""
    peak_live_activation_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    gradients: str | None = None
    """Digest of this rank's gradients before clipping; of the last step alone."""
    parameters: str | None = None
    """Digest of its parameters behind that step; likewise."""
    groups: tuple[GroupStats, ...] = ()
    is_planned_by: bool = False
    """Whether it came before the run had found what to offload."""


def counters_of(step: StepStats) -> dict[str, Any]:
    """Return the counters of a step under the names of `RankStep`."""
    names = (x.name for x in fields(RankStep) if hasattr(step, x.name))
    return {**{name: getattr(step, name) for name in names}, "groups": tuple(step.by_name.values())}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step over all ranks."""

    step: int
    loss: float
    grad_norm: float
    step_time_s: _Seconds
    tokens: int
    ranks: tuple[RankStep, ...]

    @classmethod
    def merge(cls, step: int, tokens: int, ranks: Sequence[RankStep]) -> StepRecord:
        """Make one record of a step, which counts from 1, and its tokens, out of every rank's."""
        # A fixed order over ranks, so that the mean is the same bits in every run.
        losses = [rank.loss for rank in ranks if rank.loss is not None]
        loss, step_time_s = sum(losses) / len(losses), max(rank.step_time_s for rank in ranks)
        return cls(step, loss, ranks[0].grad_norm, step_time_s, tokens, tuple(ranks))

    @property
    def is_usual(self) -> bool:
        """Whether it moved what the run moves."""
        return not self.ranks[0].is_planned_by

    def to_json(self) -> str:
        """Return one line of ``steps.jsonl``."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run."""

    steps: Sequence[StepRecord] = ()

    def median_step_time_s(self, *, without: int = 0) -> float | None:
        """Return the median time of a usual step other than the first and ``without``, or None."""
        usual = [one for one in self.steps if one.is_usual and one.step not in (1, without)]
        return statistics.median(one.step_time_s for one in usual) if usual else None

    def peaks(self) -> list[dict[str, Any]]:
        """Return each rank's last numbers with every memory peak's maximum over usual steps."""
        if not self.steps:
            return []
        steps = [step for step in self.steps if step.is_usual] or self.steps
        ranks = [asdict(rank) for rank in steps[-1].ranks]
        for index, rank in enumerate(ranks):
            for key in rank:
                if key.startswith("peak_"):
                    peaks = (getattr(step.ranks[index], key) for step in steps)
                    rank[key] = max((x for x in peaks if x is not None), default=None)
        return ranks


def read_steps(folder: Path) -> list[StepRecord]:
    """Read the lines of ``steps.jsonl``, but for one that a run is about to write."""
    path = folder / LOG_NAME
    records: list[StepRecord] = []
    if not os.path.lexists(path):
        return records
    with open_regular(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            source = f"{path} line {len(records) + 1}"
            record = validate(StepRecord, parse_json(line, source, allow_nan=True), source)
            if record.step != len(records) + 1:
                raise ConfigError(f"{source} is of step {record.step}, which does not follow")
            num_ranks = len((records or [record])[0].ranks)
            if not num_ranks or [one.rank for one in record.ranks] != [*range(num_ranks)]:
                raise ConfigError(f"{source} has no ranks, or not those of the first step in order")
            records.append(record)
    return records


class Comparison(StrictModel):
    """Two runs of one configuration."""

    findings: dict[str, bool]
    """What was compared, in words, and whether it was equal."""

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs by a single bit."""
        return all(self.findings.values())


def compare_reports(without: RunReport, offloaded: RunReport) -> Comparison:
    """Compare two runs of the same configuration bit by bit."""
    steps = list(zip(without.steps, offloaded.steps, strict=True))
    pairs = [(a, b) for x, y in steps for a, b in zip(x.ranks, y.ranks, strict=True)]
    last = without.steps[-1].ranks if steps else ()

    def are_same(key: str, compared: Iterable[tuple[Any, Any]]) -> bool:
        # A repr has every bit of a number, and the sign of zero.
        return all(repr(getattr(a, key)) == repr(getattr(b, key)) for a, b in compared)

    def have_same(key: str) -> bool:
        return are_same(key, pairs) and all(getattr(rank, key) is not None for rank in last)

    findings = {
        f"losses of {len(steps)} steps": bool(steps) and are_same("loss", (*steps, *pairs)),
        f"gradient norms of {len(steps)} steps": are_same("grad_norm", pairs),
        f"gradients of {len(last)} ranks": have_same("gradients"),
        f"final parameters of {len(last)} ranks": have_same("parameters"),
    }
    return Comparison(findings=findings)
