"""The plan of a run, and the steps that it takes to trust it.

Owns the order of a plan's checks. Must not know what they look at.

Invariants: every step that is looked at is a training step like any other; all ranks take the same
steps, and have the same plan after each. Read next: `megatron_offload.autotune.distances`,
`megatron_offload.autotune.memory` and `megatron_offload.autotune.cost`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from megatron_offload.observe.step_time import TimedStep
from megatron_offload.planning.plan import OffloadPlan

__all__ = ["Check", "PlanCheck"]


class Check(Protocol):
    """One thing that steps are looked at for."""

    plan: OffloadPlan
    """What the manager follows."""

    def begin(self, plan: OffloadPlan) -> bool:
        """Take the plan that the checks before have left; return whether there is a step to take.

        Args:
            plan: of all ranks, which the manager follows.
        """

    def step(self) -> AbstractContextManager[TimedStep | None]:
        """Look at the step that is taken inside; its time, where that is what is looked at."""

    def note(self) -> tuple[bool, str]:
        """Do what follows from the step that was taken last; may be collective.

        Returns:
            Whether the check is over, and what there is to say, for people; empty for nothing.
        """


class PlanCheck:
    """A plan, held against the steps that follow it.

        while not check.is_over:
            with check.step():
                train_step()  # up to and with the manager's reset
            check.note()

    Args:
        plan: of all ranks, which the manager follows.
        checks: in the order in which they are made.

    Attributes:
        plan: what the manager follows now. It says what steps were measured to take, as far as they
            were.
    """

    def __init__(self, plan: OffloadPlan, checks: Iterable[Check]) -> None:
        self.plan = plan
        self._checks = deque(checks)
        self._begin()

    @property
    def is_over(self) -> bool:
        """Whether the plan stays as it is."""
        return not self._checks

    def step(self) -> AbstractContextManager[TimedStep | None]:
        """Look at the step that is taken inside, its ``reset`` included.

        What it took is told where the plan is being timed. In every other one of those steps
        nothing moves, so it has to fit into memory as it does without offload.
        """
        return self._checks[0].step()

    def note(self) -> str:
        """Do what follows from the step that was taken last; collective.

        Returns:
            What there is to say about the plan, for people; empty for nothing.

        Raises:
            ConfigError: a new plan is wanted, and none can be made; on all ranks.
        """
        is_over, text = self._checks[0].note()
        self.plan = self._checks[0].plan
        if is_over:
            self._checks.popleft()
            self._begin()
        return text

    def _begin(self) -> None:
        """Go to the first check that has a step to take; a plan that moves nothing needs none."""
        while self._checks and not (self.plan.moved_bytes and self._checks[0].begin(self.plan)):
            self._checks.popleft()
