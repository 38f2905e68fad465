"""Which groups stay on the device, by rules that need no search.

Those are Megatron's for its numbers (module list, fraction, bytes per pipeline rank), and a share
of the bytes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from megatron_offload.core.policy_config import ModulesConfig, PlanFileConfig, RatioConfig
from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.errors import ConfigError
from megatron_offload.planning.plan import OffloadPlan, RankPlan, check_profiles, plan_of, rank_plan
from megatron_offload.planning.plan_file import load_plan


@dataclass(frozen=True, slots=True)
class ModulesPolicy:
    """Megatron-core's policy: all groups of the listed modules, less what these numbers keep.

    Attributes:
        fraction: share of each chunk's groups that moves, earliest first, in [0, 1].
        keep_bytes: bytes that stay on the device besides, taken from the groups whose backward
            comes first, because they are gone soonest anyway. Megatron sets it to pipeline rank
            times ``delta_offload_bytes_across_pp_ranks``.
        resident_bytes: room on the device, at any one time, for groups that never move: those
            whose backward follows their forward soonest.
        modules: names or patterns of the groups that move; empty: all that were marked.
        delta_bytes_across_pp_ranks: in a plan of all ranks, rank r has r times so many
            ``keep_bytes`` more.
    """

    kind: ClassVar[str] = "modules"

    fraction: float = 1.0
    keep_bytes: int = 0
    resident_bytes: int = 0
    modules: tuple[str, ...] = ()
    delta_bytes_across_pp_ranks: int = 0

    def with_residents(self, resident_bytes: int) -> ModulesPolicy:
        """Return the same policy with other room for groups that never move."""
        return replace(self, resident_bytes=self.resident_bytes + resident_bytes)

    def plan(self, profile: StepProfile) -> dict[GroupKey, str]:
        """Return the groups that stay on the device, each with the reason."""
        kept: dict[GroupKey, str] = {}
        by_key: dict[GroupKey, GroupProfile] = {}
        for group in profile.groups:
            if not self._is_listed(group.name):
                kept[group.key] = "not among the modules that move"
            elif group.num_bytes > 0:
                by_key[group.key] = group
        remaining = self.keep_bytes
        for key in profile.backward_order:
            if remaining <= 0:
                break
            if key in by_key:
                remaining -= by_key[key].num_bytes
                kept[key] = f"among the first {self.keep_bytes} bytes that backward needs"
        by_chunk: dict[int, list[GroupProfile]] = defaultdict(list)
        for group in profile.groups:
            if group.num_bytes > 0 and group.key not in kept:
                by_chunk[group.key.chunk].append(group)
        for groups in by_chunk.values():
            num_kept = int(len(groups) * (1.0 - self.fraction))
            for group in groups[len(groups) - num_kept :]:
                kept[group.key] = f"beyond the fraction {self.fraction:g} of its chunk"
        return kept

    def residents(self, profile: StepProfile) -> frozenset[GroupKey]:
        """Return the groups that stay within the room for such."""
        return choose_residents(profile, self.resident_bytes)

    def make_plan(self, profiles: Collection[StepProfile]) -> OffloadPlan:
        """Return the plan of all ranks, from one profile of each, in any order."""
        profiles = check_profiles(profiles)
        return plan_of(self.kind, profiles, map(self._plan_rank, profiles))

    def _plan_rank(self, profile: StepProfile) -> RankPlan:
        delta_bytes = profile.run.pp_rank * self.delta_bytes_across_pp_ranks
        policy = replace(self, keep_bytes=self.keep_bytes + delta_bytes)
        kept = dict.fromkeys(policy.residents(profile), "comes back soonest, and there is room")
        return rank_plan(profile, kept | policy.plan(profile), "of a module that moves")

    def _is_listed(self, name: str) -> bool:
        return not self.modules or any(fnmatchcase(name, pattern) for pattern in self.modules)


@dataclass(frozen=True, slots=True)
class RatioPolicy:
    """A share of each rank's bytes, in [0, 1], moves: the first of them, to within one group."""

    kind: ClassVar[str] = "ratio"

    ratio: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise ConfigError(f"a ratio is between 0 and 1, got {self.ratio}")

    def make_plan(self, profiles: Collection[StepProfile]) -> OffloadPlan:
        """Return the plan of all ranks, from one profile of each, in any order."""
        profiles = check_profiles(profiles)
        return plan_of(self.kind, profiles, map(self.plan_rank, profiles))

    def plan_rank(self, profile: StepProfile) -> RankPlan:
        """Return the plan of one rank, which needs no other's."""
        wanted_bytes = self.ratio * sum(group.num_bytes for group in profile.groups)
        kept: dict[GroupKey, str] = {}
        passed_bytes = 0
        for group in profile.groups:
            passed_bytes += group.num_bytes
            if group.num_bytes and passed_bytes > wanted_bytes:
                kept[group.key] = f"behind the first {self.ratio:g} of all bytes"
        return rank_plan(profile, kept, f"among the first {self.ratio:g} of all bytes")


def plan_by_rule(
    config: ModulesConfig | RatioConfig | PlanFileConfig, profiles: Collection[StepProfile]
) -> OffloadPlan:
    """Return the plan that a section asks for which needs no search: a rule's, or a file's.

    Raises:
        ConfigError: the file can't be read or is of another run, or profiles are missing.
    """
    if isinstance(config, PlanFileConfig):
        plan = load_plan(config.path)
        for profile in profiles:
            plan.check(profile)
        return plan
    if isinstance(config, RatioConfig):
        return RatioPolicy(config.ratio).make_plan(profiles)
    numbers = config.model_dump(exclude={"kind"})
    return ModulesPolicy(**numbers).make_plan(profiles)


def choose_residents(profile: StepProfile, room_bytes: int) -> frozenset[GroupKey]:
    """Choose groups that stay, never more than ``room_bytes`` of them at once.

    Every group that stays saves the same traffic per byte, so those are chosen that take the room
    for the shortest time: whenever it is exceeded, the group whose backward is farthest leaves. For
    groups of one size no choice saves more.
    """
    ends_at = dict(zip(profile.backward_order, profile.backward_at_bytes, strict=False))
    staying: dict[GroupKey, int] = {}
    by_end: list[tuple[int, GroupKey]] = []
    by_farthest: list[tuple[int, GroupKey]] = []
    chosen: set[GroupKey] = set()
    used_bytes = 0
    for group in sorted(profile.groups, key=lambda group: group.committed_at_bytes):
        if not 0 < group.num_bytes <= room_bytes or group.key not in ends_at:
            continue
        while by_end and by_end[0][0] < group.committed_at_bytes:
            used_bytes -= staying.pop(heapq.heappop(by_end)[1], 0)
        end = ends_at[group.key]
        staying[group.key] = group.num_bytes
        chosen.add(group.key)
        used_bytes += group.num_bytes
        heapq.heappush(by_end, (end, group.key))
        heapq.heappush(by_farthest, (-end, group.key))
        while used_bytes > room_bytes:
            farthest = heapq.heappop(by_farthest)[1]
            if farthest in staying:
                used_bytes -= staying.pop(farthest)
                chosen.discard(farthest)
    return frozenset(chosen)
