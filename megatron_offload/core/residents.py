"""Which groups never leave the device, when there is room for some bytes at a time."""

from __future__ import annotations

import heapq

from megatron_offload.core.profile import GroupKey, StepProfile


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
