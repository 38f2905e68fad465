"""Plan a run from one of its own steps, agreed on by all of its pipeline ranks.

Owns the collectives of planning, what bandwidths count, and by what a plan is held against later
steps. Must not know how plans are made. Nothing here happens unasked: no step holds a collective of
its own, and bandwidths are measured between steps.

Invariants: all ranks follow the same plan, or all raise the same error; every step that is looked
at is a training step like any other. Read next: `megatron_offload.plan_check.check` and
`megatron_offload.planning.policy_config`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.machine.agreement import JobMachines, agree_on_machines
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.job_ranks import gather
from megatron_offload.plan_check.check import PlanCheck
from megatron_offload.plan_check.cost import TimeCheck
from megatron_offload.plan_check.distances import DistanceCheck, PlanCorrection
from megatron_offload.plan_check.memory import MemoryCheck
from megatron_offload.planning.adapt import Distances
from megatron_offload.planning.bandwidths import (
    DEFAULTS,
    Bandwidths,
    measured_machine,
    simulated_machine,
)
from megatron_offload.planning.footprint import Footprint
from megatron_offload.planning.plan import OffloadPlan, check_profiles
from megatron_offload.planning.plan_file import parse_plan, plan_to_json
from megatron_offload.planning.policy_config import (
    AutoConfig,
    MachineConfig,
    MemoryTargetConfig,
    PolicyConfig,
    make_policy,
)
from megatron_offload.planning.profile import RunShape, StepProfile
from megatron_offload.planning.profile_file import parse_profile, profile_to_json
from megatron_offload.planning.schedule import Schedule, make_schedule
from megatron_offload.profiling import profile_step

_Said = TypeVar("_Said")

__all__ = [
    "agree_on_bandwidths",
    "agree_on_plan",
    "check_plan",
    "correct_plan",
    "make_plan",
    "plan_run",
]

_logger = logging.getLogger(__name__)

_MOST_REASON = 1000
"""Letters of an error that a plan repeats."""

_ERROR_MARK = "error: "
"""Begins what a rank says that has no profile; JSON begins otherwise."""

_ERRORS: dict[str, type[ConfigError]] = {"error": ConfigError, "target": TargetError}


def plan_run(
    manager: PipelineOffloadManager,
    train_step: Callable[[], object],
    run: RunShape,
    *,
    schedule: Schedule | None = None,
    policy: PolicyConfig | None = None,
    group: dist.ProcessGroup | None = None,
) -> OffloadPlan:
    """Profile one training step, plan, and follow the plan from then on; collective.

    To be called once the steps look alike, after the second or third. Nothing moves in the step
    that is profiled, so it must fit into memory as it does without offload; where it doesn't, make
    a plan from a description of the model (``megatron-offload plan --model``).

    The plan is corrected and measured at once: it takes as many training steps as that needs,
    ``1 + correction_steps`` and ``3 measured_plans`` (for ``auto`` `cost_check.most_steps`) at
    most, and each rank has to be able to go on for so long. A program that takes its steps itself
    makes a `check_plan`.

    Args:
        manager: whose groups are planned for.
        train_step: takes one training step, the manager's `reset` included.
        run: which part of the run this rank is.
        schedule: what the pipeline ranks run; by default 1F1B, interleaved with virtual stages.
        policy: ``memory_target`` or ``auto``; by default the manager's own.
        group: all ranks that are to follow one plan; None for all there are.

    Returns:
        The plan of all pipeline ranks.

    Raises:
        ConfigError: no such policy is given, or no plan can be made; on all ranks.
        TargetError: a rank can't be brought under its target; on all ranks.
    """
    planned = _planning_policy(policy if policy is not None else manager.config.policy)
    with profile_step(manager, run=run, moves=False) as recorded:
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
    """Do as `agree_on_plan`; return the plan with what holds it against later steps; collective.

    Nothing is looked at until the caller does: see `PlanCheck`. The plan's distances are corrected,
    unless the policy gives one or ``device_target_bytes`` sets them. For ``memory_target`` what
    ranks reserve comes before that, as another plan has other distances; for ``auto`` what the plan
    costs comes after, so that no plan is too slow for its distances alone.
    """
    planned = _planning_policy(policy)
    if bandwidths is None:
        bandwidths = agree_on_bandwidths(manager, planned, group=group)

    def make(
        policy: MemoryTargetConfig | AutoConfig, most_moved_bytes: int | None = None
    ) -> OffloadPlan:
        return agree_on_plan(
            *(manager, profile, policy),
            bandwidths=bandwidths,
            schedule=schedule,
            group=group,
            most_moved_bytes=most_moved_bytes,
        )

    plan, pp_rank = make(planned), profile.run.pp_rank
    is_given = planned.max_inflight_bytes is not None or planned.prefetch_bytes is not None
    is_fixed = is_given or manager.config.device_target_bytes is not None
    num_steps = 0 if is_fixed else planned.correction_steps

    def gather_distances(mine: Distances) -> list[Distances]:
        return [Distances(*found[0]) for found in _gather_by_place(tuple(mine), pp_rank, group)]

    if isinstance(planned, AutoConfig):
        cost = TimeCheck(
            manager,
            planned.most_slowdown_percent,
            planned.measured_steps,
            lambda most_bytes: make(planned, most_bytes),
            lambda mine: max(gather(mine, group)),
        )
        return PlanCheck(plan, (DistanceCheck(manager, num_steps, None, gather_distances), cost))
    targets = planned.targets(plan.pp_size)
    memory = MemoryCheck(
        manager,
        targets,
        planned.measured_plans,
        lambda targets: make(planned.model_copy(update={"target_bytes": tuple(targets)})),
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


def agree_on_plan(
    manager: PipelineOffloadManager,
    profile: StepProfile,
    policy: PolicyConfig | None,
    *,
    bandwidths: Bandwidths | None = None,
    schedule: Schedule | None = None,
    group: dist.ProcessGroup | None = None,
    most_moved_bytes: int | None = None,
) -> OffloadPlan:
    """Plan from the profiles of one step, and follow the plan from the next on; collective.

    The first rank plans, from the first profile of each pipeline rank: those of other data-parallel
    or tensor-parallel ranks are the same but for noise.

    Args:
        manager: follows the plan.
        profile: this rank's, of a step without offload.
        policy: ``memory_target`` or ``auto``.
        bandwidths: what copies get; None for those of `agree_on_bandwidths`.
        schedule: what the pipeline ranks run; by default 1F1B, interleaved with virtual stages.
        group: all ranks that are to follow one plan; None for all there are.
        most_moved_bytes: of a step, over all ranks, for ``auto``; None for any.

    Raises:
        ConfigError: another policy is given, or no plan can be made; on all ranks.
        TargetError: a rank can't be brought under its target; on all ranks.
    """
    planned = _planning_policy(policy)
    if bandwidths is None:
        bandwidths = agree_on_bandwidths(manager, planned, group=group)
    texts = gather(_profile_or_error(manager, profile), group)
    is_distributed = dist.is_available() and dist.is_initialized()
    answer = [""]
    if not is_distributed or dist.get_rank(group) == 0:
        answer = [_plan_or_error(texts, planned, bandwidths, schedule, most_moved_bytes)]
    if is_distributed:
        first = dist.get_global_rank(group, 0) if group is not None else 0
        dist.broadcast_object_list(answer, src=first, group=group)
    kind, _, body = answer[0].partition("\n")
    if kind in _ERRORS:
        raise _ERRORS[kind](body)
    plan = parse_plan(body, "the plan of the first rank")
    manager.follow_plan(plan)
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
    planned = _planning_policy(policy)
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


def make_plan(
    profiles: Sequence[StepProfile],
    policy: MemoryTargetConfig | AutoConfig,
    schedule: Schedule,
    most_moved_bytes: int | None = None,
) -> OffloadPlan:
    """Return the plan of all pipeline ranks for a step that was profiled on each.

    Args:
        profiles: of a step without offload, one of each pipeline rank, in order.
        policy: what to aim at.
        schedule: what the ranks run; for ``auto``, which predicts.
        most_moved_bytes: of a step, over all ranks, for ``auto``; None for any.

    Raises:
        ConfigError: the profiles can't be planned with.
        TargetError: a rank can't be brought under its target.
    """
    if not isinstance(policy, AutoConfig):
        return make_policy(policy).make_plan(profiles)
    # They need the simulator's library, which nothing else here does.
    from megatron_offload.planning.predict import predictor_of
    from megatron_offload.planning.profiled_job import job_from_profiles
    from megatron_offload.planning.simulate import simulate

    profiles = check_profiles(profiles)
    machine, gpus_per_rank = policy.resources().machine, policy.gpus_per_rank
    job = functools.partial(
        job_from_profiles, profiles, schedule, machine, gpus_per_rank=gpus_per_rank
    )
    # What isn't saved by groups (weights, temporaries) is the rest of what was measured.
    bare = simulate(job([0] * len(profiles)), None)
    static_bytes = [
        max(0, Footprint.of(profile).peak_bytes - rank.peak_reserved_bytes)
        for profile, rank in zip(profiles, bare.ranks, strict=True)
    ]
    return make_policy(policy, predictor_of(job(static_bytes)), most_moved_bytes).make_plan(
        profiles
    )


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


def _planning_policy(policy: PolicyConfig | None) -> MemoryTargetConfig | AutoConfig:
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


def _profile_or_error(manager: PipelineOffloadManager, profile: StepProfile) -> str:
    """Return what this rank says of itself; one that would follow another's part has an error."""
    found, said = manager.learner.pp_rank, profile.run.pp_rank
    if found is not None and found != said:
        return (
            f"{_ERROR_MARK}its profile is of pipeline rank {said}, and its groups are marked as "
            f"those of pipeline rank {found}; give the front door that marks them pp_rank={said}"
        )
    return profile_to_json(profile)


def _plan_or_error(
    texts: Sequence[str],
    policy: MemoryTargetConfig | AutoConfig,
    bandwidths: Bandwidths,
    schedule: Schedule | None,
    most_moved_bytes: int | None = None,
) -> str:
    """Return what all ranks are told: an error on one is an error on all."""
    try:
        profiles: dict[int, StepProfile] = {}
        for rank, text in enumerate(texts):
            if text.startswith(_ERROR_MARK):
                raise ConfigError(f"rank {rank}: {text.removeprefix(_ERROR_MARK)}")
            profile = parse_profile(text, f"the profile of rank {rank}")
            profiles.setdefault(profile.run.pp_rank, profile)
        in_order = check_profiles(profiles.values())
        policy = policy.model_copy(update={"machine": bandwidths.machine})
        schedule = schedule or _usual_schedule(in_order[0].run)
        plan = make_plan(in_order, policy, schedule, most_moved_bytes)
        plan = replace(plan, bandwidths=bandwidths.origin)
    except ConfigError as error:
        return f"{'target' if isinstance(error, TargetError) else 'error'}\n{error}"
    return "plan\n" + plan_to_json(plan)


def _usual_schedule(run: RunShape) -> Schedule:
    if run.vp_size > 1:
        return make_schedule("interleaved", run.pp_size, run.num_microbatches, run.vp_size)
    return make_schedule("1f1b", run.pp_size, run.num_microbatches)
