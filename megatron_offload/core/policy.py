"""Which groups are kept on the device, by rules that need no search.

Those are Megatron's for its numbers (fraction, bytes per pipeline rank), and a share of the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_offload.core.profile import GroupKey, StepProfile


@dataclass(frozen=True, slots=True)
class ModulesPolicy:
    """Megatron-core's policy: all groups, less what these numbers keep."""

    fraction: float = 1.0
    """Share of each chunk's groups that is offloaded, earliest first, in [0, 1]."""
    keep_bytes: int = 0
    """What is kept on the device besides, of the groups whose backward comes first, because they
    are gone soonest anyway. Megatron has rank times ``delta_offload_bytes_across_pp_ranks``."""

    def plan(self, profile: StepProfile) -> dict[GroupKey, str]:
        """Return the groups that are kept on the device, each with the reason."""
        kept: dict[GroupKey, str] = {}
        moving = {group.key: group.num_bytes for group in profile.groups if group.num_bytes > 0}
        remaining = self.keep_bytes
        for key in profile.backward_order:
            if remaining > 0 and key in moving:
                remaining -= moving.pop(key)
                kept[key] = f"among the first {self.keep_bytes} bytes that backward needs"
        by_chunk: dict[int, list[GroupKey]] = defaultdict(list)
        for key in moving:
            by_chunk[key.chunk].append(key)
        for keys in by_chunk.values():
            num_kept = int(len(keys) * (1.0 - self.fraction))
            for key in keys[len(keys) - num_kept :]:
                kept[key] = f"beyond the fraction {self.fraction:g} of its chunk"
        return kept


def kept_by_ratio(ratio: float, profile: StepProfile) -> dict[GroupKey, str]:
    """Return what is kept where a share of the bytes moves, with the reason: the last groups."""
    wanted_bytes = ratio * sum(group.num_bytes for group in profile.groups)
    kept: dict[GroupKey, str] = {}
    seen_bytes = 0
    for group in profile.groups:
        seen_bytes += group.num_bytes
        if group.num_bytes and seen_bytes > wanted_bytes:
            kept[group.key] = f"behind the first {ratio:g} of all bytes"
    return kept
