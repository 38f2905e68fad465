"""A plan that has to keep its promise of time, held against steps with and without offload in turn.

    without*  with*  (without  with) x pairs      the first plan
              with*  (without  with) x pairs      each that comes after it

Steps with a star don't count: each is the first behind a change, which takes memory anew.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.measure import TimedStep, time_step
from megatron_offload.planning.plan import MeasuredCost, OffloadPlan, keep_all

_logger = logging.getLogger(__name__)

_MOST_PLANS = 4
"""The first, and three that are made anew."""

_SHARES = (0.5, 0.75)
"""Of the bytes that a plan moved which was too slow, what the next one may move."""

_CLOSE_SHARE = 0.8
"""A plan that is quick enough stays where it moves this share of what a slow one moved, or more."""


class Next(enum.Enum):
    """What is to be done next."""

    WITHOUT = "take a step that moves nothing"
    WITH = "take a step that follows the plan"
    PLAN = "plan again, for other bytes"
    KEEP = "keep the best plan"
    GIVE_UP = "move nothing: no plan was fast enough"


class CostCheck:
    """Says which step to take next, and in the end which plan stays.

    A plan that is too slow is followed by one that moves less, not by one that is predicted to be
    quicker: the prediction was wrong. Little is lost until a link is full, and then much, so the
    loss is taken to grow with the third power of the bytes, within `_SHARES`.

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
        """Take note of the step that `next` has asked for: its length on the slowest rank."""
        assert step_us > 0, step_us
        kind, counts = self._steps.popleft()
        if counts:
            self._times[kind].append(step_us)
        if not self._steps:
            self.costs.append(MeasuredCost.of(self._times[Next.WITHOUT], self._times[Next.WITH]))
            self._verdict = self._judge(self.costs[-1])

    def follow_next_plan(self, moved_bytes: int) -> bool:
        """Begin anew with the plan that was made after `Next.PLAN`; return whether to take steps.

        There are none where it moves no more than one that is quick enough, or nothing.
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


@dataclass
class TimeCheck:
    """Keeps a plan that costs no more than it should, or has a lesser one made.

    Where all plans cost more, nothing moves from then on, with a warning.
    """

    manager: PipelineOffloadManager
    most_slowdown_percent: float
    """Of the step's time without offload."""
    num_pairs: int
    """Steps of each kind that count, for each plan; 0 for no check."""
    make_plan: Callable[[int], OffloadPlan]
    """Makes a plan on all ranks together, which the managers follow, of so many bytes at most."""
    slowest: Callable[[float], float]
    """Returns the longest of all ranks' times; collective."""

    plan: OffloadPlan = field(init=False)
    _check: CostCheck | None = None
    _measured: list[OffloadPlan] = field(default_factory=list)
    _timed: TimedStep | None = None

    def begin(self, plan: OffloadPlan) -> bool:
        """Take a plan; return whether there is a step to take."""
        self.plan = plan
        if self.num_pairs:
            self._check = CostCheck(self.most_slowdown_percent, self.num_pairs, plan.moved_bytes)
        return self._check is not None

    @contextmanager
    def step(self) -> Iterator[TimedStep]:
        """Time the step that is taken inside; it moves something or nothing, in turn."""
        assert self._check is not None
        with time_step(self.manager, moves=self._check.next is Next.WITH) as self._timed:
            yield self._timed

    def note(self) -> tuple[bool, str]:
        """Return whether it is over, and the verdict on a plan where there is one; collective."""
        check, timed = self._check, self._timed
        assert check is not None
        assert timed is not None
        check.note(self.slowest(timed.step_us))
        if check.next in (Next.WITHOUT, Next.WITH):
            return False, ""
        cost = check.costs[-1]
        text = f"the plan costs {cost}, at most {self.most_slowdown_percent:g} % is wanted"
        self.plan = replace(self.plan, measured=cost)
        self._measured.append(self.plan)
        if check.next is Next.PLAN:
            again = self.make_plan(check.most_bytes)
            if check.follow_next_plan(again.moved_bytes):
                fewer = "fewer" if again.moved_bytes < self.plan.moved_bytes else "more"
                self.plan = again
                _logger.info("%s: planned again, for %s bytes", text, fewer)
                return False, f"{text}: planned again, for {fewer} bytes"
            self.manager.follow_plan(self.plan)
        if check.best is None:
            self._move_nothing(self.plan, check.costs)
            text += "; nothing moves from here on: no plan was fast enough"
            _logger.warning("%s", text)
        else:
            text += self._keep(self._measured[check.best])
            _logger.info("%s", text)
        self._check = None
        self.manager.backend.trim_device()  # what only the steps without offload needed
        return True, text

    def _keep(self, best: OffloadPlan) -> str:
        """Follow a plan that was measured; return what there is to say."""
        if best is self.plan:
            return ": kept"
        self.plan = best
        self.manager.follow_plan(best)
        return f"; an earlier plan is followed again, which costs {best.measured}: kept"

    def _move_nothing(self, slow: OffloadPlan, costs: Sequence[MeasuredCost]) -> None:
        found = ", ".join(f"{cost.slowdown_percent:+.2f}" for cost in costs)
        reason = (
            f"moving costs too much time: {found} % of the step was measured, "
            f"at most {self.most_slowdown_percent:g} % is wanted"
        )
        self.plan = keep_all(slow, reason)
        self.manager.follow_plan(self.plan)
