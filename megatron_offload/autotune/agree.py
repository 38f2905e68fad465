"""One plan on all ranks of a run, made by the first from what each has seen.

Invariant: all ranks follow the same plan, or all raise the same error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch.distributed as dist

from megatron_offload.core.machine import MachineConfig
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, PolicyConfig
from megatron_offload.core.profile import RunShape, StepProfile
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError
from megatron_offload.machine.agreement import JobMachines, agree_on_machines
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.job_ranks import gather
from megatron_offload.planning.auto import AutoPlanner
from megatron_offload.planning.bandwidths import (
    DEFAULTS,
    Bandwidths,
    measured_machine,
    simulated_machine,
)
from megatron_offload.planning.make_policy import resources_of
from megatron_offload.planning.memory_target import MemoryPlanner
from megatron_offload.planning.plan import OffloadPlan, check_profiles
from megatron_offload.planning.schedule import Schedule, make_schedule

_logger = logging.getLogger(__name__)

_MOST_REASON = 1000
"""Letters of an error that a plan repeats."""


Bound: TypeAlias = Sequence[int] | int
"""For ``memory_target`` the target of each rank, for ``auto`` the most bytes that a step may move
over all ranks; None for the policy's own."""

Planner: TypeAlias = Callable[[Any], OffloadPlan]
"""Makes a plan within a `Bound`."""


def make_planner(
    profiles: Collection[StepProfile], policy: MemoryTargetConfig | AutoConfig, schedule: Schedule
) -> Planner:
    """Return what plans again and again from the profiles of one step, one of each pipeline rank.

    ``schedule`` is what the ranks run; ``auto`` predicts with it.
    """
    resources = resources_of(policy)
    if isinstance(policy, MemoryTargetConfig):
        memory, kind = MemoryPlanner(profiles, resources), policy.kind
        own_targets = policy.targets(len(memory.ranks))
        return lambda targets: memory.plan(targets or own_targets, kind)
    # It needs the simulator's library, which nothing else here does.
    from megatron_offload.planning.predict import job_of, predictor_of

    profiles = check_profiles(profiles)
    job = job_of(profiles, schedule, resources.machine, gpus_per_rank=resources.gpus_per_rank)
    percent = policy.most_slowdown_percent
    return AutoPlanner(profiles, predictor_of(job), percent, resources).plan


class RunPlanner:
    """Plans together with all ranks, as often as it is asked; collective, as all it does.

    The first rank plans, from the first profile of each pipeline rank: those of other data-parallel
    or tensor-parallel ranks are the same but for noise. Arguments are those of `check_plan`.
    """

    def __init__(
        self,
        manager: PipelineOffloadManager,
        profile: StepProfile,
        policy: PolicyConfig | None,
        *,
        bandwidths: Bandwidths | None = None,
        schedule: Schedule | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        planned = planning_policy(policy)
        if bandwidths is None:
            started = time.monotonic()
            bandwidths = agree_on_bandwidths(manager, planned, group=group)
            taken_s = time.monotonic() - started
            _logger.info("bandwidths, in %.1f s: %s", taken_s, bandwidths.origin)
        self._manager = manager
        self._group = group
        self._origin = bandwidths.origin
        found = gather(_profile_or_error(manager, profile), group)
        self._planner: Planner | ConfigError | None = None
        if _is_first(group):
            try:
                self._planner = _planner_of(found, planned, bandwidths, schedule)
            except ConfigError as error:  # which `follow` raises on all ranks
                self._planner = error

    def follow(self, bound: Bound | None = None) -> OffloadPlan:
        """Plan on the first rank, and have the managers of all follow the plan.

        Raises:
            TargetError: a rank can't be brought under its target; on all ranks.
        """
        answer = [self._answer(bound)]
        if dist.is_available() and dist.is_initialized():
            first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
            dist.broadcast_object_list(answer, src=first, group=self._group)
        (plan,) = answer
        if isinstance(plan, ConfigError):
            raise plan
        assert plan is not None
        self._manager.follow_plan(plan)
        return plan

    def _answer(self, bound: Bound | None) -> OffloadPlan | ConfigError | None:
        """Return what the first rank tells all: an error on one is an error on all."""
        if self._planner is None or isinstance(self._planner, ConfigError):
            return self._planner
        started = time.monotonic()
        try:
            plan = self._planner(bound)
        except ConfigError as error:
            return error
        _logger.info("planning has taken %.1f s", time.monotonic() - started)
        return replace(plan, bandwidths=self._origin)


def agree_on_bandwidths(
    manager: PipelineOffloadManager,
    policy: PolicyConfig | None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Bandwidths:
    """Return what copies get on the machines of all ranks; collective, and between steps.

    The policy's own section ``machine`` wins. Without one it is what the machines have kept of an
    earlier measurement; where one has none, all ranks measure now, which takes some tenths of a
    second for each GPU of a machine. Where that fails, or copies have no streams or no pinned
    memory of their own, it is the defaults, with a warning.

    Args:
        manager: between two steps.
        policy: ``memory_target`` or ``auto``, the same on all ranks.
        group: all ranks that are to follow one plan; None for all there are.

    Raises:
        ConfigError: another policy is given.
    """
    planned = planning_policy(policy)
    machine, device = planned.machine, manager.backend.describe()
    if machine is not None:
        origin = "the policy's section 'machine'" if machine.model_fields_set else DEFAULTS
    elif device is None:
        machine = simulated_machine(manager.config.simulated)
        origin = "the simulated device's own"
    else:
        try:
            if not (manager.config.copy_streams and manager.config.pin_memory):
                raise BandwidthError("it needs copy_streams and pin_memory")
            machines = agree_on_machines(manager.backend, device, group=group)
            machine = measured_machine(machines.profiles, planned.gpus_per_rank)
            origin = _origin_of(machines)
        except BandwidthError as error:
            machine = MachineConfig()
            origin = f"{DEFAULTS}; measuring failed: {str(error)[:_MOST_REASON]}"
            _logger.warning("bandwidths are %s", origin)
    return Bandwidths(machine=machine, gpus_per_rank=planned.gpus_per_rank, origin=origin)


def planning_policy(policy: PolicyConfig | None) -> MemoryTargetConfig | AutoConfig:
    """Return a policy by which a run plans for itself; `ConfigError` for another, or none."""
    if not isinstance(policy, (MemoryTargetConfig, AutoConfig)):
        given = "none" if policy is None else repr(policy.kind)
        raise ConfigError(f"a run is planned by policy 'memory_target' or 'auto', got {given}")
    return policy


def _origin_of(machines: JobMachines) -> str:
    first = machines.profiles[0]
    when = "measured now" if machines.is_new else f"measured {first.measured_at:%Y-%m-%d}"
    whose = f"{len(first.gpus)} GPUs at once" if len(first.gpus) > 1 else "one GPU"
    if len(machines.profiles) > 1:
        whose = f"the slowest of {len(machines.profiles)} machines"
    place = f"kept in {machines.path}" if machines.path is not None else "not kept"
    return f"{when}, {whose}, {place}"


def _is_first(group: dist.ProcessGroup | None) -> bool:
    is_distributed = dist.is_available() and dist.is_initialized()
    return not is_distributed or dist.get_rank(group) == 0


def _profile_or_error(
    manager: PipelineOffloadManager, profile: StepProfile
) -> StepProfile | ConfigError:
    """Return what this rank says of itself; one that would follow another's part has an error."""
    found, said = manager.learner.pp_rank, profile.run.pp_rank
    if found is None or found == said:
        return profile
    return ConfigError(
        f"its profile is of pipeline rank {said}, and its groups are marked as those of pipeline "
        f"rank {found}; give the front door that marks them pp_rank={said}"
    )


def _planner_of(
    found: Sequence[StepProfile | ConfigError],
    policy: MemoryTargetConfig | AutoConfig,
    bandwidths: Bandwidths,
    schedule: Schedule | None,
) -> Planner:
    """Return what plans from what the ranks say of themselves."""
    profiles: dict[int, StepProfile] = {}
    for rank, profile in enumerate(found):
        if isinstance(profile, ConfigError):
            raise ConfigError(f"rank {rank}: {profile}")
        profiles.setdefault(profile.run.pp_rank, profile)
    in_order = check_profiles(profiles.values())
    policy = policy.model_copy(update={"machine": bandwidths.machine})
    return make_planner(in_order, policy, schedule or _usual_schedule(in_order[0].run))


def _usual_schedule(run: RunShape) -> Schedule:
    name = "interleaved" if run.vp_size > 1 else "1f1b"
    return make_schedule(name, run.pp_size, run.num_microbatches, run.vp_size)
