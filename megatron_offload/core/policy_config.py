"""The policy that a configuration asks for: one section, its keys by its kind.

Invariant: a section holds only keys that its kind has; anything else fails when it is read.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import Converted, StrictModel, TargetBytes


class ModulesConfig(StrictModel):
    """All groups are offloaded, less what the keys beside the policy keep; nothing is planned."""

    kind: Literal["modules"] = "modules"


class RatioConfig(StrictModel):
    """A share of the bytes is offloaded, the first in the order of the step."""

    kind: Literal["ratio"]

    ratio: float = Field(ge=0.0, le=1.0)


class SolvedConfig(StrictModel):
    """What the policies that solve for a plan have in common."""

    measured_plans: int = Field(default=3, ge=0, le=20)
    """Plans that a run measures at most, by some steps each, until one keeps its promise of memory
    or of time. 0 trusts the prediction."""


class MemoryTargetConfig(SolvedConfig):
    """Every rank fits into so many bytes, and as little as that takes is copied."""

    kind: Literal["memory_target"]

    memory_target: Converted[
        TargetBytes | Annotated[tuple[TargetBytes, ...], Field(min_length=1)],
        int | str | list[int | str] | tuple[int | str, ...],
    ]
    """Most device memory that a rank reserves: one size for all pipeline ranks, or a list."""

    def targets(self, num_ranks: int) -> tuple[int, ...]:
        """Return the target of each pipeline rank.

        Raises:
            ConfigError: there are several, and not as many as ranks.
        """
        target = self.memory_target
        if not isinstance(target, int) and len(target) != num_ranks:
            raise ConfigError(
                f"{len(target)} memory targets are given for {num_ranks} pipeline ranks; give one "
                "for all, or one for each"
            )
        return tuple(map(self.target_of, range(num_ranks)))

    def target_of(self, rank: int) -> int:
        """Return the target of one pipeline rank."""
        target = self.memory_target
        return int(target if isinstance(target, int) else target[rank])


class AutoConfig(SolvedConfig):
    """The most memory that costs (almost) no time."""

    kind: Literal["auto"]

    most_slowdown_percent: float = Field(default=3.0, ge=0.0, le=1000.0)
    """Of the step's time without offload."""


PolicyConfig = Annotated[
    ModulesConfig | RatioConfig | MemoryTargetConfig | AutoConfig, Field(discriminator="kind")
]
"""Type of a field ``policy: PolicyConfig = ModulesConfig()``."""
