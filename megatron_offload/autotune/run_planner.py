"""Plans of a run that plans for itself: from the profiles of one step, one after another.

Owns what `auto` and `memory_target` need besides profiles, and what is found only once. Must not
know ranks that talk, nor what asks for another plan.

Invariant: the plans of one planner are those that planners of their own would make.
Read next: `megatron_offload.autotune.planned_run`, whose first rank has one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.profile import StepProfile
from megatron_offload.planning.auto import AutoPolicy, AutoSearch
from megatron_offload.planning.make_policy import resources_of
from megatron_offload.planning.memory_target import MemoryPlanner
from megatron_offload.planning.plan import OffloadPlan, check_profiles
from megatron_offload.planning.schedule import Schedule

__all__ = ["RunPlanner"]


class RunPlanner:
    """Makes plans for all pipeline ranks of a run.

    Args:
        profiles: of a step without offload, one of each pipeline rank.
        policy: what to aim at.
        schedule: what the ranks run; for ``auto``, which predicts.

    Raises:
        ConfigError: the profiles can't be planned with.
    """

    def __init__(
        self,
        profiles: Collection[StepProfile],
        policy: MemoryTargetConfig | AutoConfig,
        schedule: Schedule,
    ) -> None:
        self._profiles = check_profiles(profiles)
        self._policy = policy
        self._schedule = schedule

    def plan(
        self,
        *,
        target_bytes: Sequence[int] | None = None,
        most_moved_bytes: int | None = None,
    ) -> OffloadPlan:
        """Return a plan of all pipeline ranks.

        Args:
            target_bytes: of each rank, for ``memory_target``; None for the policy's own.
            most_moved_bytes: of a step, over all ranks, for ``auto``; None for any.

        Raises:
            ConfigError: the targets are not as many as the ranks, or ``auto`` is to plan from a
                step that moved something.
            TargetError: a rank can't be brought under its target.
        """
        if isinstance(self._policy, AutoConfig):
            return self._search.best(most_moved_bytes)
        targets = target_bytes or self._policy.targets(len(self._profiles))
        return self._planner.plan(targets, self._policy.kind)

    @functools.cached_property
    def _planner(self) -> MemoryPlanner:
        return MemoryPlanner(self._profiles, resources_of(self._policy))

    @functools.cached_property
    def _search(self) -> AutoSearch:
        assert isinstance(self._policy, AutoConfig)
        # It needs the simulator's library, which nothing else here does.
        from megatron_offload.planning.predict import job_of, predictor_of

        policy = self._policy
        resources = resources_of(policy)
        job = job_of(
            self._profiles,
            self._schedule,
            resources.machine,
            gpus_per_rank=resources.gpus_per_rank,
        )
        auto = AutoPolicy(predictor_of(job), policy.most_slowdown_percent, resources)
        return auto.search(self._profiles)
