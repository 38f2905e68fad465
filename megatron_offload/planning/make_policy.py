"""From the section of a configuration to the policy that chooses."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from megatron_offload.core.machine import Machine, MachineConfig
from megatron_offload.core.policy_config import (
    MemoryTargetConfig,
    ModulesConfig,
    PlanFileConfig,
    PolicyConfig,
    RatioConfig,
    SolvedConfig,
)
from megatron_offload.errors import ConfigError, require
from megatron_offload.planning.auto import AutoPolicy, Predictor
from megatron_offload.planning.memory_target import MemoryTargetPolicy, Resources
from megatron_offload.planning.policy import ModulesPolicy, PlanFilePolicy, RatioPolicy

Policy: TypeAlias = ModulesPolicy | RatioPolicy | PlanFilePolicy | MemoryTargetPolicy | AutoPolicy
"""Turns the profiles of all pipeline ranks into one plan."""


def resources_of(config: SolvedConfig) -> Resources:
    """Return what a section plans with."""
    return Resources(
        Machine(**dict(config.machine or MachineConfig())),
        config.gpus_per_rank,
        None if config.max_inflight_bytes is None else int(config.max_inflight_bytes),
        None if config.prefetch_bytes is None else int(config.prefetch_bytes),
    )


def check_installed(policy: PolicyConfig) -> None:
    """Raise `ConfigError`, which names the extra, where a library is missing for a policy."""
    require(*{"memory_target": ("highspy",), "auto": ("highspy", "simpy")}.get(policy.kind, ()))


def make_policy(config: PolicyConfig, predict: Predictor | None = None) -> Policy:
    """Return the policy that a section asks for; ``auto`` needs ``predict``, the time of a plan."""
    if isinstance(config, ModulesConfig):
        return ModulesPolicy(
            fraction=config.fraction,
            resident_bytes=int(config.resident_bytes),
            modules=config.modules,
            delta_bytes_across_pp_ranks=int(config.delta_bytes_across_pp_ranks),
        )
    if isinstance(config, RatioConfig):
        return RatioPolicy(config.ratio)
    if isinstance(config, PlanFileConfig):
        return PlanFilePolicy(Path(config.path))
    if isinstance(config, MemoryTargetConfig):
        target = config.target_bytes
        targets = int(target) if isinstance(target, int) else tuple(map(int, target))
        return MemoryTargetPolicy(targets, resources_of(config))
    if predict is None:
        raise ConfigError("the policy 'auto' needs a prediction of step times: describe the job")
    return AutoPolicy(predict, config.most_slowdown_percent, resources_of(config))
