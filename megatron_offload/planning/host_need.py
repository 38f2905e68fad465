"""How much pinned host memory the coming steps will need, judged by the last ones.

Pinning is slow (seconds for tens of GiB) and unpinning waits for the device, so neither may happen
again and again. What the largest of the last steps used stays; only what none of them needed goes,
and only if it is a good part of the whole. Each time the memory was wanted back after all, twice as
many steps are looked at: lengths that alternate, or an evaluation now and then, soon stop it.
"""

from __future__ import annotations

import math
from collections import deque

_NUM_STEPS = 8
_MOST_STEPS = 512
_LEAST_SURPLUS_SHARE = 0.1


class HostNeed:
    """Says after each step what may be unpinned, of at least ``slab_bytes``."""

    def __init__(self, slab_bytes: int) -> None:
        self.num_steps = _NUM_STEPS
        self._slab_bytes = slab_bytes
        self._peaks: deque[int] = deque(maxlen=_MOST_STEPS)
        self._pinned_bytes = 0
        # What is pinned over what is used, where less was seen to be too little: free memory is
        # not all in one piece.
        self._overhead = 1.0
        self._has_cut = False
        self._vain_keep_bytes: int | None = None

    def keep_bytes(
        self, peak_bytes: int, pinned_bytes: int, *, at_once: bool = False
    ) -> int | None:
        """Return how much to keep pinned after a step; None where nothing is worth giving back.

        With ``at_once`` this step alone counts, as those before it are no guide.
        """
        self._note(peak_bytes, pinned_bytes)
        if not at_once and len(self._peaks) < self.num_steps:
            return None
        needed_bytes = peak_bytes if at_once else self._needed_bytes()
        keep_bytes = math.ceil(needed_bytes * self._overhead)
        surplus_bytes = pinned_bytes - keep_bytes
        is_much = at_once or surplus_bytes > _LEAST_SURPLUS_SHARE * pinned_bytes
        is_vain = self._vain_keep_bytes is not None and keep_bytes >= self._vain_keep_bytes
        return keep_bytes if surplus_bytes >= self._slab_bytes and is_much and not is_vain else None

    def _note(self, peak_bytes: int, pinned_bytes: int) -> None:
        before_bytes, self._pinned_bytes = self._pinned_bytes, pinned_bytes
        self._peaks.append(peak_bytes)
        if pinned_bytes == before_bytes:
            return
        self._vain_keep_bytes = None
        if pinned_bytes > before_bytes and self._has_cut:
            self._has_cut = False
            self.num_steps = min(2 * self.num_steps, _MOST_STEPS)
        needed_bytes = self._needed_bytes()
        if pinned_bytes > before_bytes >= needed_bytes > 0:
            self._overhead = max(self._overhead, pinned_bytes / needed_bytes)

    def note_cut(self, keep_bytes: int, pinned_bytes: int, *, at_once: bool = False) -> None:
        """Take note of what is left after an attempt to come down to ``keep_bytes``."""
        if pinned_bytes == self._pinned_bytes:
            self._vain_keep_bytes = keep_bytes  # no slab was small enough, or free
        elif not at_once:
            self._has_cut = True
        self._pinned_bytes = pinned_bytes

    def _needed_bytes(self) -> int:
        return max(list(self._peaks)[-self.num_steps :])
