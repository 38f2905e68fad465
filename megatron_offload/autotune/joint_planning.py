"""One plan on all ranks of a run, made by the first from what each has seen.

Owns the collectives of planning, what bandwidths count, and that an error on one rank is one on
all. Must not know how plans are made, nor what asks for another one.

Invariant: all ranks follow the same plan, or all raise the same error. Read next:
`megatron_offload.autotune.planned_run`, which asks, and `megatron_offload.autotune.run_planner`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from megatron_offload.autotune.run_planner import RunPlanner
from megatron_offload.core.policy_config import (
    AutoConfig,
    MachineConfig,
    MemoryTargetConfig,
    PolicyConfig,
)
from megatron_offload.core.profile import RunShape, StepProfile
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.machine.agreement import JobMachines, agree_on_machines
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.job_ranks import gather
from megatron_offload.planning.bandwidths import (
    DEFAULTS,
    Bandwidths,
    measured_machine,
    simulated_machine,
)
from megatron_offload.planning.plan import OffloadPlan, check_profiles
from megatron_offload.planning.plan_file import parse_plan, plan_to_json
from megatron_offload.planning.profile_file import parse_profile, profile_to_json
from megatron_offload.planning.schedule import Schedule, make_schedule

__all__ = ["JointPlanner", "agree_on_bandwidths", "planning_policy"]

_logger = logging.getLogger(__name__)

_MOST_REASON = 1000
"""Letters of an error that a plan repeats."""

_ERROR_MARK = "error: "
"""Begins what a rank says that has no profile; JSON begins otherwise."""

_ERRORS: dict[str, type[ConfigError]] = {"error": ConfigError, "target": TargetError}


class JointPlanner:
    """Plans together with all ranks, as often as it is asked; collective, as all it does.

    The first rank plans, from the first profile of each pipeline rank: those of other data-parallel
    or tensor-parallel ranks are the same but for noise.

    Args:
        manager: follows the plans.
        profile: this rank's, of one step.
        policy: what to aim at.
        bandwidths: what copies get; None for those of `agree_on_bandwidths`.
        schedule: what the pipeline ranks run; None for 1F1B, interleaved with virtual stages.
        group: all ranks that are to follow one plan; None for all there are.

    Raises:
        ConfigError: the policy is none by which a run plans for itself.
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
        texts = gather(_profile_or_error(manager, profile), group)
        self._planner: RunPlanner | ConfigError | None = None
        if _is_first(group):
            try:
                self._planner = _planner_of(texts, planned, bandwidths, schedule)
            except ConfigError as error:  # which `follow` raises on all ranks
                self._planner = error

    def follow(
        self,
        *,
        target_bytes: Sequence[int] | None = None,
        most_moved_bytes: int | None = None,
    ) -> OffloadPlan:
        """Plan on the first rank, and have the managers of all follow the plan.

        Args:
            target_bytes: of each pipeline rank; see `RunPlanner.plan`.
            most_moved_bytes: likewise.

        Raises:
            ConfigError: no plan can be made; on all ranks.
            TargetError: a rank can't be brought under its target; on all ranks.
        """
        answer = [""]
        if self._planner is not None:
            answer = [_plan_or_error(self._planner, self._origin, target_bytes, most_moved_bytes)]
        if dist.is_available() and dist.is_initialized():
            first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
            dist.broadcast_object_list(answer, src=first, group=self._group)
        kind, _, body = answer[0].partition("\n")
        if kind in _ERRORS:
            raise _ERRORS[kind](body)
        plan = parse_plan(body, "the plan of the first rank")
        self._manager.follow_plan(plan)
        return plan


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
    """Return a policy by which a run plans for itself.

    Raises:
        ConfigError: it is another one, or none.
    """
    if not isinstance(policy, (MemoryTargetConfig, AutoConfig)):
        given = "none" if policy is None else repr(policy.kind)
        raise ConfigError(f"a run is planned by policy 'memory_target' or 'auto', got {given}")
    return policy


def _origin_of(machines: JobMachines) -> str:
    """Say where measured bandwidths come from."""
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


def _profile_or_error(manager: PipelineOffloadManager, profile: StepProfile) -> str:
    """Return what this rank says of itself; one that would follow another's part has an error."""
    found, said = manager.learner.pp_rank, profile.run.pp_rank
    if found is not None and found != said:
        return (
            f"{_ERROR_MARK}its profile is of pipeline rank {said}, and its groups are marked as "
            f"those of pipeline rank {found}; give the front door that marks them pp_rank={said}"
        )
    return profile_to_json(profile)


def _planner_of(
    texts: Sequence[str],
    policy: MemoryTargetConfig | AutoConfig,
    bandwidths: Bandwidths,
    schedule: Schedule | None,
) -> RunPlanner:
    """Return what plans from what the ranks say of themselves.

    Raises:
        ConfigError: one has no profile, or the profiles can't be planned with.
    """
    profiles: dict[int, StepProfile] = {}
    for rank, text in enumerate(texts):
        if text.startswith(_ERROR_MARK):
            raise ConfigError(f"rank {rank}: {text.removeprefix(_ERROR_MARK)}")
        profile = parse_profile(text, f"the profile of rank {rank}")
        profiles.setdefault(profile.run.pp_rank, profile)
    in_order = check_profiles(profiles.values())
    policy = policy.model_copy(update={"machine": bandwidths.machine})
    return RunPlanner(in_order, policy, schedule or _usual_schedule(in_order[0].run))


def _plan_or_error(
    planner: RunPlanner | ConfigError,
    origin: str,
    target_bytes: Sequence[int] | None,
    most_moved_bytes: int | None,
) -> str:
    """Return what all ranks are told: an error on one is an error on all."""
    started = time.monotonic()
    try:
        if isinstance(planner, ConfigError):
            raise planner
        plan = planner.plan(target_bytes=target_bytes, most_moved_bytes=most_moved_bytes)
        plan = replace(plan, bandwidths=origin)
    except ConfigError as error:
        return f"{'target' if isinstance(error, TargetError) else 'error'}\n{error}"
    _logger.info("planning has taken %.1f s", time.monotonic() - started)
    return "plan\n" + plan_to_json(plan)


def _usual_schedule(run: RunShape) -> Schedule:
    if run.vp_size > 1:
        return make_schedule("interleaved", run.pp_size, run.num_microbatches, run.vp_size)
    return make_schedule("1f1b", run.pp_size, run.num_microbatches)
