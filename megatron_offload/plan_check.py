"""A plan that has to keep its promise of time: steps of the run say whether it does.

Owns what is done with the manager for that. Must not know how plans are made or agreed on, how
ranks talk, nor the verdict's rules.

Invariants: every step that is measured is a training step like any other; ranks that note the same
times have the same plan after each. Read next: `megatron_offload.planning.cost_check`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.planning.cost_check import CostCheck, MeasuredCost, Next
from megatron_offload.planning.plan import OffloadPlan, keep_all
from megatron_offload.planning.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.step_time import TimedStep, time_step

__all__ = ["PlanCheck"]

_logger = logging.getLogger(__name__)


class PlanCheck:
    """The plan of a run, and the steps that it takes to trust it.

        while not check.is_over:
            with check.step() as timed:
                train_step()  # up to and with the manager's reset
            check.note(max(gather(timed.step_us)))  # of all ranks

    Memory is what ``memory_target`` promises, so its plan needs no such steps, nor does a plan that
    moves nothing.

    Args:
        manager: follows the plan.
        policy: by which plans are made.
        make_plan: makes a plan on all ranks together, and has the manager follow it. It is given
            the most bytes that a step may move, over all ranks; None for any.

    Attributes:
        plan: what the manager follows. It says what it was measured to cost once that is known. May
            be replaced by the same with corrected distances before the first step.
    """

    def __init__(
        self,
        manager: PipelineOffloadManager,
        policy: MemoryTargetConfig | AutoConfig,
        make_plan: Callable[[int | None], OffloadPlan],
    ) -> None:
        self._manager = manager
        self._make_plan = make_plan
        self._check: CostCheck | None = None
        self._most_slowdown_percent = 0.0
        self.plan = make_plan(None)
        if isinstance(policy, AutoConfig) and policy.measured_steps and self.plan.moved_bytes:
            self._most_slowdown_percent = policy.most_slowdown_percent
            self._check = CostCheck(policy.most_slowdown_percent, policy.measured_steps)

    @property
    def is_over(self) -> bool:
        """Whether the plan stays as it is."""
        return self._check is None

    def step(self) -> AbstractContextManager[TimedStep]:
        """Time the step that is taken inside, its ``reset`` included, as `time_step` does.

        In every other step nothing moves, so it has to fit into memory as it does without offload.
        """
        assert self._check is not None
        return time_step(self._manager, moves=self._check.next is Next.WITH)

    def note(self, step_us: float) -> str:
        """Take note of the step that was taken last; collective where a new plan is made.

        Args:
            step_us: its length on the slowest rank: the same on all.

        Returns:
            What there is to say about the plan, for people; empty where it is measured further.

        Raises:
            ConfigError: no new plan can be made; on all ranks.
        """
        check = self._check
        assert check is not None
        check.note(step_us)
        if check.next in (Next.WITHOUT, Next.WITH):
            return ""
        cost = check.costs[-1]
        text = f"the plan costs {cost}, at most {self._most_slowdown_percent:g} % is wanted"
        self.plan = replace(self.plan, measured=cost)
        if check.next is Next.KEEP:
            self._finish()
            _logger.info("%s: kept", text)
            return f"{text}: kept"
        slow = self.plan
        if check.next is Next.PLAN:
            self.plan = self._make_plan(int(check.share * slow.moved_bytes))
            if self.plan.moved_bytes:
                check.follow_next_plan()
                _logger.info("%s: planned again", text)
                return f"{text}: planned again"
        self._move_nothing(slow, check.costs)
        text += "; nothing moves from here on: no plan was fast enough"
        _logger.warning("%s", text)
        return text

    def _move_nothing(self, slow: OffloadPlan, costs: Sequence[MeasuredCost]) -> None:
        found = ", ".join(f"{cost.slowdown_percent:+.2f}" for cost in costs)
        reason = (
            f"moving costs too much time: {found} % of the step was measured, "
            f"at most {self._most_slowdown_percent:g} % is wanted"
        )
        self.plan = keep_all(slow, reason)
        self._manager.follow_plan(self.plan)
        self._finish()

    def _finish(self) -> None:
        """Hand back what only the steps without offload needed."""
        self._check = None
        self._manager.backend.trim_device()
