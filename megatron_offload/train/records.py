"""What each step of a run was over all ranks, what all come to, and whether two runs are equal.

Numbers are written with all their bits, as the shortest decimal that is read as the same double.
What was not measured in both runs counts as different.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic_core import to_json

from megatron_offload.files.strict_model import StrictModel
from megatron_offload.observe.run_report import RankSummary

COMPARISON_NAME = "compare.json"

FOLDERS = ("without_offload", "with_offload")
"""Where the two runs lie in the comparison's own folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep(RankSummary):
    """One training step on one rank."""

    loss: float | None = None
    """Mean over microbatches; None where another rank has the last stage."""
    grad_norm: float
    step_time_s: float
    gradients: str | None = None
    """Digest of this rank's gradients before clipping; of the last step alone."""
    parameters: str | None = None
    """Digest of its parameters behind that step; likewise."""
    is_planned_by: bool = False
    """Whether it came before the run had found what to offload."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step over all ranks."""

    step: int
    loss: float
    grad_norm: float
    step_time_s: float
    tokens: int
    ranks: tuple[RankStep, ...]

    @classmethod
    def merge(cls, step: int, tokens: int, ranks: Sequence[RankStep]) -> StepRecord:
        """Make one record of a step, which counts from 1, and its tokens, out of every rank's."""
        (loss,) = (rank.loss for rank in ranks if rank.loss is not None)
        step_time_s = max(rank.step_time_s for rank in ranks)
        return cls(step, loss, ranks[0].grad_norm, step_time_s, tokens, tuple(ranks))

    def line(self) -> str:
        """Return it as a line of JSON, in which what is no number is the text ``"NaN"``."""
        return to_json(self, inf_nan_mode="strings").decode() + "\n"


def summarize(steps: Sequence[StepRecord], traced_step: int = 0) -> dict[str, Any]:
    """Return what steps come to, for `RunFacts`.

    The first counts for no time, nor does one that was traced.
    """
    usual = [step for step in steps if not step.ranks[0].is_planned_by]
    times = [step.step_time_s for step in usual if step.step not in (1, traced_step)]
    ranks = []
    for same in zip(*(step.ranks for step in usual or steps), strict=True):
        found = {field.name: getattr(same[-1], field.name) for field in fields(RankSummary)}
        for name in (name for name in found if name.startswith("peak_")):
            sizes = (getattr(rank, name) for rank in same)
            found[name] = max((size for size in sizes if size is not None), default=None)
        ranks.append(RankSummary(**found))
    step_time_s = statistics.median(times) if times else None
    return {"num_steps": len(steps), "by_rank": tuple(ranks), "step_time_s": step_time_s}


class Comparison(StrictModel):
    """Two runs of one configuration."""

    findings: dict[str, bool]
    """What was compared, in words, and whether it was equal."""

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs by a single bit."""
        return all(self.findings.values())


def compare_steps(without: Sequence[StepRecord], offloaded: Sequence[StepRecord]) -> Comparison:
    """Compare two runs of the same configuration bit by bit."""
    steps = list(zip(without, offloaded, strict=True))
    pairs = [(a, b) for x, y in steps for a, b in zip(x.ranks, y.ranks, strict=True)]
    last = without[-1].ranks if steps else ()

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
