"""What a step teaches those after it: which groups stay, how large the budgets are, what to unpin.

Owns the profile of the last step, the plan made from it, and the search for a device memory target.
Must not know streams or autograd; it acts between steps alone.

Invariant: nothing learned is needed for exactness. A step that differs from the last is planned as
well as may be, and learned from in turn. Read next: `megatron_offload.planning.policy`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase

from megatron_offload.backends.base import Backend
from megatron_offload.config import OffloadConfig
from megatron_offload.core.policy_config import (
    AutoConfig,
    MemoryTargetConfig,
    PlanFileConfig,
    RatioConfig,
)
from megatron_offload.core.profile import GroupKey, StepProfile
from megatron_offload.engine.followed_plan import FollowedPlan
from megatron_offload.engine.stats import StepStats
from megatron_offload.engine.transfers import Transfers
from megatron_offload.errors import ConfigError
from megatron_offload.memory.host_pool import HostPool
from megatron_offload.planning.host_need import HostNeed
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.plan_file import load_plan
from megatron_offload.planning.policy import ModulesPolicy, RatioPolicy
from megatron_offload.planning.target import MemoryTarget

__all__ = ["Learner", "read_policy"]

_NUM_FITS = 3
"""How often the host pool is cut to what the last step alone used: each of the first needs less
than the one before, because what something else keeps, and what comes back soon, is found out by
and by. Later `HostNeed` looks at more steps."""

_logger = logging.getLogger(__name__)


def read_policy(config: OffloadConfig) -> OffloadPlan | RatioPolicy | None:
    """Return what a manager follows in place of the rules of `ModulesPolicy`; None for those.

    Raises:
        ConfigError: the plan's file can't be read, or the policy is one that a run has to plan by.
    """
    policy = config.policy if config.enabled else None
    if isinstance(policy, (MemoryTargetConfig, AutoConfig)):
        raise ConfigError(
            f"policy {policy.kind!r} needs a plan, and a manager makes none: leave the policy out "
            "here and call plan_run(manager, train_step, run, policy=...) after the "
            "second step, or let the trainer or `megatron-offload plan` plan (docs/planning.md)"
        )
    if isinstance(policy, PlanFileConfig):
        return load_plan(policy.path)
    return RatioPolicy(policy.ratio) if isinstance(policy, RatioConfig) else None


class Learner:
    """Plans a step from the one before it.

    Args:
        config: the limits that were set.
        policy: what `read_policy` says of it.
        backend: whose device memory has a target.
        host_pool: what gives back memory that only the first step needed.
        transfers: what learns which blocks something else keeps alive.

    Attributes:
        policy: Megatron's rules for what stays.
        profile: the last step, or None.
        kept: groups that the policy keeps on the device, each with the reason.
        residents: groups that stay in the device budget's room for such.
        is_steady: whether the last step had the groups of the one before.
    """

    def __init__(
        self,
        config: OffloadConfig,
        policy: OffloadPlan | RatioPolicy | None,
        backend: Backend,
        host_pool: HostPool,
        transfers: Transfers,
    ) -> None:
        self.policy = ModulesPolicy(fraction=config.fraction)
        self._listed = config.modules if "modules" in config.model_fields_set else ()
        self._has_seen_names = False
        self.profile: StepProfile | None = None
        self.kept: dict[GroupKey, str] = {}
        self.residents: frozenset[GroupKey] = frozenset()
        self.is_steady = False
        self._config = config
        self._backend = backend
        self._host_pool = host_pool
        self._transfers = transfers
        self._target: MemoryTarget | None = None
        self._warmup_target: MemoryTarget | None = None
        if config.device_target_bytes is not None:
            self._target = MemoryTarget(int(config.device_target_bytes))
            self._warmup_target = MemoryTarget(int(config.device_target_bytes))
        self._reserved_at_start_bytes: int | None = None
        self._reserved_at_backward_bytes: int | None = None
        self._is_trimmed = False
        self._num_fits_left = _NUM_FITS
        self._host_need = HostNeed(int(config.host_slab_bytes))
        self._has_settled = False
        self._planned_for: StepProfile | None = None
        self._planned_with: ModulesPolicy | None = None
        self._largest_bytes = 0
        self._plan: FollowedPlan | None = None
        self._pp_rank: int | None = None
        self._ratio: RatioPolicy | None = None
        if isinstance(policy, RatioPolicy):
            self._ratio = policy
        elif policy is not None:
            self.follow_plan(policy)

    @property
    def pp_rank(self) -> int | None:
        """The pipeline rank whose rules count; None before the first chunk."""
        return self._pp_rank

    def follow(
        self,
        pp_rank: int = 0,
        fraction: float | None = None,
        delta_bytes_across_pp_ranks: int | None = None,
    ) -> None:
        """Take the rules of the caller's model; they count from the next step on.

        What was set in the configuration wins over them, and a plan that is followed over both.

        Args:
            pp_rank: pipeline rank, whose rules and whose part of a plan count.
            fraction: the caller's own; None for what the configuration says.
            delta_bytes_across_pp_ranks: the caller's own, likewise.

        Raises:
            ConfigError: the plan has no such rank.
        """
        config = self._config
        if fraction is None or "fraction" in config.model_fields_set:
            fraction = config.fraction
        delta_bytes = delta_bytes_across_pp_ranks
        if delta_bytes is None or "delta_bytes_across_pp_ranks" in config.model_fields_set:
            delta_bytes = int(config.delta_bytes_across_pp_ranks)
        resident_bytes = int(config.resident_bytes or 0)
        resident_bytes += pp_rank * int(config.resident_delta_bytes_across_pp_ranks)
        policy = ModulesPolicy(fraction, pp_rank * delta_bytes, resident_bytes)
        if policy != self.policy:
            self.policy = policy
        self._pp_rank = pp_rank
        self._begin_plan(pp_rank)

    def follow_plan(self, plan: OffloadPlan) -> None:
        """Do what a plan of all pipeline ranks says, as soon as this rank's place is known.

        It is compared with the run when the step is over.

        Raises:
            ConfigError: the plan has no such rank.
        """
        self._plan = FollowedPlan(plan)
        if self._pp_rank is not None:
            self._begin_plan(self._pp_rank)

    def _begin_plan(self, pp_rank: int) -> None:
        if self._plan is not None and self._plan.begin(pp_rank):
            rank = self._plan.rank
            assert rank is not None
            self._transfers.budget.follow_plan(rank.max_inflight_bytes, rank.prefetch_bytes)
            self.kept, self.residents = dict(self._plan.kept), frozenset()

    def note_start(self) -> None:
        """Take note of what is reserved when a step begins."""
        if self._target is not None:
            self._reserved_at_start_bytes = self._backend.reserved_bytes()

    def note_first_backward(self) -> None:
        """Take note of what a step has reserved when its first backward begins."""
        if self._warmup_target is not None and not self._warmup_target.is_settled:
            self._reserved_at_backward_bytes = self._backend.reserved_bytes()

    def learn(self, profile: StepProfile) -> None:
        """Learn from a step that is over."""
        if self._listed:
            if not self._has_seen_names:
                self._has_seen_names = True
                self._tell_of_unmarked({group.name for group in profile.groups})
            profile = self._without_unlisted(profile)
        before = self.profile
        if profile == before:
            profile = before  # whoever planned with it needn't plan again
        self.profile = profile
        self.is_steady = before is not None and (profile is before or before.has_groups_of(profile))
        self._fit_host_pool()
        if self.is_steady:
            self._fit()
        elif before is not None:
            self._transfers.owners.forget()
            self._is_trimmed = False
        policy = self._effective_policy()
        if self._planned_for is not profile or self._planned_with != policy:
            self._planned_for, self._planned_with = profile, policy
            self._choose(profile, policy)
            moving = (g.num_bytes for g in profile.groups if g.key not in self.kept)
            self._largest_bytes = max(moving, default=0)
        self._transfers.budget.learn(self._largest_bytes)

    def _choose(self, profile: StepProfile, policy: ModulesPolicy) -> None:
        """Decide about the next step from the last."""
        if self._plan is not None:
            if self._plan.rank is not None:
                self._plan.confirm(profile)
            self.kept, self.residents = dict(self._plan.kept), frozenset()
        elif self._ratio is not None:
            self.kept, self.residents = self._ratio.plan_rank(profile).kept, frozenset()
        else:
            self.kept, self.residents = policy.plan(profile), policy.residents(profile)

    def restart(self) -> None:
        """Learn anew what the step looks like; what the memory target has found stays."""
        self.profile = None
        self.is_steady = False
        self.kept = dict(self._plan.kept) if self._plan is not None else {}
        self.residents = frozenset()
        self._planned_for = self._planned_with = None
        self._transfers.owners.forget()

    def keeps_because(self, key: GroupKey) -> str:
        """Return why the policy leaves a group on the device; empty where it moves."""
        reason = self.kept.get(key)
        if reason is None:
            return "beyond the fraction 0 of its chunk" if self._keeps_everything() else ""
        return reason

    def unlisted_because(self, name: str) -> str:
        """Return why a group of this name stays, whatever is planned; empty where it may move.

        Args:
            name: the group's, and not its module's: ``offload_modules`` calls it by the pattern.
        """
        if not self._listed or any(fnmatchcase(name, pattern) for pattern in self._listed):
            return ""
        return "its name is not among OffloadConfig.modules"

    def _tell_of_unmarked(self, names: Collection[str]) -> None:
        """Warn of modules that were asked for and that no group of a step is called by."""
        for pattern in self._listed:
            if not any(fnmatchcase(name, pattern) for name in names):
                _logger.warning(
                    "OffloadConfig.modules names %r, and no group of the step is called so: mark "
                    "it with offload_modules(), or list it in TransformerConfig.offload_modules",
                    pattern,
                )

    def _without_unlisted(self, profile: StepProfile) -> StepProfile:
        """Return the step as it is planned: what groups that stay anyway save is out of reach."""
        return replace(
            profile,
            groups=tuple(
                group._replace(num_bytes=0, elsewhere_bytes=group.elsewhere_bytes + group.num_bytes)
                if self.unlisted_because(group.name)
                else group
                for group in profile.groups
            ),
        )

    def _keeps_everything(self) -> bool:
        if self._ratio is not None:
            return False
        return self._plan is None and self.policy.keeps_everything()

    def bytes_away(self, last_step: StepStats) -> dict[str, int]:
        """Return the bytes off the device at the peak, per group name."""
        if self.profile is None or self.is_steady:
            return {k: v for k, v in last_step.peak_away_bytes_by_name.items() if v}
        if self._keeps_everything():
            return {}
        staying: Collection[GroupKey] = self.residents.union(self.kept)
        return self.profile.bytes_away(staying, self._transfers.budget.total_bytes)

    def _effective_policy(self) -> ModulesPolicy:
        """Return the policy with the room for residents that a memory target leaves to it."""
        if self._target is None or self._config.resident_bytes is not None:
            return self.policy
        return self.policy.with_residents(self._transfers.budget.resident_room_bytes())

    def _fit(self) -> None:
        """Hand back what only the first steps needed, and come closer to the memory target."""
        is_first = self._num_fits_left == _NUM_FITS
        if self._num_fits_left:
            self._num_fits_left -= 1
        if is_first:
            self._trim_device()
        elif self._target is not None and self._warmup_target is not None:
            self._follow_target(self._target, self._warmup_target)

    def _fit_host_pool(self) -> None:
        """Unpin what the last steps didn't need; blocks the host where there is such."""
        pool, need = self._host_pool, self._host_need
        at_once = self.is_steady and self._num_fits_left > 0
        need.note(pool.take_peak_bytes(), pool.stats.slab_bytes_total)
        keep_bytes = need.keep_bytes(at_once=at_once)
        if keep_bytes is not None:
            self._backend.sync_copies()
            pool.shrink(keep_bytes)
            need.note_cut(keep_bytes, pool.stats.slab_bytes_total, at_once=at_once)

    def _trim_device(self) -> None:
        self._backend.trim_device()
        self._is_trimmed = True

    # The memory target. What a step reserves is seen where it began with an empty cache, so every
    # change empties it.

    def _follow_target(self, target: MemoryTarget, warmup_target: MemoryTarget) -> None:
        """Do the next thing that the search needs."""
        reserved_bytes = self._backend.reserved_bytes()
        if reserved_bytes is None:
            self._target = self._warmup_target = None
        elif not self._is_trimmed:
            self._trim_device()  # what other steps have reserved tells nothing of these
        elif not target.is_settled:
            self._approach(target, warmup_target, reserved_bytes)
        elif not warmup_target.is_settled:
            self._extend_warmup(warmup_target, reserved_bytes)
        else:
            if not self._has_settled:
                self._has_settled = True
                self._num_fits_left = 1  # the next step is the first of those that stay
            if target.is_met:
                self._keep_target(target, reserved_bytes)

    def _approach(
        self, target: MemoryTarget, warmup_target: MemoryTarget, reserved_bytes: int
    ) -> None:
        """Set the total for the next step."""
        budget = self._transfers.budget
        least_bytes, most_bytes = budget.bounds_bytes()
        total_bytes = target.propose(reserved_bytes, budget.total_bytes, least_bytes, most_bytes)
        has_changed = total_bytes != budget.total_bytes
        budget.follow_target(total_bytes)
        if has_changed:
            self._trim_device()
        if not target.is_settled:
            return
        if not target.is_met:
            warmup_target.is_settled = True
            _logger.warning(
                "device_target_bytes %d is not met: the last step reserved %d bytes with %d for "
                "offloading, the least is %d; offload more modules or lower the batch",
                *(target.target_bytes, reserved_bytes, budget.total_bytes, least_bytes),
            )
        elif not has_changed:
            self._extend_warmup(warmup_target, reserved_bytes)

    def _extend_warmup(self, warmup_target: MemoryTarget, reserved_bytes: int) -> None:
        """Set what the next step may hold above the total until its first backward."""
        budget = self._transfers.budget
        at_backward_bytes = self._reserved_at_backward_bytes
        if at_backward_bytes is None:
            warmup_target.is_settled = True
            return
        if reserved_bytes > warmup_target.target_bytes:
            at_backward_bytes = reserved_bytes
        most_bytes = max(0, budget.bounds_bytes()[1] - budget.total_bytes)
        extra_bytes = warmup_target.propose(
            at_backward_bytes, budget.warmup_extra_bytes, 0, most_bytes
        )
        if extra_bytes != budget.warmup_extra_bytes:
            budget.warmup_extra_bytes = extra_bytes
            self._trim_device()

    def _keep_target(self, target: MemoryTarget, reserved_bytes: int) -> None:
        """Come down where the target is missed after all, if the last step did it."""
        budget = self._transfers.budget
        if (self._reserved_at_start_bytes or 0) > target.target_bytes:
            self._trim_device()  # an evaluation, say
            return
        least_bytes, _ = budget.bounds_bytes()
        total_bytes = target.correct(reserved_bytes, budget.total_bytes, least_bytes)
        if total_bytes == budget.total_bytes:
            return
        over_bytes = budget.total_bytes - total_bytes
        budget.follow_target(total_bytes)
        budget.warmup_extra_bytes = max(0, budget.warmup_extra_bytes - over_bytes)
        self._trim_device()
