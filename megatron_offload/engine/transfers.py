"""The copies: when they are issued, when memory is released, and the six waits that order them.

Owns the in-flight window (copies issued, device memory still held) and every `Backend.wait` of the
package, one call each. Must not know autograd, chunks' order, or why a group moves.

Release without ``record_stream``: a source is held until a known later point of the program, where
the compute stream waits for its copy and the last reference is dropped. The caching allocator can
hand the memory on at once, in stream order, and does so the same way in every run.

Invariants: the window is released in the order of issue, so one wait covers all before it. What
something else keeps on the device is neither reloaded nor, from the next step on, copied at all.
Read next: `megatron_offload.backends.base` for the contract, `megatron_offload.planning.prefetch`
for who reloads when.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_offload.backends.base import Backend, Event, Pair, Wait
from megatron_offload.engine import checking
from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.guard import Guard, guarded
from megatron_offload.engine.owners import ForeignOwners, num_owners
from megatron_offload.engine.saved_tensor import Block, BlockRef, Reload, _Remains
from megatron_offload.engine.stats import HostLedger, StepStats, TensorObserver
from megatron_offload.errors import StateError
from megatron_offload.memory.host_pool import HostPool, HostRegion
from megatron_offload.memory.tensor_pool import TensorPool
from megatron_offload.planning.budget import DeviceBudget

__all__ = ["Transfers"]

_Target = tuple[torch.Tensor, Event | None]
"""What a block comes back to, and who used that memory last."""


class _Source:
    """The device memory of a block whose copy to the host is issued."""

    __slots__ = ("aliases", "block", "num_bytes", "storage_key")

    def __init__(self, block: Block) -> None:
        self.block: BlockRef = weakref.ref(block)
        # Holding the aliases keeps the memory even where the graph is dropped before its copy ends.
        self.aliases = block.aliases
        self.storage_key = block.storage_key
        self.num_bytes = block.num_bytes


class _InFlight:
    """A group whose copy to the host is issued and whose device memory is still held."""

    __slots__ = ("d2h", "due_bytes", "group", "sources")

    def __init__(self, group: OffloadGroup, d2h: Event, due_bytes: int, sources: list[_Source]):
        self.group = group
        self.d2h = d2h
        self.due_bytes = due_bytes
        self.sources = sources


class Transfers:
    """Moves blocks between device and host for all groups of one manager.

    Args:
        backend: streams, events and copies.
        host_pool: where offloaded bytes live.
        tensor_pool: where reloaded bytes live.
        budget: how much device memory copies in flight may hold.
        guard: held by whoever calls; `keep` and `ready_target` take it themselves.
    """

    def __init__(
        self,
        backend: Backend,
        host_pool: HostPool,
        tensor_pool: TensorPool,
        budget: DeviceBudget,
        guard: Guard,
    ) -> None:
        self.backend = backend
        self.guard = guard
        self.host_pool = host_pool
        self.tensor_pool = tensor_pool
        self.budget = budget
        self.stats = StepStats()
        self.observer: TensorObserver | None = None
        self.checks = False
        """Whether what comes back is compared with what left."""
        self._window: deque[_InFlight] = deque()
        self._copies_in_flight: dict[int, int] = {}
        """By storage: different parts of one may be saved, and copied, by different groups."""
        self._passed_bytes = 0
        self._step_began_at_bytes = 0
        self.owners = ForeignOwners()
        self.ledger = HostLedger()
        self._empty: torch.Tensor | None = None

    # Device to host

    def movable_bytes(self, group: OffloadGroup) -> int:
        """Return what moving a group would copy; count what something else keeps anyway."""
        num_bytes = 0
        for block in group.blocks():
            if block.d2h is not None or block.stays:
                continue
            group.shared_bytes += block.counted_bytes
            block.counted_bytes = block.num_bytes
            if self.owners.knows(block):
                group.elsewhere_bytes += block.num_bytes
                self.stats.held_elsewhere_bytes += block.num_bytes
            else:
                num_bytes += block.num_bytes
        return num_bytes

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
        is_ready = not self.checks  # a checksum is work of the compute stream, and comes now
        pool_stats = self.host_pool.stats
        num_unpinnable = pool_stats.num_unpinnable
        for block in group.blocks():
            if block.d2h is not None or block.stays or self.owners.knows(block):
                continue
            host = self.host_pool.allocate(block.num_bytes)
            if host is None:
                self.stats.num_refused_blocks += 1
                self.stats.refused_bytes += block.num_bytes
                self.stats.of(group.name).keep(block.num_bytes, "the host memory is full")
                continue
            block.host = host
            host.owner = weakref.ref(block)
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
            if self.checks:
                checking.note_source(block, pair[1])
            pairs.append(pair)
            issued.append(block)
        self.stats.num_unpinnable_blocks += pool_stats.num_unpinnable - num_unpinnable
        if not issued:
            group.advance(GroupState.RESIDENT)
            return
        d2h_stream = backend.d2h_stream
        if not is_ready:
            now = backend.record(backend.compute_stream())
            produced[id(now)] = now
        for event in produced.values():
            backend.wait(d2h_stream, event, Wait.W1)
        for event in reused.values():
            backend.wait(d2h_stream, event, Wait.W5)
        backend.copy(pairs, d2h_stream, label)
        d2h = backend.record(d2h_stream)
        sources = []
        num_bytes = own_bytes = 0
        for block in issued:
            block.d2h = d2h
            block.source = _Source(block)
            sources.append(block.source)
            num_bytes += block.num_bytes
            if block.group is group:
                own_bytes += block.num_bytes
            else:
                self.ledger.add(block.group.name, block.num_bytes)
            key = block.storage_key
            self._copies_in_flight[key] = self._copies_in_flight.get(key, 0) + 1
        self.stats.of(group.name).offloaded_bytes += num_bytes
        self.ledger.add(group.name, own_bytes)
        self.budget.inflight_bytes += num_bytes
        due_bytes = self._passed_bytes + self.budget.limit_bytes
        self._window.append(_InFlight(group, d2h, due_bytes, sources))
        group.advance(GroupState.OFFLOADING)

    def pass_boundary(self, num_bytes: int) -> None:
        """Note that the program has gone by a group of this size; release what is due."""
        self._passed_bytes += num_bytes
        while self._window and self._window[0].due_bytes < self._passed_bytes:
            self._release_oldest()
        self.release_over_budget()

    def release_over_budget(self) -> None:
        """Release from the oldest on until the budget is kept."""
        while self._window and self.budget.is_exceeded():
            self._release_oldest()

    def limit_inflight(self, name: str, num_groups: int) -> None:
        """Release from the oldest on until at most ``num_groups`` of this name are in flight."""
        num_over = sum(entry.group.name == name for entry in self._window) - num_groups
        while num_over > 0:
            num_over -= self._release_oldest().group.name == name

    def limit_inflight_blocks(self, num_blocks: int) -> None:
        """Release from the oldest on until at most ``num_blocks`` blocks are in flight."""
        num_over = sum(len(entry.sources) for entry in self._window) - num_blocks
        while num_over > 0:
            num_over -= len(self._release_oldest().sources)

    def drain_window(self) -> None:
        """Release everything in flight, in order."""
        while self._window:
            self._release_oldest()

    def _release_oldest(self) -> _InFlight:
        backend = self.backend
        entry = self._window[0]
        backend.wait(backend.compute_stream(), entry.d2h, Wait.W2)
        self._window.popleft()
        group = entry.group
        own_bytes = 0
        for source in entry.sources:
            key = source.storage_key
            num_others = self._copies_in_flight.pop(key) - 1
            is_last = num_others == 0
            if not is_last:
                self._copies_in_flight[key] = num_others
            block = source.block()
            if block is None:
                self._free_source(source.aliases, group, is_last=is_last)
            elif not block.cancelled:
                self._release_block(block, is_last=is_last)
                if block.released and block.group is group:
                    own_bytes += block.num_bytes
                elif block.released:
                    self.ledger.release(block.group.name, block.num_bytes)
            self._count_landed(source)
        self.ledger.release(group.name, own_bytes)
        if group.state is GroupState.OFFLOADING:
            group.advance(GroupState.ON_HOST)
        return entry

    def _release_block(self, block: Block, *, is_last: bool) -> None:
        storage = block.aliases[0].untyped_storage()
        if storage.data_ptr() != block.address:
            # Someone emptied the storage meanwhile, so the copy may have read memory that was no
            # longer its own. Whoever did it restores the contents before backward.
            self.cancel(block)
            return
        chunk = block.group.chunk
        block.released = True  # from here on the host's copy is the one that counts
        sole_owner = self._free_source(block.aliases, block.group, is_last=is_last)
        is_emptied = block.forced_release and is_last
        if is_emptied:
            storage.resize_(0)
        if sole_owner or is_emptied:
            if chunk.find_block(block.storage_key) is block:
                del chunk.blocks[block.storage_key]
        else:
            block.storage_ref = StorageWeakRef(storage)

    def _free_source(
        self, aliases: list[torch.Tensor], group: OffloadGroup, *, is_last: bool
    ) -> bool:
        """Empty all aliases of one storage; return whether that was the last of its owners."""
        storage = aliases[0].untyped_storage()
        for alias in aliases:
            self.empty(alias)
        aliases.clear()
        sole_owner = num_owners(storage) == 1  # the Python handle of this frame
        if self.backend.observes and is_last:
            region = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.backend.note_freed(region, group.label, sole_owner=sole_owner)
        return sole_owner

    @guarded
    def keep(self, block: Block) -> None:
        """Keep a block on the device for a reader who is there before its release."""
        if block.d2h is not None and not block.cancelled and not block.released:
            self.cancel(block)

    def keep_resident(self, group: OffloadGroup) -> None:
        """Cancel the release of a group whose copies are in flight."""
        for block in group.blocks():
            if block.d2h is not None and not block.cancelled and not block.released:
                self.cancel(block)
        group.advance(GroupState.RESIDENT)

    def cancel(self, block: Block) -> None:
        """Keep a block whose copy is in flight on the device after all.

        Its source stays in the window until the copy is done, its host memory goes back now: the
        next copy into it is queued on the same stream.
        """
        block.cancelled = True
        self._free_host(block, None)
        if block.source is not None:
            self._count_landed(block.source)

    def _count_landed(self, source: _Source) -> None:
        """Count a source as in flight no longer; a second time changes nothing."""
        self.budget.inflight_bytes -= source.num_bytes
        source.num_bytes = 0

    # Host to device

    def reload(self, group: OffloadGroup, *, may_fail: bool = False) -> bool:
        """Issue the reload of a group that is on the host.

        Args:
            group: what comes back.
            may_fail: leave it on the host where the device has no memory for it.

        Returns:
            Whether it comes back.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
        """
        moving = self._to_reload(group.blocks())
        targets = self._take_targets(moving, may_fail=may_fail)
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
        self.drain_window()
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
            if self.observer is not None:
                self.observer.observe(target)
        h2d_stream = backend.h2d_stream
        if fresh:
            now = backend.record(backend.compute_stream())
            ready[id(now)] = now
        for event in ready.values():
            backend.wait(h2d_stream, event, Wait.W6)
        for event in written.values():
            backend.wait(h2d_stream, event, Wait.W3)
        backend.copy(pairs, h2d_stream, self._label(group))
        reload = Reload(backend.record(h2d_stream))
        num_bytes = own_bytes = 0
        for block, (target, _) in zip(blocks, targets, strict=True):
            block.reload = reload
            block.target = target  # from here on this is the copy that counts
            num_bytes += block.num_bytes
            if block.group is group:
                own_bytes += block.num_bytes
                self._give_back_host(block, reload.event)
            else:
                self._free_host(block, reload.event)
        self.ledger.remove(group.name, own_bytes, were_away=True)
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
        self._free_host(block, None)
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
            not self.backend.observes
            and block.checksum is None
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
                self.stats.num_late_reloads += 1
                self.stats.of(group.name).num_late_reloads += 1
                self.reload(group)
            if block.target is None:
                moving = self._to_reload([block])
                targets = self._take_targets(moving, may_fail=False)
                assert targets is not None
                self._issue_reload(targets, moving, group)
        assert block.target is not None
        self._wait_reloaded(block)
        if self.backend.observes:
            self.backend.note_consumed(block.target, block.group.label)
        if block.checksum is not None and block.reload is not None:
            checking.compare(block, block.target)
        return block.target

    def _wait_reloaded(self, block: Block) -> None:
        if block.reload is not None:  # else it never left the device
            self._wait(block.reload)
        if block.group.state is GroupState.RELOADING:
            block.group.advance(GroupState.RELOADED)

    def _wait(self, reload: Reload) -> None:
        key = self.backend.compute_stream_key()
        if key not in reload.waited_keys:
            self.backend.wait(self.backend.compute_stream(), reload.event, Wait.W4)
            reload.waited_keys.append(key)

    # The end of a block

    def forget(self, block: Block | _Remains) -> None:
        """Give back what a block holds that no one will read any more."""
        if block.host is not None:
            self._free_host(block, None)
        if block.target is not None:
            target, block.target = block.target, None
            reload = block.reload
            if reload is None:
                return
            if not reload.waited_keys:
                # Nobody read it; still the copy must not write into memory that was handed on.
                self._wait(reload)
            if self.backend.observes:
                sole_owner = num_owners(target.untyped_storage()) == 2  # target and the handle
                self.backend.note_freed(target, block.group.label, sole_owner=sole_owner)
            self.tensor_pool.free(target)

    def abandon(self, groups: Iterable[OffloadGroup]) -> None:
        """Take everything from these groups, and count anew what is left: after a failed step.

        Nothing is assumed of the books: any line that changes them may have been the last that ran.
        """
        self.backend.sync_copies()
        self._window.clear()
        self._copies_in_flight.clear()
        for group in groups:
            # A failed backward may leave its graph alive for long: its data goes now.
            for block in group.blocks():
                block.cancelled = True
                block.source = block.host = None
                if block.reload is not None:
                    block.target = None
        self.tensor_pool.recover()
        blocks = [region.owner() for region in self.host_pool.recover(_is_owned)]
        self.ledger.recover((block.group.name, block.num_bytes) for block in blocks)
        self.budget.inflight_bytes = 0

    def empty(self, alias: torch.Tensor) -> None:
        """Take the storage out of an alias; its version counter stays, for the in-place check."""
        if self._empty is None:
            self._empty = torch.empty(0, dtype=torch.uint8, device=alias.device)
        alias.data = self._empty

    def begin_step(self, stats: StepStats) -> None:
        """Count into ``stats`` from here on; what is still on the host stays counted."""
        self.stats = stats
        self._step_began_at_bytes = self._passed_bytes
        self.ledger.begin_step(stats)

    @property
    def host_bytes(self) -> int:
        """Bytes held on the host now."""
        return self.ledger.host_bytes

    @property
    def num_inflight(self) -> int:
        """Groups whose copies are issued and whose sources are still held."""
        return len(self._window)

    @property
    def step_bytes(self) -> int:
        """Bytes of all groups that this step has passed; its clock."""
        return self._passed_bytes - self._step_began_at_bytes

    def _label(self, group: OffloadGroup) -> str:
        """Name a group for its copies; in full only where someone reads it."""
        return group.label if self.backend.observes else group.name

    def _free_host(self, block: Block | _Remains, after: Event | None) -> None:
        self._give_back_host(block, after)
        self.ledger.remove(block.group.name, block.num_bytes, were_away=block.released)

    def _give_back_host(self, block: Block | _Remains, after: Event | None) -> None:
        host, block.host = block.host, None
        assert host is not None
        self.host_pool.free(host, after)


def _is_owned(region: HostRegion) -> bool:
    """Whether a block that is alive, of an earlier step, has its data there."""
    block = region.owner() if region.owner is not None else None
    return block is not None and block.host is region


def _offload_pair(block: Block, host: HostRegion) -> Pair:
    """Return where a block goes, and its source."""
    source = block.aliases[0]
    if block.like is not None:
        return host.like(source), source  # much the most frequent, and needs no new view
    view = torch.empty(0, dtype=torch.uint8, device=source.device)
    view.set_(source.untyped_storage(), block.low, (block.num_bytes,), (1,))
    return host.tensor, view
