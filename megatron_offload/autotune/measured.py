"""What steps have shown: how long they took, and by how much rows make them longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from megatron_offload.planning.row_choice import Slowdown, busy_share

_MEASURED_SHARE = 0.6  # of the most tokens so far: in such forwards a plan is measured, or longer
_LEAST_STEPS = 3  # of each kind, by which anything is said
_NUM_ROUNDS = 20
_HUBER = 1.345
"""Of the usual spread: what lies farther off counts less. 95 % as good where noise is normal."""


class TimedStep(NamedTuple):
    """What one step has shown."""

    us: float
    size: float
    """In tokens: steps may be of any length."""
    has_rows: float
    """Whether, or in which share of it."""


class _Step(NamedTuple):
    began: Any
    ended: Any
    tokens: list[float]
    """Of each of its forwards."""
    has_rows: bool


class StepTimes:
    """The steps of a search: the tokens of all, and the times of those that count.

    Args:
        elapsed_us: from one point of the device's time to another, once both are reached.

    Attributes:
        tokens: of all forwards so far.
        growth: the power of its tokens by which a forward's time grows, as `fit` has seen it.
    """

    def __init__(self, elapsed_us: Callable[[Any, Any], float]) -> None:
        self._elapsed_us = elapsed_us
        self.tokens: list[float] = []
        self.growth = 1.0
        self._steps: list[_Step] = []

    def add(self, span: tuple[Any, Any], tokens: list[float], kind: str) -> None:
        """Take a step that is over; its time counts if rows were measured in it, or none stood."""
        self.tokens += tokens
        if kind in ("bare", "rows"):
            self._steps.append(_Step(*span, tokens, kind == "rows"))

    def forget_rows(self) -> None:
        """Keep the steps without rows alone: another plan follows."""
        self._steps = [step for step in self._steps if not step.has_rows]

    @property
    def measured_tokens(self) -> int:
        """Of a forward in which a plan is measured, at least."""
        return int(_MEASURED_SHARE * max(self.tokens))

    @property
    def long(self) -> list[float]:
        """The tokens of forwards that are so long."""
        return [tokens for tokens in self.tokens if tokens >= self.measured_tokens]

    def fit(self, tokens: float) -> float | None:
        """See how times grow; return what a forward of so many tokens takes without rows."""
        forwards = [
            TimedStep(self._elapsed_us(x, y) / len(tokens), mean(tokens), has_rows)
            for x, y, tokens, has_rows in self._steps
            if not has_rows
        ]
        self.growth = growth_of(forwards)
        own = [x.us * (tokens / x.size) ** self.growth for x in forwards]
        return median(own) if own else None

    def slowdown(self, measured_tokens: int, min_tokens: int) -> Slowdown | None:
        """Return by how much rows make all steps longer, None where that isn't known.

        Args:
            measured_tokens: of forwards in which they were followed while they were measured.
            min_tokens: of those in which they will be.
        """
        times = list[TimedStep]()
        for step in self._steps[:-1]:  # so that the host need not wait
            share = busy_share(step.tokens, measured_tokens, self.growth)
            if share > 0:
                us = self._elapsed_us(step.began, step.ended)
                times.append(TimedStep(us, sum(step.tokens), share * step.has_rows))
        found = slowdown_of(times)
        busy = busy_share(self.tokens, min_tokens, self.growth)
        return found and Slowdown(*(busy * points for points in found))


def growth_of(steps: Sequence[TimedStep]) -> float:
    """Return by which power of their size the time of steps grows, from 0 to 2."""
    sizes = np.log([max(step.size, 1.0) for step in steps])
    if len(steps) < 2 or np.ptp(sizes) < 1e-3:
        return 1.0
    power, _ = np.polyfit(sizes, np.log([max(step.us, 1e-3) for step in steps]), 1)
    return float(np.clip(power, 0.0, 2.0))


def slowdown_of(steps: Sequence[TimedStep]) -> Slowdown | None:
    """Return by how much rows make steps longer, None where that isn't known.

    The logarithm of a step's time is taken to be a parabola of that of its size, and rows to add
    the same to it at every size. Steps that are far off, as those in which memory is pinned, count
    less (Huber's M-estimator, by weights).
    """
    has_rows = np.array([step.has_rows for step in steps], dtype=float)
    if min(has_rows.sum(), (1 - has_rows).sum()) < _LEAST_STEPS:
        return None
    us = np.log([max(step.us, 1e-3) for step in steps])
    sizes = np.log([max(step.size, 1.0) for step in steps])
    degree = min(2, len(np.unique(sizes)) - 1, len(us) // 6)
    columns = [np.ones_like(us), has_rows]
    columns += [(sizes - sizes.mean()) ** power for power in range(1, 1 + degree)]
    table = np.stack(columns, axis=1)
    weights = np.ones_like(us)
    for number in range(_NUM_ROUNDS):
        roots = np.sqrt(weights)
        found, *_ = np.linalg.lstsq(table * roots[:, None], us * roots, rcond=None)
        off = us - table @ found
        # As many lie on the curve as it has terms.
        usual = np.quantile(np.abs(off), min(1.0, 0.5 + len(columns) / (2 * len(us))))
        most = _HUBER * max(1e-9, 1.4826 * usual)
        if number < _NUM_ROUNDS // 2:  # at first as medians have it, so that it ends near them
            most = 1e-4
        weights = most / np.maximum(np.abs(off), most)
    # Huber's own estimate of the variance (Robust Statistics, 1981, chapter 7)
    share = max((np.abs(off) <= most).mean(), 0.5)
    bent = (np.clip(off, -most, most) ** 2).sum()
    again = 1 + len(columns) / len(us) * (1 - share) / share
    variance = again**2 * bent / (len(us) - len(columns)) / share**2
    error = float(np.sqrt(variance * np.linalg.pinv(table.T @ table)[1, 1]))
    error *= 1 + 2 / (len(us) - len(columns))  # few steps say little of how much they differ
    longer = float(np.exp(found[1]))
    return Slowdown.of(100 * (longer - 1), 100 * longer * error)
