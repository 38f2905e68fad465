"""What a run was set to do, as the files in its folder say it; its policy decides again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_offload.config import OffloadConfig, load_yaml
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, PlanFileConfig
from megatron_offload.core.profile import StepProfile
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.planning.description import Budgets
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.make_policy import make_policy
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.plan_file import load_plan
from megatron_offload.planning.policy import ModulesPolicy
from megatron_offload.planning.predict import settings_of

__all__ = ["PLAN_NAME", "Recorded", "load_recorded"]

PLAN_NAME = "plan.json"


@dataclass(frozen=True)
class Recorded:
    """The settings of a run."""

    path: Path
    """Of the file that holds them."""
    offload: OffloadConfig

    @property
    def budgets(self) -> Budgets:
        """The budgets that were set, and no other."""
        names = Budgets.model_fields.keys() & self.offload.model_fields_set
        return Budgets(**{name: getattr(self.offload, name) for name in names})

    @property
    def own_plan(self) -> Path | None:
        """The file of the plan that the run made and followed, if it came to that."""
        path = self.path.parent / PLAN_NAME
        plans = isinstance(self.offload.policy, AutoConfig | MemoryTargetConfig)
        return path if plans and path.exists() else None

    def settings(
        self, profiles: Sequence[StepProfile], default: RankSettings
    ) -> list[RankSettings]:
        """Return what each pipeline rank did.

        Args:
            profiles: of each rank, in order.
            default: the budgets, where no plan that was followed says others.

        Raises:
            ConfigError: the plan that was followed can't be read, or is another run's.
        """
        plan = self._plan(profiles)
        if plan is None:
            return [self._by_numbers(profile, default) for profile in profiles]
        for profile in profiles:
            plan.check(profile)
        return settings_of(plan, default)

    def describe(self) -> str:
        """Return what decided in the run, in words."""
        config = self.offload
        if isinstance(config.policy, PlanFileConfig):
            return f"the plan {config.policy.path}"
        if self.own_plan is not None:
            return f"its own plan {self.own_plan}"
        words = [f"policy {config.policy.kind}"] if config.policy is not None else []
        for name in ("fraction", *Budgets.model_fields, "delta_bytes_across_pp_ranks"):
            value = getattr(config, name)
            if name in config.model_fields_set and value is not None:
                words.append(f"{name} {value if name == 'fraction' else format_bytes(value)}")
        return ", ".join(words) or "the package's own budgets"

    def not_simulated(self, peak_host_bytes: int) -> list[str]:
        """Return which settings the simulation leaves out, with the most that a rank's host had."""
        config = self.offload
        found = []
        if config.host_memory_bytes is not None and config.host_memory_bytes < peak_host_bytes:
            found.append(f"host_memory_bytes {format_bytes(config.host_memory_bytes)}")
        if config.device_target_bytes is not None and config.policy is None:
            found.append(f"device_target_bytes {format_bytes(config.device_target_bytes)}")
        switches = ("pin_memory", "copy_streams")
        return found + [f"{name} false" for name in switches if not getattr(config, name)]

    def _plan(self, profiles: Sequence[StepProfile]) -> OffloadPlan | None:
        """Return the plan that decided, if one did."""
        policy = self.offload.policy
        if self.own_plan is not None:
            return load_plan(self.own_plan)
        if policy is None or isinstance(policy, AutoConfig | MemoryTargetConfig):
            return None
        try:
            return make_policy(policy).make_plan(profiles)
        except ConfigError as error:
            raise ConfigError(
                f"{self.path}: offload.policy: {error}; --plan FILE takes another"
            ) from error

    def _by_numbers(self, profile: StepProfile, default: RankSettings) -> RankSettings:
        """Return what Megatron's numbers decide on a rank."""
        config, pp_rank = self.offload, profile.run.pp_rank
        policy = ModulesPolicy(
            config.fraction,
            pp_rank * config.delta_bytes_across_pp_ranks,
            (config.resident_bytes or 0) + pp_rank * config.resident_delta_bytes_across_pp_ranks,
        )
        unlisted = {group.key for group in profile.groups if group.name not in config.modules}
        kept = unlisted.union(policy.plan(profile))
        return replace(default, kept=frozenset(kept), residents=policy.residents(profile))


def load_recorded(folder: Path) -> Recorded | None:
    """Return the settings of the run in a folder; None where it has left none.

    Raises:
        ConfigError: its configuration can't be read.
    """
    path = folder / "config.yaml"
    if not path.exists():
        return None
    return Recorded(path, validate(OffloadConfig, load_yaml(path).get("offload") or {}, str(path)))
