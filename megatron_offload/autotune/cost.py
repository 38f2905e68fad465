"""A plan that has to keep its promise of time: steps of the run say whether it does.

Owns what is done with the manager for that. Must not know how plans are made or agreed on, how
ranks talk, nor the verdict's rules.

Invariant: what is decided rests on the slowest rank's times alone, which all ranks know.
Read next: `megatron_offload.planning.cost_check`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.step_time import TimedStep, time_step
from megatron_offload.planning.cost_check import CostCheck, MeasuredCost, Next
from megatron_offload.planning.plan import OffloadPlan, keep_all

__all__ = ["TimeCheck"]

_logger = logging.getLogger(__name__)


class TimeCheck:
    """Keeps a plan that costs no more than it should, or has a lesser one made.

    Of the plans that were measured and cost no more the one stays that moves most; where all cost
    more, nothing moves from then on, with a warning.

    Args:
        manager: follows the plan.
        most_slowdown_percent: of the step's time without offload.
        num_pairs: steps of each kind that count, for each plan; 0 for no check.
        make_plan: makes a plan on all ranks together, and has the manager follow it. It is given
            the most bytes that a step may move, over all ranks.
        slowest: returns the longest of all ranks' times; collective.

    Attributes:
        plan: what the manager follows. It says what it was measured to cost once that is known.
    """

    plan: OffloadPlan

    def __init__(
        self,
        manager: PipelineOffloadManager,
        most_slowdown_percent: float,
        num_pairs: int,
        make_plan: Callable[[int], OffloadPlan],
        slowest: Callable[[float], float],
    ) -> None:
        self._manager = manager
        self._most_slowdown_percent = most_slowdown_percent
        self._num_pairs = num_pairs
        self._make_plan = make_plan
        self._slowest = slowest
        self._check: CostCheck | None = None
        self._measured: list[OffloadPlan] = []
        self._timed: TimedStep | None = None

    def begin(self, plan: OffloadPlan) -> bool:
        """Take a plan; return whether there is a step to take."""
        self.plan = plan
        if self._num_pairs:
            self._check = CostCheck(self._most_slowdown_percent, self._num_pairs, plan.moved_bytes)
        return self._check is not None

    @contextmanager
    def step(self) -> Iterator[TimedStep]:
        """Time the step that is taken inside; it moves something or nothing, in turn."""
        assert self._check is not None
        with time_step(self._manager, moves=self._check.next is Next.WITH) as self._timed:
            yield self._timed

    def note(self) -> tuple[bool, str]:
        """Return whether it is over, and the verdict on a plan where there is one; collective.

        Raises:
            ConfigError: no new plan can be made; on all ranks.
        """
        check, timed = self._check, self._timed
        assert check is not None
        assert timed is not None
        check.note(self._slowest(timed.step_us))
        if check.next in (Next.WITHOUT, Next.WITH):
            return False, ""
        cost = check.costs[-1]
        text = f"the plan costs {cost}, at most {self._most_slowdown_percent:g} % is wanted"
        self.plan = replace(self.plan, measured=cost)
        self._measured.append(self.plan)
        if check.next is Next.PLAN:
            again = self._make_plan(check.most_bytes)
            if check.follow_next_plan(again.moved_bytes):
                fewer = "fewer" if again.moved_bytes < self.plan.moved_bytes else "more"
                self.plan = again
                _logger.info("%s: planned again, for %s bytes", text, fewer)
                return False, f"{text}: planned again, for {fewer} bytes"
            self._manager.follow_plan(self.plan)
        if check.best is None:
            self._move_nothing(self.plan, check.costs)
            text += "; nothing moves from here on: no plan was fast enough"
            _logger.warning("%s", text)
        else:
            text += self._keep(self._measured[check.best])
            _logger.info("%s", text)
        self._check = None
        self._manager.backend.trim_device()  # what only the steps without offload needed
        return True, text

    def _keep(self, best: OffloadPlan) -> str:
        """Follow a plan that was measured; return what there is to say."""
        if best is self.plan:
            return ": kept"
        self.plan = best
        self._manager.follow_plan(best)
        return f"; an earlier plan is followed again, which costs {best.measured}: kept"

    def _move_nothing(self, slow: OffloadPlan, costs: Sequence[MeasuredCost]) -> None:
        found = ", ".join(f"{cost.slowdown_percent:+.2f}" for cost in costs)
        reason = (
            f"moving costs too much time: {found} % of the step was measured, "
            f"at most {self._most_slowdown_percent:g} % is wanted"
        )
        self.plan = keep_all(slow, reason)
        self._manager.follow_plan(self.plan)
