"""Which groups are kept on the device, by rules that need no search.

Those are Megatron's for its numbers (fraction, bytes per pipeline rank), and a share of the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from megatron_offload.core.profile import GroupKey, StepProfile


class KeepRules(NamedTuple):
    """All groups are offloaded, less what these numbers keep."""

    fraction: float = 1.0
    """Share of each chunk's groups that is offloaded, earliest first, in [0, 1]."""
    keep_bytes: int = 0
    """What is kept on the device besides, of the groups whose backward comes first, because they
    are gone soonest anyway. Megatron has rank times ``delta_offload_bytes_across_pp_ranks``."""
    ratio: float | None = None
    """In place of both the share of all bytes that is offloaded, earliest first."""

    def plan(self, profile: StepProfile) -> dict[GroupKey, str]:
        """Return the groups that are kept on the device, each with the reason."""
        kept: dict[GroupKey, str] = {}
        moving = {group.key: group.num_bytes for group in profile.groups if group.num_bytes > 0}
        if self.ratio is not None:
            wanted_bytes, seen_bytes = self.ratio * sum(moving.values()), 0
            for key, num_bytes in moving.items():
                seen_bytes += num_bytes
                if seen_bytes > wanted_bytes:
                    kept[key] = f"behind the first {self.ratio:g} of all bytes"
            return kept
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
                kept[key] = f"the fraction that may be offloaded is {self.fraction:g}"
        return kept
