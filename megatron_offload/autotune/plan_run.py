"""Plan a run from one of its own steps, then measure the plan by later ones.

Every step that is looked at is a training step like any other; all ranks take the same steps, and
have the same plan after each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_offload.autotune.agree import JointChooser, agree_on_bandwidths, planning_policy
from megatron_offload.autotune.search import MemorySearch, Next, PlanSearch, TimeSearch
from megatron_offload.core.policy_config import AutoConfig, PolicyConfig
from megatron_offload.core.profile import RunShape, StepProfile
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import TargetError
from megatron_offload.machine.job_ranks import gather
from megatron_offload.observe.measure import MeasuredStep, measure_step, tells_reserved
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.bandwidths import Bandwidths
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.schedule import Schedule

if TYPE_CHECKING:
    from megatron_offload.planning.choice import Chooser

_logger = logging.getLogger(__name__)


@dataclass
class PlanCheck:
    """A plan, measured by the steps that follow it; ``plan`` says what was measured so far.

    while not check.is_over:
        with check.step():
            train_step()  # up to and with the manager's reset
        check.note()
    """

    manager: PipelineOffloadManager
    search: PlanSearch
    """Begins with the plan."""
    plan_for: Callable[[Sequence[int]], OffloadPlan]
    """Plans for such targets on all ranks together, or raises `TargetError` on all."""
    pp_rank: int
    group: dist.ProcessGroup | None
    _measured: MeasuredStep = field(default_factory=MeasuredStep)

    def __post_init__(self) -> None:
        self.manager.follow_plan(self.search.plan)

    @property
    def plan(self) -> OffloadPlan:
        """The plan that is followed, with what was measured of it."""
        return self.search.plan

    @property
    def is_over(self) -> bool:
        """Whether the plan stays as it is."""
        return self.search.next is Next.NOTHING

    @contextmanager
    def step(self) -> Iterator[MeasuredStep]:
        """Look at the step that is taken inside, its ``reset`` included; yield what it takes.

        Where the plan is being timed, every other step moves nothing: it has to fit into memory as
        it does without offload.
        """
        if self.search.wants_empty:
            self.manager.backend.trim_device()
        moves = self.search.next is Next.WITH
        with measure_step(self.manager, moves=moves) as self._measured:
            yield self._measured

    def note(self) -> str:
        """Do what follows from the last step, and return what there is to say of it; collective.

        Raises:
            ConfigError: a new plan is wanted, and none can be made; on all ranks.
        """
        search, before = self.search, self.search.plan
        mine, reserved = self._measured, dict[int, int]()
        found = gather((self.pp_rank, mine.reserved_bytes, mine.step_us), self.group)
        for place, num_bytes, _ in found:
            reserved[place] = max(num_bytes, reserved.get(place, 0))
        step_us = max(each for _, _, each in found)
        search.note(step_us, [reserved[place] for place in sorted(reserved)])
        while search.targets is not None:
            try:
                search.answer(self.plan_for(search.targets))
            except TargetError as error:
                _logger.info("no other plan: %s", error)
                search.answer(None)
        if search.plan is not before:
            self.manager.follow_plan(search.plan)
        if self.is_over:
            self.manager.backend.trim_device()  # what only the steps without offload needed
        if search.said:
            _logger.log(logging.INFO if search.is_kept else logging.WARNING, "%s", search.said)
        return search.said


def plan_run(
    manager: PipelineOffloadManager,
    train_step: Callable[[], object],
    run: RunShape,
    *,
    policy: PolicyConfig,
    schedule: Schedule | None = None,
    group: dist.ProcessGroup | None = None,
    moves: bool = False,
) -> OffloadPlan:
    """Profile one training step, plan, and follow the plan from then on; collective.

    Call it once the steps look alike, after the second or third. Nothing moves in the step
    that is profiled, so it must fit into memory as it does without offload; where it doesn't, give
    ``moves=True`` for a ``memory_target``.

    The plan is measured at once, by as many training steps as that needs: for a ``memory_target``
    at most ``4 measured_plans``, for ``auto`` ``1 + 7 measured_plans``. Each rank has to be able to
    go on for so long. A program that takes its steps itself makes a `check_plan`.

    Args:
        manager: whose groups are planned for.
        train_step: takes one training step, the manager's `reset` included.
        run: which part of the run this rank is.
        policy: ``memory_target`` or ``auto``.
        schedule: what the pipeline ranks run; by default 1F1B, interleaved with virtual stages.
        group: all ranks that are to follow one plan; None for all there are.
        moves: whether the profiled step moves what those before it have moved; not for ``auto``.

    Raises:
        ConfigError: another policy is given, or no plan can be made; on all ranks.
        TargetError: a rank can't be brought under its target; on all ranks.
    """
    planned = planning_policy(policy)
    with profile_step(manager, run=run, moves=moves) as recorded:
        train_step()
    check = check_plan(manager, recorded.profile, planned, schedule=schedule, group=group)
    while not check.is_over:
        with check.step():
            train_step()
        check.note()
    return check.plan


def check_plan(
    manager: PipelineOffloadManager,
    profile: StepProfile,
    policy: PolicyConfig | None,
    *,
    bandwidths: Bandwidths | None = None,
    schedule: Schedule | None = None,
    group: dist.ProcessGroup | None = None,
) -> PlanCheck:
    """Plan from the profiles of one step; return the plan, and what measures it by later steps.

    Collective. All ranks follow the plan from the next step on. Nothing is looked at until the
    caller does: see `PlanCheck`. Limits that the manager's user has set are planned with.
    """
    planned = planning_policy(policy)
    bandwidths = bandwidths or agree_on_bandwidths(manager, planned, group=group)
    limits = {key: getattr(manager.config, key) for key in ("max_inflight_bytes", "prefetch_bytes")}
    limits = {key: limit for key, limit in limits.items() if limit is not None}
    planned = planned.model_copy(update={**limits, "machine": bandwidths.machine})
    chooser = JointChooser(manager, profile, planned, schedule, group)

    def plan_by(question: Callable[[Chooser], OffloadPlan]) -> OffloadPlan:
        return replace(chooser.ask(question), policy=planned.kind, bandwidths=bandwidths.origin)

    plan, num_plans = plan_by(lambda each: each.plan(planned)), planned.measured_plans
    search: PlanSearch
    if isinstance(planned, AutoConfig):
        highest_bytes = chooser.ask(lambda each: each.highest_bytes)
        search = TimeSearch(plan, highest_bytes, planned.most_slowdown_percent, num_plans)
    else:
        num_plans = num_plans if all(gather(tells_reserved(manager), group)) else 0
        search = MemorySearch(plan, planned.targets(plan.pp_size), num_plans)
    return PlanCheck(
        manager,
        search,
        lambda targets: plan_by(lambda each: each.under(targets)),
        profile.run.pp_rank,
        group,
    )
