"""Plan a run from one of its own steps, then correct and measure the plan by later ones.

Every step that is looked at is a training step like any other; all ranks take the same steps, and
have the same plan after each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch.distributed as dist

from megatron_offload.autotune.agree import RunPlanner, planning_policy
from megatron_offload.autotune.cost import TimeCheck
from megatron_offload.autotune.distances import DistanceCheck, PlanCorrection
from megatron_offload.autotune.memory import MemoryCheck
from megatron_offload.core.policy_config import AutoConfig, PolicyConfig
from megatron_offload.core.profile import RunShape, StepProfile
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.machine.job_ranks import gather
from megatron_offload.observe.measure import TimedStep
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.bandwidths import Bandwidths
from megatron_offload.planning.plan import Distances, OffloadPlan
from megatron_offload.planning.schedule import Schedule

_Said = TypeVar("_Said")


class PlanCheck:
    """A plan, measured by the steps that follow it; ``plan`` says what was measured so far.

    while not check.is_over:
        with check.step():
            train_step()  # up to and with the manager's reset
        check.note()
    """

    def __init__(
        self, plan: OffloadPlan, checks: Iterable[TimeCheck | MemoryCheck | DistanceCheck]
    ) -> None:
        self.plan = plan
        self._checks = deque(checks)
        self._begin()

    @property
    def is_over(self) -> bool:
        """Whether the plan stays as it is."""
        return not self._checks

    def step(self) -> AbstractContextManager[TimedStep | None]:
        """Look at the step that is taken inside, its ``reset`` included.

        Where the plan is being timed, it yields the step's time, and every other step moves
        nothing: it has to fit into memory as it does without offload.
        """
        return self._checks[0].step()

    def note(self) -> str:
        """Do what follows from the last step, and return what there is to say of it; collective.

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
        """Go to the first check that needs a step; a plan that moves nothing needs none."""
        while self._checks and not (self.plan.moved_bytes and self._checks[0].begin(self.plan)):
            self._checks.popleft()


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

    The plan is corrected and measured at once: it takes as many training steps as that needs,
    ``1 + correction_steps`` and ``3 measured_plans`` (for ``auto`` `most_steps`) at most, and each
    rank has to be able to go on for so long. A program that takes its steps itself makes a
    `check_plan`.

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

    Collective. All ranks follow the plan from the next step on.

    Nothing is looked at until the caller does: see `PlanCheck`. The plan's distances are corrected,
    unless the policy or the user gives one. For ``memory_target`` what
    ranks reserve comes before that, as another plan has other distances; for ``auto`` what the plan
    costs comes after, so that no plan is too slow for its distances alone.
    """
    config = manager.config
    users = {key: getattr(config, key) for key in ("max_inflight_bytes", "prefetch_bytes")}
    users = {key: value for key, value in users.items() if value is not None}
    planned = planning_policy(policy).model_copy(update=users)
    planner = RunPlanner(
        manager, profile, planned, bandwidths=bandwidths, schedule=schedule, group=group
    )
    plan, pp_rank = planner.follow(), profile.run.pp_rank
    is_given = planned.max_inflight_bytes is not None or planned.prefetch_bytes is not None
    num_steps = 0 if is_given else planned.correction_steps

    def gather_distances(mine: Distances) -> list[Distances]:
        return [Distances(*found[0]) for found in _gather_by_place(tuple(mine), pp_rank, group)]

    if isinstance(planned, AutoConfig):
        cost = TimeCheck(
            manager,
            planned.most_slowdown_percent,
            planned.measured_steps,
            planner.follow,
            lambda mine: max(gather(mine, group)),
        )
        return PlanCheck(plan, (DistanceCheck(manager, num_steps, None, gather_distances), cost))
    targets = planned.targets(plan.pp_size)
    memory = MemoryCheck(
        manager,
        targets,
        planned.measured_plans,
        planner.follow,
        lambda mine: [max(found) for found in _gather_by_place(mine, pp_rank, group)],
    )
    distances = DistanceCheck(manager, num_steps, targets[pp_rank], gather_distances)
    return PlanCheck(plan, (memory, distances))


def _gather_by_place(
    mine: _Said, pp_rank: int, group: dist.ProcessGroup | None
) -> list[list[_Said]]:
    """Return what the ranks of each place in the pipeline say, in the order of places and ranks."""
    found: dict[int, list[_Said]] = {}
    for place, said in gather((pp_rank, mine), group):
        found.setdefault(place, []).append(said)
    return [found[place] for place in sorted(found)]


def correct_plan(
    manager: PipelineOffloadManager, train_step: Callable[[], object], *, num_steps: int = 8
) -> None:
    """Take training steps and let what they show correct the distances of a plan.

    For a plan that was made elsewhere; `plan_run` corrects its own.

    Args:
        manager: follows a plan.
        train_step: takes one training step, the manager's `reset` included.
        num_steps: to look at, behind a first one; what was best of them stays.
    """
    correction = PlanCorrection(manager, num_steps)
    while not correction.is_over:
        with correction.step():
            train_step()
