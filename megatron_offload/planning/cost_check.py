"""What a plan costs by the steps of the run itself, and what follows from it.

Owns the order of steps with and without offload, which of them count, and the verdict. Must not
know plans, ranks or devices: it is told times.

    without*  with*  (without  with) x pairs      the first plan
              with*  (without  with) x pairs      each that comes after it

Steps with a star don't count. Each of their kind is the first behind a change, and not like those
after it: the memory that the profiled step took was handed back, so the first step without offload
takes it anew from the device; the first with a plan pins the host memory that the plan needs, and
what it learns of the step counts from the next on. Nothing is handed back between the others.

A plan that is too slow is followed by one that moves less, not by one that is predicted to be
quicker: a prediction that was wrong may have promised no loss at all, and a lower limit would bring
the same plan again. Little is lost until a link is full, and then much, so the loss is taken to
grow with the third power of the bytes; but the next plan may move no less than half of the last
one's bytes and no more than three quarters, so that few tries find a good one. One that is quick
enough but moves far less than one that wasn't is followed by one between the two.

Invariants: same times and bytes, same verdict, so ranks that are told the same agree; it ends after
`most_steps`; no plan is kept that was measured over the limit by more than the noise, and of the
others the one that moves most is.
Read next: `megatron_offload.autotune`, which takes the steps.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["CostCheck", "MeasuredCost", "Next", "most_steps"]

_MOST_PLANS = 4
"""The first, and three that are made anew."""

_SHARES = (0.5, 0.75)
"""Of the bytes that a plan moved which was too slow, what the next one may move."""

_CLOSE_SHARE = 0.8
"""A plan that is quick enough stays where it moves this share of what a slow one moved, or more."""

_DEVIATIONS_OF_MEDIAN = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


class Next(enum.Enum):
    """What is to be done next."""

    WITHOUT = "take a step that moves nothing"
    WITH = "take a step that follows the plan"
    PLAN = "plan again, for other bytes"
    KEEP = "keep the best plan"
    GIVE_UP = "move nothing: no plan was fast enough"


class MeasuredCost(NamedTuple):
    """What steps have shown a plan to cost, on the slowest rank."""

    without_us: float
    """Median length of a step without offload."""
    with_us: float
    """The same with the plan."""
    slowdown_percent: float
    """Median over pairs of what the step with the plan took longer; below 0 where less."""
    noise_percent: float
    """Standard error of that median, from the spread of the steps without offload."""
    num_pairs: int
    """Steps of each kind that count."""

    @classmethod
    def of(cls, without_us: Sequence[float], with_us: Sequence[float]) -> MeasuredCost:
        """Return what the steps of each kind say, which were taken in turn.

        The median of n differences of two times, each with the deviation s, errs by
        ``sqrt(2) s * sqrt(pi / 2) / sqrt(n)``. Here s comes from the median absolute deviation of
        the steps without offload, so that a single step which something else delayed counts for
        nothing, as it does in the median.
        """
        pairs = list(zip(without_us, with_us, strict=True))
        middle_us = statistics.median(without_us)
        deviation_us = statistics.median(abs(each - middle_us) for each in without_us)
        error_us = math.sqrt(math.pi / len(pairs)) * _DEVIATIONS_OF_MEDIAN * deviation_us
        return cls(
            middle_us,
            statistics.median(with_us),
            statistics.median(100 * (moved / bare - 1) for bare, moved in pairs),
            100 * error_us / middle_us,
            len(pairs),
        )

    def __str__(self) -> str:
        return (
            f"{self.slowdown_percent:+.2f} % (standard error {self.noise_percent:.2f} %) of "
            f"{self.without_us / 1e3:.1f} ms, by {self.num_pairs} steps of each kind"
        )


class CostCheck:
    """Says which step to take next, and in the end which plan stays.

    Args:
        most_slowdown_percent: of the step's time without offload.
        num_pairs: steps of each kind that count, for each plan; at least 1.
        moved_bytes: of the first plan; more than 0.

    Attributes:
        costs: what each plan so far was measured to cost.
        best: place in ``costs`` of the plan to keep; None while all were too slow.
        most_bytes: what the next plan may move, after `Next.PLAN`.
    """

    def __init__(self, most_slowdown_percent: float, num_pairs: int, moved_bytes: int) -> None:
        self.costs: list[MeasuredCost] = []
        self.best: int | None = None
        self.most_bytes = moved_bytes
        self._most_slowdown_percent = most_slowdown_percent
        self._num_pairs = num_pairs
        self._moved_bytes = moved_bytes
        self._quick_bytes = 0
        self._slow_bytes: int | None = None
        self._steps: deque[tuple[Next, bool]] = deque()
        self._times: dict[Next, list[float]] = {}
        self._verdict = Next.KEEP
        self._begin(skipped=(Next.WITHOUT, Next.WITH))

    @property
    def next(self) -> Next:
        """What is to be done next."""
        return self._steps[0][0] if self._steps else self._verdict

    def note(self, step_us: float) -> None:
        """Take note of the step that `next` has asked for.

        Args:
            step_us: its length on the slowest rank, by the device's clock; more than 0.
        """
        assert step_us > 0, step_us
        kind, counts = self._steps.popleft()
        if counts:
            self._times[kind].append(step_us)
        if not self._steps:
            self.costs.append(MeasuredCost.of(self._times[Next.WITHOUT], self._times[Next.WITH]))
            self._verdict = self._judge(self.costs[-1])

    def follow_next_plan(self, moved_bytes: int) -> bool:
        """Begin anew with the plan that was made after `Next.PLAN`, if it is worth that.

        It isn't where it moves no more than one that is quick enough, or nothing: then `next` is
        the verdict.

        Args:
            moved_bytes: of that plan.

        Returns:
            Whether steps have to be taken.
        """
        if moved_bytes <= self._quick_bytes:
            self._verdict = self._final()
            return False
        self._moved_bytes = moved_bytes
        self._begin(skipped=(Next.WITH,))
        return True

    def _begin(self, skipped: Sequence[Next]) -> None:
        kinds = (Next.WITHOUT, Next.WITH)
        self._times = {kind: [] for kind in kinds}
        self._steps.extend((kind, False) for kind in skipped)
        self._steps.extend((kind, True) for kind in kinds * self._num_pairs)

    def _judge(self, cost: MeasuredCost) -> Next:
        if cost.slowdown_percent <= self._most_slowdown_percent + cost.noise_percent:
            self.best, self._quick_bytes = len(self.costs) - 1, self._moved_bytes
        else:
            self._slow_bytes = self._moved_bytes
        if len(self.costs) == _MOST_PLANS or self._slow_bytes is None:
            return self._final()
        if self.best is None:
            least, most = _SHARES
            wanted = (self._most_slowdown_percent / cost.slowdown_percent) ** (1 / 3)
            self.most_bytes = int(min(max(wanted, least), most) * self._moved_bytes)
        elif self._quick_bytes >= _CLOSE_SHARE * self._slow_bytes:
            return self._final()
        else:
            self.most_bytes = (self._quick_bytes + self._slow_bytes) // 2
        return Next.PLAN

    def _final(self) -> Next:
        return Next.GIVE_UP if self.best is None else Next.KEEP


def most_steps(num_pairs: int) -> int:
    """Return how many steps a check takes at most; 0 for no pairs, which is no check."""
    return 1 + _MOST_PLANS * (1 + 2 * num_pairs) if num_pairs else 0
