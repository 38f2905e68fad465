"""Which groups of a steady step are skipped: nothing of them is recorded, as if unmarked.

To record a group takes the host's time, be it to offload it or to keep it. What is kept anyway
needs no record, unless something else of the step depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from megatron_offload.core.profile import GroupKey, GroupProfile, StepProfile


def skipped_groups(
    profile: StepProfile,
    kept: Collection[GroupKey],
    shared: Sequence[tuple[GroupKey, GroupKey]],
    lookahead_bytes: int,
    total_bytes: int,
) -> dict[GroupKey, GroupProfile]:
    """Return the groups that need not be recorded in a step like this one.

    Recorded are those that are offloaded, those of which something is recomputed or that something
    is made from, and what shares memory with any of these: an unrecorded tensor keeps
    it. So is the first of each chunk: until its backward is over the chunk's graph is alive. And
    copies are released and asked for at boundaries, so behind what is offloaded there is one now
    and then, and at the end of its chunk.

    Args:
        profile: a step whose groups were all recorded.
        kept: the groups that are kept by choice.
        shared: pairs of groups that have saved the same memory.
        lookahead_bytes: how far ahead of its use what is offloaded is reloaded: no farther apart
            are the boundaries behind it.
        total_bytes: how far behind its issue a copy is released: none is needed later.
    """
    recorded = {group.key for group in profile.groups if group.key not in kept}
    last = {group.key.chunk: group.key for group in sorted(profile.groups)}
    for group in profile.groups:
        if group.key.order == 0 or group.recomputed:
            recorded.update((group.key, *group.needs))
    num_recorded = 0
    while num_recorded < len(recorded):
        num_recorded = len(recorded)
        recorded.update(*(pair for pair in shared if not recorded.isdisjoint(pair)))
    skipped: dict[GroupKey, GroupProfile] = {}
    skipped_bytes, moved_ago_bytes = 0.0, math.inf
    for group in profile.groups:
        skipped_bytes += group.num_bytes
        is_far = skipped_bytes > lookahead_bytes or group.key == last[group.key.chunk]
        is_due = is_far and moved_ago_bytes <= total_bytes
        moved_ago_bytes = moved_ago_bytes + group.num_bytes if group.key in kept else 0
        if group.key in recorded or is_due:
            skipped_bytes = 0
        else:
            skipped[group.key] = group
    return skipped
