"""How many bytes of saved tensors may lie on the device between a group's commit and its backward.

Owns two limits and what counts against them: bytes *in flight* (copied or being copied to the
host, memory still held) and bytes *held* for a backward that is near (reloaded, or not offloaded).
Both share one total: what the latter leave of it, bytes in flight may take.
"""

from __future__ import annotations

# [Note: limits that don't fall] A default limit follows the largest step so far. A step of fewer or
# shorter microbatches may fit into it whole, and offloads nothing then: it holds no more than the
# larger one does, so the run's peak is what it was, and it has no copies to wait for. Limits that
# fell with it would have the next large step wait in its first microbatches.

_AUTO_SHARE = 8
"""A limit that is not set is this fraction of what a step has saved at its peak."""

_GROUP_SHARE = 4
"""A group that is cut by size has at most this fraction of both limits, if both are set."""

_MOST_GROUP_BYTES = 64 * 1024**2
"""A copy of so much takes longer than the host needs for a group, so that more gains nothing."""


class DeviceBudget:
    """Limits and counts, in bytes.

    Each limit is the user's; else the default, which follows the step.
    ``total_bytes`` is both together, and ``lookahead_bytes`` how far ahead, by the step's clock,
    what is on the host is looked at for its reload: twice what may be reloaded, since backward of
    one half hides the reload of the other. A group that is cut by size has ``most_group_bytes`` at
    most. It ``is_warming_up`` until the first backward of a step that was seen before.
    """

    def __init__(
        self, max_inflight_bytes: int | None = None, prefetch_bytes: int | None = None
    ) -> None:
        self._user = max_inflight_bytes, prefetch_bytes
        self.most_group_bytes = _MOST_GROUP_BYTES
        if max_inflight_bytes is not None and prefetch_bytes is not None:
            share_bytes = (max_inflight_bytes + prefetch_bytes) // _GROUP_SHARE
            self.most_group_bytes = min(share_bytes, _MOST_GROUP_BYTES)
        self.inflight_bytes = self.held_bytes = 0
        self._saved_bytes = self._peak_saved_bytes = self._largest_bytes = 0
        self._follow_step(0)
        self.is_warming_up = False

    # Who sets the limits

    def restart(self) -> None:
        """Let the default follow the steps to come alone."""
        self._peak_saved_bytes = self._saved_bytes

    def _follow_step(self, seen_bytes: int) -> None:
        """Put the user's limits in force, or what a step asks for that has saved so much."""
        share_bytes, largest_bytes = seen_bytes // _AUTO_SHARE, self._largest_bytes
        inflight_bytes, prefetch_bytes = self._user
        if inflight_bytes is None:
            inflight_bytes = max(largest_bytes, share_bytes)
        if prefetch_bytes is None:  # two: one of them is in use while the next is reloaded
            prefetch_bytes = max(2 * largest_bytes, share_bytes)
        self.max_inflight_bytes, self.prefetch_bytes = inflight_bytes, prefetch_bytes
        self.total_bytes = total = self.max_inflight_bytes + self.prefetch_bytes
        self.lookahead_bytes = min(2 * self.prefetch_bytes or total, total)

    @property
    def clock_runs(self) -> bool:
        """Whether a copy is due once groups of ``total_bytes`` have passed since its issue.

        Until a step's first backward only where the limits follow the step.
        """
        return self._user[0] is None or not self.is_warming_up

    def is_exceeded(self) -> bool:
        """Whether something in flight has to be released."""
        return self.inflight_bytes + self.held_bytes > self.total_bytes

    def may_prefetch(self, num_bytes: int) -> bool:
        """Whether a group of this size may be reloaded now; one is always allowed."""
        return self.held_bytes == 0 or self.held_bytes + num_bytes <= self.prefetch_bytes

    def may_keep(self, num_bytes: int) -> bool:
        """Whether a group of this size, still on the device, may wait there for its backward."""
        return self.held_bytes + num_bytes <= self.total_bytes

    # What the step could offload

    def begin_step(self, *, is_learned: bool = True) -> None:
        """Count from zero; where a step ``is_learned``, this one's first backward will be known."""
        self.held_bytes = 0
        self.is_warming_up = is_learned
        self._saved_bytes = 0
        if not is_learned:
            self._follow_step(0)

    def add_saved(self, num_bytes: int, moving_bytes: int, *, is_learned: bool) -> None:
        """Note a committed group, of which ``moving_bytes`` may be offloaded, and adapt the limits.

        Where a step ``is_learned``, the peak so far is a step's.
        """
        self._saved_bytes += num_bytes
        has_grown = False
        if self._saved_bytes > self._peak_saved_bytes:
            self._peak_saved_bytes, has_grown = self._saved_bytes, is_learned
        if moving_bytes > self._largest_bytes:
            self._largest_bytes, has_grown = moving_bytes, True
        if has_grown:
            self._follow_step(self._peak_saved_bytes if is_learned else 0)

    def learn(self, largest_bytes: int) -> None:
        """Follow the step that is over; ``largest_bytes`` is the largest that is offloaded next."""
        self._largest_bytes = largest_bytes
        self._follow_step(self._peak_saved_bytes)

    def drop_saved(self, num_bytes: int) -> None:
        """Note that backward has left a group."""
        left_bytes = self._saved_bytes - num_bytes
        self._saved_bytes = left_bytes if left_bytes > 0 else 0  # a backward may come twice
