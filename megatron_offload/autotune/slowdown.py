"""By how much rows make steps longer, of steps with and without them, whatever their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_offload.planning.row_choice import Slowdown

_NUM_ROUNDS = 10
_HUBER = 1.345
"""Of the usual spread: what lies farther off counts less. 95 % as good where noise is normal."""

_WIDTH = 2.1
"""Of standard errors, on both sides: what was measured lies inside in 19 of 20 cases."""


class TimedStep(NamedTuple):
    """What one step has shown."""

    us: float
    size: float
    """That of the first layer's input: steps may be of any length."""
    has_rows: float
    """Whether, or in which share of it."""


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
    if min(has_rows.sum(), (1 - has_rows).sum()) < 2:
        return None
    us = np.log([max(step.us, 1e-3) for step in steps])
    sizes = np.log([max(step.size, 1.0) for step in steps])
    num_sizes = len(np.unique(sizes))
    columns = [np.ones_like(us), has_rows]
    columns += [(sizes - sizes.mean()) ** power for power in range(1, min(3, num_sizes))]
    table = np.stack(columns, axis=1)
    if len(us) <= len(columns):
        return None
    weights = np.ones_like(us)
    for _ in range(_NUM_ROUNDS):
        roots = np.sqrt(weights)
        found, *_ = np.linalg.lstsq(table * roots[:, None], us * roots, rcond=None)
        off = us - table @ found
        most = _HUBER * max(1e-9, 1.4826 * np.median(np.abs(off)))
        weights = most / np.maximum(np.abs(off), most)
    # Huber's own estimate of the variance (Robust Statistics, 1981, chapter 7)
    share = max((np.abs(off) <= most).mean(), 0.5)
    bent = (np.clip(off, -most, most) ** 2).sum()
    again = 1 + len(columns) / len(us) * (1 - share) / share
    variance = again**2 * bent / (len(us) - len(columns)) / share**2
    error = float(np.sqrt(variance * np.linalg.pinv(table.T @ table)[1, 1]))
    ends = (found[1], found[1] - _WIDTH * error, found[1] + _WIDTH * error)
    return Slowdown(*(100 * float(np.expm1(end)) for end in ends))
