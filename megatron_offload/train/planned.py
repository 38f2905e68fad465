"""The plan of a run that plans by itself, from the profiled step to the files that it leaves.

Owns which steps look at the plan, what becomes of it by them, and its files. Must not know the
loop, nor how plans are made.

Invariant: every rank takes the same turns at the same steps, by numbers that all of them know.
Read next: `megatron_offload.autotune.plan_run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_offload.core.profile import StepProfile
from megatron_offload.planning.bandwidths import BANDWIDTHS_NAME, save_bandwidths
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.plan_file import save_plan
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.offload import OffloadSession
from megatron_offload.train.parallel import Parallel
from megatron_offload.train.progress import StepPrinter
from megatron_offload.train.run_folder import plan_path

if TYPE_CHECKING:
    from megatron_offload.autotune.plan_run import PlanCheck
    from megatron_offload.observe.step_time import TimedStep

__all__ = ["PlannedRun"]


class PlannedRun:
    """A run's plan: nothing before it is made, and nothing in a run that makes none.

    Args:
        config: the run.
        parallel: this rank's place in it.
        session: offloads.
    """

    def __init__(self, config: TrainConfig, parallel: Parallel, session: OffloadSession) -> None:
        self._folder = config.run.output
        self._parallel = parallel
        self._session = session
        self._check: PlanCheck | None = None
        self._is_looked_at = False

    @property
    def is_open(self) -> bool:
        """Whether more steps have to tell what becomes of the plan."""
        return self._check is not None and not self._check.is_over

    def take(self, profile: StepProfile, *, plans: bool) -> None:
        """Leave the bandwidths that count beside a profiled step, and plan if asked; collective.

        Args:
            profile: this rank's.
            plans: whether this run follows a plan of its own; whoever plans later needs them too.

        Raises:
            ConfigError: no plan can be made; on all ranks.
        """
        group = self._parallel.host_group
        bandwidths = self._session.bandwidths(group)
        if self._parallel.rank == 0:
            save_bandwidths(bandwidths, self._folder / BANDWIDTHS_NAME)
        if plans:
            self._check = self._session.plan(profile, bandwidths, group)
            self._save(self._check.plan)

    @contextlib.contextmanager
    def looking(self) -> Iterator[TimedStep | None]:
        """Look at the step that is taken inside; its time, where that is what is looked at."""
        self._is_looked_at = False
        if self._check is None or self._check.is_over:
            yield None
            return
        with self._check.step() as timed:
            yield timed
        self._is_looked_at = True

    def look_back(self, printer: StepPrinter) -> None:
        """Do what follows from the step that is over; collective where it was looked at.

        Args:
            printer: told what has become of the plan.
        """
        if self._check is None or not self._is_looked_at:
            return
        self._is_looked_at = False
        before = self._check.plan
        text = self._check.note()
        if self._check.plan != before:
            self._save(self._check.plan)
        if text:
            printer.planned(text)

    def _save(self, plan: OffloadPlan) -> None:
        if self._parallel.rank == 0:
            save_plan(plan, plan_path(self._folder))
