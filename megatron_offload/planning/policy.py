"""Which groups stay on the device, decided from the profile of a step.

Owns Megatron's rules for its three numbers (module list, fraction, bytes per pipeline rank). Must
not know torch: input is a `StepProfile`, output a mapping from group keys to reasons.

Invariant: a decision only ever costs time or memory; exactness does not depend on it.
Read next: `megatron_offload.engine.manager`, which asks at every commit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from megatron_offload.planning.profile import GroupKey, GroupProfile, StepProfile
from megatron_offload.planning.resident import choose_residents

__all__ = ["ModulesPolicy"]


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
    """

    fraction: float = 1.0
    keep_bytes: int = 0
    resident_bytes: int = 0

    def with_residents(self, resident_bytes: int) -> ModulesPolicy:
        """Return the same policy with other room for groups that never move."""
        return replace(self, resident_bytes=self.resident_bytes + resident_bytes)

    def keeps_everything(self) -> bool:
        """Whether nothing moves, which is known before any step was seen."""
        return self.fraction == 0.0

    def plan(self, profile: StepProfile) -> dict[GroupKey, str]:
        """Return the groups that stay on the device, each with the reason."""
        kept: dict[GroupKey, str] = {}
        by_key = {group.key: group for group in profile.groups if group.num_bytes > 0}
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
