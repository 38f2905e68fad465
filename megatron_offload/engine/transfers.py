"""The copies: when they are issued, and the waits that order them.

Owns every copy of the package, and five of the six waits, one call each; W2 is in
`megatron_offload.engine.release`.

Invariant: what something else keeps on the device is neither reloaded nor, from the next step on,
copied at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron_offload.backends.base import Backend, Event, Pair, Wait
from megatron_offload.core.window import InFlightWindow
from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.guard import Guard, guarded
from megatron_offload.engine.host_copies import HostCopies
from megatron_offload.engine.observer import Observer
from megatron_offload.engine.owners import ForeignOwners
from megatron_offload.engine.release import Sources
from megatron_offload.engine.saved_tensor import Block, Reload, _Remains
from megatron_offload.engine.stats import StepStats
from megatron_offload.errors import StateError
from megatron_offload.memory.host_pool import HostRegion
from megatron_offload.memory.storage import num_owners
from megatron_offload.memory.tensor_pool import TensorPool

__all__ = ["Transfers"]

_Target = tuple[torch.Tensor, Event | None]
"""What a block comes back to, and who used that memory last."""


class Transfers:
    """Moves blocks between device and host for all groups of one manager.

    Args:
        backend: streams, events and copies.
        host_copies: where offloaded bytes live.
        tensor_pool: where reloaded bytes live.
        sources: holds what is copied to the host.
        window: says when it is released, as its budget says.
        guard: held by whoever calls; `keep` and `ready_target` take it themselves.
        observers: are told of copies and waits.
    """

    def __init__(
        self,
        backend: Backend,
        host_copies: HostCopies,
        tensor_pool: TensorPool,
        sources: Sources,
        window: InFlightWindow[OffloadGroup],
        guard: Guard,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.backend = backend
        self.guard = guard
        self.host_copies = host_copies
        self.tensor_pool = tensor_pool
        self.sources = sources
        self.window = window
        self.budget = sources.budget
        self.stats = StepStats()
        self.observers = observers
        self.owners = ForeignOwners()

    # Device to host

    def movable_bytes(self, group: OffloadGroup) -> int:
        """Return what moving a group would copy; count what stays by choice, or is kept anyway."""
        num_bytes = 0
        for block in group.blocks():
            if block.d2h is not None:
                continue
            if block.stays:
                group.staying_bytes += block.num_bytes
                self._count_kept(group, block, "beyond the share that moves")
                continue
            group.shared_bytes += block.counted_bytes
            block.counted_bytes = block.num_bytes
            if self.owners.knows(block):
                group.elsewhere_bytes += block.num_bytes
                self.stats.held_elsewhere_bytes += block.num_bytes
            else:
                num_bytes += block.num_bytes
        return num_bytes

    def stay(self, group: OffloadGroup, reason: str) -> None:
        """Leave a group on the device, and count the blocks of it that could move."""
        group.advance(GroupState.RESIDENT)
        for block in group.blocks():
            if block.d2h is None and not block.stays and not self.owners.knows(block):
                self._count_kept(group, block, reason)

    def _count_kept(self, group: OffloadGroup, block: Block, reason: str) -> None:
        """Count a block as kept, but for what a group before this has counted of it."""
        num_bytes = block.num_bytes - block.kept_bytes
        if num_bytes:
            block.kept_bytes = block.num_bytes
            self.stats.of(group.name).keep(num_bytes, reason)

    def offload(self, group: OffloadGroup) -> None:
        """Issue the copies of a group's blocks that no one has moved yet.

        A block for which the host has no room stays on the device. Moves the group to OFFLOADING,
        or to RESIDENT where nothing is left to move.
        """
        backend = self.backend
        label = self._label(group)
        issued: list[Block] = []
        pairs = []
        reused: dict[int, Event] = {}
        produced: dict[int, Event] = {}
        is_ready = True
        pool_stats = self.host_copies.pool.stats
        num_unpinnable = pool_stats.num_unpinnable
        for block in group.blocks():
            if block.d2h is not None or block.stays or self.owners.knows(block):
                continue
            host = self.host_copies.take(block)
            if host is None:
                self.stats.num_refused_blocks += 1
                self.stats.refused_bytes += block.num_bytes
                self._count_kept(group, block, "the host memory is full")
                continue
            pair = _offload_pair(block, host)
            block.address = pair[1].data_ptr() - block.low
            if host.ready_event is not None:
                reused[id(host.ready_event)] = host.ready_event
            if block.ready is None:
                is_ready = False
                if backend.observes:
                    backend.note_produced(pair[1], label)
            else:
                produced[id(block.ready)] = block.ready
            for observer in self.observers:
                observer.block_leaves(block, pair[1])
            pairs.append(pair)
            issued.append(block)
        self.stats.num_unpinnable_blocks += pool_stats.num_unpinnable - num_unpinnable
        if not issued:
            group.advance(GroupState.RESIDENT)
            return
        d2h_stream = backend.d2h_stream
        if not is_ready:
            backend.wait_compute(d2h_stream, Wait.W1)
        for event in produced.values():
            backend.wait(d2h_stream, event, Wait.W1)
        for event in reused.values():
            backend.wait(d2h_stream, event, Wait.W5)
        for observer in self.observers:
            observer.copy_starts("d2h")
        d2h = backend.copy(pairs, d2h_stream, label)
        for observer in self.observers:
            observer.copy_issued("d2h", pairs, group)
        num_bytes = self.sources.hold(group, issued, d2h)
        self.window.add(group, len(issued))
        self.stats.of(group.name).offloaded_bytes += num_bytes
        group.advance(GroupState.OFFLOADING)

    def cancel(self, group: OffloadGroup, *, is_late: bool) -> None:
        """Leave a group on the device whose copies are in flight; see `Actions`."""
        self.stats.num_early_returns += is_late
        self.sources.keep_resident(group)

    @guarded
    def keep(self, block: Block) -> None:
        """Keep a block on the device for a reader who is there before its release."""
        self.sources.keep(block)

    # Host to device

    def reload(self, group: OffloadGroup, *, is_late: bool) -> bool:
        """Issue the reload of a group that is on the host.

        Args:
            group: what comes back.
            is_late: it is needed now; else it may stay where the device has no memory for it.

        Returns:
            Whether it comes back.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
        """
        if is_late:
            self.stats.num_late_reloads += 1
            self.stats.of(group.name).num_late_reloads += 1
        moving = self._to_reload(group.blocks())
        targets = self._take_targets(moving, may_fail=not is_late)
        if targets is None:
            return False
        group.advance(GroupState.RELOADING)
        self._issue_reload(targets, moving, group)
        return True

    def _to_reload(self, blocks: Iterable[Block]) -> list[Block]:
        """Return the blocks that have to come back by a copy."""
        return [b for b in blocks if b.host is not None and b.released and not self._revive(b)]

    def _take_targets(self, blocks: list[Block], *, may_fail: bool) -> list[_Target] | None:
        """Allocate what blocks come back to; None where that may fail and does."""
        targets = self._try_targets(blocks)
        if targets is not None:
            return targets
        # What is in flight is the only memory that is the engine's to give.
        self.stats.num_memory_shortages += 1
        self.window.drain()
        if may_fail:
            return self._try_targets(blocks)
        return [self.tensor_pool.allocate(block.num_bytes, block.like) for block in blocks]

    def _try_targets(self, blocks: list[Block]) -> list[_Target] | None:
        targets: list[_Target] = []
        try:
            for block in blocks:
                targets.append(self.tensor_pool.allocate(block.num_bytes, block.like))
        except torch.OutOfMemoryError:
            for target, _ in targets:
                self.tensor_pool.free(target)
            return None
        return targets

    def _issue_reload(
        self, targets: list[_Target], blocks: list[Block], group: OffloadGroup
    ) -> None:
        if not blocks:
            return
        backend = self.backend
        pairs = []
        written: dict[int, Event] = {}
        ready: dict[int, Event] = {}
        fresh = False
        for block, (target, last_use) in zip(blocks, targets, strict=True):
            assert block.host is not None
            if last_use is None:
                fresh = True
            else:
                ready[id(last_use)] = last_use
            written[id(block.d2h)] = block.d2h
            # What is kept for reuse has no shape of its own.
            is_flat = block.like is None or target.dtype is not block.like[1]
            pairs.append((target, block.host.tensor if is_flat else block.host.shaped_tensor))
            for observer in self.observers:
                observer.tensor_reloaded(target)
        h2d_stream = backend.h2d_stream
        if fresh:
            backend.wait_compute(h2d_stream, Wait.W6)
        for event in ready.values():
            backend.wait(h2d_stream, event, Wait.W6)
        for event in written.values():
            backend.wait(h2d_stream, event, Wait.W3)
        for observer in self.observers:
            observer.copy_starts("h2d")
        reload = Reload(backend.copy(pairs, h2d_stream, self._label(group)))
        for observer in self.observers:
            observer.copy_issued("h2d", pairs, group)
        num_bytes = own_bytes = 0
        for block, (target, _) in zip(blocks, targets, strict=True):
            block.reload = reload
            block.target = target  # from here on this is the copy that counts
            num_bytes += block.num_bytes
            if block.group is group:
                own_bytes += block.num_bytes
                self.host_copies.give_back(block, reload.event)
            else:
                self.host_copies.free(block, reload.event)
        self.host_copies.remove(group.name, own_bytes, were_away=True)
        self.stats.of(group.name).reloaded_bytes += num_bytes

    def _revive(self, block: Block) -> bool:
        """Take a block's bytes from its source where something else has kept that alive.

        They are the bytes that autograd alone would have used, whoever may have written to them
        since.
        """
        source = block.live_source()
        if source is None:
            return False
        block.target = source
        self.host_copies.free(block, None)
        self.stats.held_elsewhere_bytes += block.num_bytes
        return True

    def wait_reloads(self, groups: Iterable[OffloadGroup]) -> None:
        """Make the compute stream wait for the reloads of these groups that are under way."""
        for group in groups:
            for block in group.blocks():
                if block.target is not None:
                    self._wait_reloaded(block)

    def is_ready(self, block: Block) -> bool:
        """Whether there is nothing left for `ready_target` to do; only looks, so takes no lock."""
        reload = block.reload
        return (
            not self.observers
            and not self.backend.observes
            and (reload is None or self.backend.compute_stream_key() in reload.waited_keys)
        )

    @guarded
    def ready_target(self, block: Block) -> torch.Tensor:
        """Return a released block's reload target, ordered before what the program does next.

        Reloads on the spot where no one did before: the whole group if it is on the host.

        Raises:
            StateError: the data went with a step that was aborted.
            CorruptionError: in checking mode, other bits came back than left.
            torch.OutOfMemoryError: the device has no memory for it.
        """
        if block.target is None:
            group = block.group
            if block.host is None:
                raise StateError(
                    f"group {group.label} was saved in a step that was aborted; its data is gone, "
                    "run the forward again"
                )
            if group.state is GroupState.ON_HOST:
                self.reload(group, is_late=True)
            if block.target is None:
                moving = self._to_reload([block])
                targets = self._take_targets(moving, may_fail=False)
                assert targets is not None
                self._issue_reload(targets, moving, group)
        assert block.target is not None
        self._wait_reloaded(block)
        if self.backend.observes:
            self.backend.note_consumed(block.target, block.group.label)
        for observer in self.observers:
            observer.block_read(block, block.target)
        return block.target

    def _wait_reloaded(self, block: Block) -> None:
        if block.reload is not None:  # else it never left the device
            self._wait(block.reload, block.group)
        if block.group.state is GroupState.RELOADING:
            block.group.advance(GroupState.RELOADED)

    def _wait(self, reload: Reload, group: OffloadGroup) -> None:
        key = self.backend.compute_stream_key()
        if key not in reload.waited_keys:
            for observer in self.observers:
                observer.wait_starts()
            self.backend.wait(self.backend.compute_stream(), reload.event, Wait.W4)
            for observer in self.observers:
                observer.wait_issued(Wait.W4, group)
            reload.waited_keys.append(key)

    # The end of a block

    def forget(self, block: Block | _Remains) -> None:
        """Give back what a block holds that no one will read any more."""
        if block.host is not None:
            self.host_copies.free(block, None)
        if block.target is not None:
            target, block.target = block.target, None
            reload = block.reload
            if reload is None:
                return
            if not reload.waited_keys:
                # Nobody read it; still the copy must not write into memory that was handed on.
                self._wait(reload, block.group)
            if self.backend.observes:
                sole_owner = num_owners(target.untyped_storage()) == 2  # target and the handle
                self.backend.note_freed(target, block.group.label, sole_owner=sole_owner)
            self.tensor_pool.free(target)

    def abandon(self, groups: Iterable[OffloadGroup]) -> None:
        """Take everything from these groups, and count anew what is left: after a failed step.

        Nothing is assumed of the books: any line that changes them may have been the last that ran.
        """
        self.backend.sync_copies()
        self.window.abandon()
        self.sources.abandon()
        for group in groups:
            # A failed backward may leave its graph alive for long: its data goes now.
            for block in group.blocks():
                block.cancelled = True
                block.source = block.host = None
                if block.reload is not None:
                    block.target = None
        self.tensor_pool.recover()
        self.host_copies.recover()

    def begin_step(self, stats: StepStats) -> None:
        """Count into ``stats`` from here on; what is still on the host stays counted."""
        self.stats = stats
        self.host_copies.begin_step(stats)

    @property
    def host_bytes(self) -> int:
        """Bytes held on the host now."""
        return self.host_copies.host_bytes

    def _label(self, group: OffloadGroup) -> str:
        """Name a group for its copies; in full only where someone reads it."""
        return group.label if self.backend.observes else group.name


def _offload_pair(block: Block, host: HostRegion) -> Pair:
    """Return where a block goes, and its source."""
    source = block.aliases[0]
    if block.like is not None:
        return host.like(source), source  # much the most frequent, and needs no new view
    view = torch.empty(0, dtype=torch.uint8, device=source.device)
    view.set_(source.untyped_storage(), block.low, (block.num_bytes,), (1,))
    return host.tensor, view
