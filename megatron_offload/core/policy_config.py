"""The policy that a configuration asks for: one section, its keys by its kind.

Invariant: a section holds only keys that its kind has; anything else fails when it is read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_offload.core.machine import MachineConfig
from megatron_offload.files.strict_model import (
    BytesField,
    Converted,
    NamesField,
    OptionalBytesField,
    StrictModel,
    TargetBytes,
    default,
)


class ModulesConfig(StrictModel):
    """All groups of the listed modules move, less what the numbers keep."""

    kind: Literal["modules"] = "modules"

    modules: NamesField = default(())
    """Names or patterns of groups; empty: all that were marked."""

    fraction: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of each chunk's groups that moves, earliest first."""

    delta_bytes_across_pp_ranks: BytesField = default(0)
    """Pipeline rank r keeps r times this many bytes."""


class RatioConfig(StrictModel):
    """A share of the bytes moves, the first in the order of the step."""

    kind: Literal["ratio"]

    ratio: float = Field(ge=0.0, le=1.0)


def _default_in_full(value: Any) -> Any:
    """Return the section that the word ``default`` stands for."""
    if isinstance(value, str):
        if value != "default":
            raise ValueError("give 'default', or a section with keys such as d2h_gbps")
        return {}
    return value


class SolvedConfig(StrictModel):
    """What the policies that solve for a plan have in common."""

    max_inflight_bytes: OptionalBytesField = default(None)
    """Device memory for groups on their way out. None follows the target."""

    prefetch_bytes: OptionalBytesField = default(None)
    """Device memory for groups that are back ahead of their use. None follows the target."""

    machine: Annotated[MachineConfig | None, BeforeValidator(_default_in_full)] = None
    """What copies get; what a section leaves out, and the word ``default`` altogether, takes the
    defaults. None: what was measured on the machines of the run that plans; elsewhere the
    defaults."""

    gpus_per_rank: int = Field(default=1, ge=1)
    """GPUs of a node that do the same at the same time, such as a tensor-parallel group."""

    measured_plans: int = Field(default=3, ge=0, le=20)
    """Plans that a run which plans by itself measures at most, by some steps each, until one keeps
    its promise of memory or of time. 0 trusts the prediction."""


class MemoryTargetConfig(SolvedConfig):
    """Every rank fits into so many bytes, and as little as that takes is copied."""

    kind: Literal["memory_target"]

    target_bytes: Converted[
        TargetBytes | Annotated[tuple[TargetBytes, ...], Field(min_length=1)],
        int | str | list[int | str] | tuple[int | str, ...],
    ]
    """Most device memory that a rank reserves: one size for all pipeline ranks, or a list."""

    def targets(self, num_ranks: int) -> tuple[int, ...]:
        """Return the target of each pipeline rank."""
        target = self.target_bytes
        return (int(target),) * num_ranks if isinstance(target, int) else tuple(map(int, target))


class AutoConfig(SolvedConfig):
    """The most memory that costs (almost) no time."""

    kind: Literal["auto"]

    most_slowdown_percent: float = Field(default=1.0, ge=0.0, le=1000.0)
    """Of the step's time without offload."""


class PlanFileConfig(StrictModel):
    """A plan that was made before; see `megatron_offload.planning.plan_file.save_plan`."""

    kind: Literal["plan_file"]

    path: Annotated[str, Field(min_length=1)]


PolicyConfig = Annotated[
    ModulesConfig | RatioConfig | MemoryTargetConfig | AutoConfig | PlanFileConfig,
    Field(discriminator="kind"),
]
"""Type of a field ``policy: PolicyConfig = ModulesConfig()``."""
