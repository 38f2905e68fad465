"""One training step as it runs: its groups, and what is done about each at its boundaries.

Owns the groups that were committed, the positions of chunks, and the decision to keep a group or to
offload it. Must not know the current chunk, hooks, or whether a call was cut short: its manager
does, which holds the lock whenever it calls.

Invariant: a group counts against the budget while it belongs to this step, and no longer; graphs
may outlive theirs. Read next: `megatron_offload.engine.transfers`, and
`megatron_offload.core.prefetch` for what comes back next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from megatron_offload.core.prefetch import Prefetcher
from megatron_offload.core.profile import GroupProfile, StepProfile
from megatron_offload.engine.checking import leaks_of
from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.learning import Learner
from megatron_offload.engine.stats import StepStats
from megatron_offload.engine.transfers import Transfers

__all__ = ["Step"]

_logger = logging.getLogger(__name__)

_TOO_SMALL = "smaller than what moves (min_tensor_bytes, min_tensor_elements)"


class Step:
    """The step of one manager; `begin` makes it the next.

    Args:
        transfers: moves groups.
        prefetcher: knows the groups whose forward has begun, and says what comes back next.
        learner: says which groups stay, and learns from the step when it is over.

    Attributes:
        committed: the groups whose forward is over, in order.
        num_chunks: chunks with a group, so far.
    """

    def __init__(
        self, transfers: Transfers, prefetcher: Prefetcher[OffloadGroup], learner: Learner
    ) -> None:
        self.committed: list[OffloadGroup] = []
        self.num_chunks = 0
        self._transfers = transfers
        self._window = transfers.window
        self._budget = transfers.budget
        self._prefetcher = prefetcher
        self._learner = learner

    def begin(self) -> None:
        """Forget the last step's groups and count from zero."""
        for group in self._prefetcher.groups():
            if next(group.blocks(), None) is None:
                group.unhook()
            group.chunk.forget_groups()
        self.committed = []
        self.num_chunks = 0
        self._transfers.begin_step(StepStats())
        self._budget.begin_step(is_learned=self._learner.profile is not None)
        self._prefetcher.begin_step(self._learner.profile)

    def add_chunk(self) -> int:
        """Count a chunk that has got its first group; return its position."""
        position = self.num_chunks
        self.num_chunks += 1
        if position == 0:
            self._learner.note_start()
        return position

    @property
    def has_backward(self) -> bool:
        """Whether a backward has reached a group."""
        return bool(self._prefetcher.backward_order)

    @property
    def num_backwards(self) -> int:
        """Groups that a backward has reached, so far."""
        return len(self._prefetcher.backward_order)

    def is_idle(self) -> bool:
        """Whether no graph is left, and nothing saved."""
        groups = list(self._prefetcher.groups())  # another thread may ask, and be refused
        return not any(next(group.blocks(), None) is not None for group in groups)

    def finish(self, *, names_leaks: bool) -> StepStats:
        """Release what is in flight and return the counters.

        Args:
            names_leaks: list and warn of the groups that still hold memory.
        """
        self._window.drain()
        stats = self._transfers.stats
        if names_leaks:
            stats.leaks = leaks_of(self._prefetcher.groups())
            if stats.leaks:
                found = "\n".join(stats.leaks)
                _logger.warning("the step has ended and memory is still held:\n%s", found)
        return stats

    def abandon(self) -> None:
        """Take everything from the groups: after a failed step."""
        self._transfers.abandon(self._prefetcher.groups())
        for group in self._prefetcher.groups():
            if group.state is not GroupState.DONE:
                group.advance(GroupState.DONE)

    def profile(self) -> StepProfile:
        """Return what the step has shown."""
        return StepProfile(
            groups=tuple(
                GroupProfile(
                    g.key,
                    g.name,
                    g.num_bytes,
                    g.committed_at_bytes,
                    g.elsewhere_bytes,
                    shared_bytes=g.shared_bytes,
                )
                for g in self.committed
            ),
            backward_order=tuple(self._prefetcher.backward_order),
            backward_at_bytes=tuple(self._prefetcher.backward_at_bytes),
        )

    # Boundaries

    def commit(
        self,
        group: OffloadGroup,
        forced_released_tensors: Iterable[torch.Tensor],
        stays_because: str,
        *,
        must_move: bool = False,
    ) -> None:
        """Decide about a group whose forward is over, and issue its copies.

        Args:
            group: the group.
            forced_released_tensors: their storage is emptied at the release, if it is copied.
            stays_because: why no group moves; empty where groups may.
            must_move: issue them whatever the policy says.
        """
        transfers, window = self._transfers, self._window
        prefetcher, learner = self._prefetcher, self._learner
        group.num_bytes = transfers.movable_bytes(group)
        group.committed_at_bytes = window.step_bytes
        self.committed.append(group)
        group.chunk.committed.append(group)
        stays_because = "" if must_move else stays_because or learner.keeps_because(group.key)
        may_stay = not must_move
        self._budget.add_saved(
            group.passing_bytes,
            0 if stays_because else group.num_bytes,
            is_learned=learner.profile is not None,
        )
        if group.small_bytes:
            transfers.stats.of(group.name).keep(group.small_bytes, _TOO_SMALL)
        if group.num_bytes == 0:
            group.advance(GroupState.RESIDENT)
        elif stays_because:
            self._keep(group, stays_because)
        elif may_stay and group.key in learner.residents:
            self._keep(group, "its backward follows soonest, and the resident room takes it")
            self._budget.resident_bytes += group.num_bytes
            group.is_resident = True
        elif may_stay and group.chunk.chooses is None and prefetcher.is_needed_soon(group):
            self._keep(group, "backward needs it before it could leave and come back")
            group.hold()
        else:
            for tensor in forced_released_tensors:
                _force_release(group, tensor)
            transfers.offload(group)
            if group.chunk.max_inflight_groups is not None:
                window.limit_groups(group.name, group.chunk.max_inflight_groups)
            if group.chunk.max_inflight_blocks is not None:
                window.limit_blocks(group.chunk.max_inflight_blocks)
        transfers.stats.of(group.name).num_groups += 1
        window.pass_boundary(group.passing_bytes)
        prefetcher.advance()

    def _keep(self, group: OffloadGroup, reason: str) -> None:
        self._transfers.count_kept(group, reason)
        group.advance(GroupState.RESIDENT)

    def enter_backward(self, group: OffloadGroup) -> None:
        """Backward has reached a group's end: bring it back if no one did, and look ahead."""
        transfers, prefetcher = self._transfers, self._prefetcher
        is_known = prefetcher.knows(group)
        if is_known and self._budget.end_warmup():
            self._learner.note_first_backward()
            self._window.release_over_budget()
        has_moved = is_known and prefetcher.enter_backward(group)
        if group.state is GroupState.ON_HOST:
            stats = transfers.stats
            stats.num_late_reloads += 1
            stats.of(group.name).num_late_reloads += 1
            transfers.reload(group)
            if is_known:
                group.hold()
        elif group.state is GroupState.OFFLOADING:
            transfers.stats.num_early_returns += 1
            self._window.keep_resident(group)
        transfers.owners.learn(group)
        if has_moved:
            prefetcher.advance()

    def leave_backward(self, group: OffloadGroup) -> None:
        """Backward has left a group."""
        group.unhook()
        if group.state is not GroupState.DONE:
            group.advance(GroupState.DONE)
            group.drop_dead_blocks()
            if self._prefetcher.knows(group):
                group.let_go()
                self._budget.drop_saved(group.passing_bytes)
                if group.is_resident:
                    self._budget.resident_bytes -= group.num_bytes
                self._window.pass_boundary(group.passing_bytes)
        self._prefetcher.advance()


def _force_release(group: OffloadGroup, tensor: torch.Tensor) -> None:
    block = group.chunk.find_block(tensor.untyped_storage()._cdata)
    if block is not None and not block.released and any(b is block for b in group.blocks()):
        block.forced_release = True
