"""From the section of a configuration to the policy that chooses."""

from __future__ import annotations

from megatron_offload.core.machine import Machine, MachineConfig
from megatron_offload.core.policy_config import (
    PolicyConfig,
    SolvedConfig,
)
from megatron_offload.errors import require
from megatron_offload.planning.memory_target import Resources


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
