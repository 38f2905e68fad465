"""One plan on all ranks of a run, made by the first from what each has seen.

Invariant: all ranks follow the same plan, or all raise the same error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_offload.core.machine import Machine, MachineConfig
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, PolicyConfig
from megatron_offload.core.profile import StepProfile
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, OffloadError
from megatron_offload.machine.bandwidth import BandwidthError, measure_machines
from megatron_offload.machine.job_ranks import gather
from megatron_offload.planning.bandwidths import (
    DEFAULTS,
    Bandwidths,
    measured_machine,
    simulated_machine,
)
from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.plan import check_profiles
from megatron_offload.planning.profiled_job import job_of, schedule_of
from megatron_offload.planning.schedule import Schedule

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)

_MOST_REASON = 1000
"""Letters of an error that a plan repeats."""


class JointChooser:
    """What the first rank chooses with, asked by all ranks together; collective, as all it does.

    It chooses by the first profile of each pipeline rank: those of other data-parallel or
    tensor-parallel ranks are the same but for noise. ``policy`` has the bandwidths to choose by;
    without a ``schedule`` it goes by the one that was seen.
    """

    def __init__(
        self,
        manager: PipelineOffloadManager,
        profile: StepProfile,
        policy: MemoryTargetConfig | AutoConfig,
        schedule: Schedule | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._found = gather((profile, manager.learner.pp_rank), group)
        self._policy = policy
        self._schedule = schedule
        self._group = group
        self._chooser: Chooser | None = None

    def ask(self, question: Callable[[Chooser], _T]) -> _T:
        """Return the answer of the first rank's chooser; an error there is raised on all ranks."""
        answer: list[_T | OffloadError | None] = [None]
        is_distributed = dist.is_available() and dist.is_initialized()
        if not is_distributed or dist.get_rank(self._group) == 0:
            started = time.monotonic()
            try:
                self._chooser = self._chooser or self._make()
                answer = [question(self._chooser)]
            except OffloadError as error:
                answer = [error]
            _logger.info("planning has taken %.1f s", time.monotonic() - started)
        if is_distributed:
            first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
            dist.broadcast_object_list(answer, src=first, group=self._group)
        (found,) = answer
        if isinstance(found, OffloadError):
            raise found
        return found  # type: ignore[return-value]

    def _make(self) -> Chooser:
        profiles: dict[int, StepProfile] = {}
        for rank, (profile, marked) in enumerate(self._found):
            said = profile.run.pp_rank
            if marked not in (None, said):  # it would follow another's part
                raise ConfigError(
                    f"rank {rank}: its profile is of pipeline rank {said}, and its groups are "
                    f"marked as those of pipeline rank {marked}; give the front door that marks "
                    f"them pp_rank={said}"
                )
            profiles.setdefault(said, profile)
        in_order = check_profiles(profiles.values())
        schedule, policy = self._schedule or schedule_of(in_order), self._policy
        machine = Machine(**dict(policy.machine or MachineConfig()))
        job = job_of(in_order, schedule, machine, gpus_per_rank=policy.gpus_per_rank)
        limits = policy.max_inflight_bytes, policy.prefetch_bytes
        inflight, prefetch = (None if limit is None else int(limit) for limit in limits)
        settings = RankSettings(max_inflight_bytes=inflight, prefetch_bytes=prefetch)
        return Chooser(in_order, job, settings)


def agree_on_bandwidths(
    manager: PipelineOffloadManager,
    policy: PolicyConfig | None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Bandwidths:
    """Return what copies get on the machines of all ranks; collective, and between steps.

    The policy's own section ``machine`` wins. Without one all ranks measure now, which takes some
    tenths of a second for each GPU of a machine. Where that fails, or copies have no streams or no
    pinned memory of their own, it is the defaults, with a warning.

    Raises:
        ConfigError: another policy is given.
    """
    planned = planning_policy(policy)
    machine = planned.machine
    if machine is not None:
        origin = "the policy's section 'machine'" if machine.model_fields_set else DEFAULTS
    elif manager.backend.describe() is None:
        machine = simulated_machine(manager.config.simulated)
        origin = "the simulated device's own"
    else:
        try:
            if not (manager.config.copy_streams and manager.config.pin_memory):
                raise BandwidthError("it needs copy_streams and pin_memory")
            machines = measure_machines(manager.backend, group)
            machine = measured_machine(machines)
            num_gpus = len(machines[0])
            whose = f"{num_gpus} GPUs at once" if num_gpus > 1 else "one GPU"
            if len(machines) > 1:
                whose = f"the slowest of {len(machines)} machines"
            origin = f"measured now, {whose}"
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
