"""The sources of copies to the host: held until their release, freed then.

Owns the aliases of these sources, and the wait before their memory is reused (W2). What is released
when, `megatron_offload.core.window` decides.

Release without ``record_stream``: a source is held until a known later point of the program, where
the compute stream waits for its copy and the last reference is dropped. The caching allocator can
hand the memory on at once, in stream order, and does so the same way in every run.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_offload.backends.base import Backend, Event, Wait
from megatron_offload.core.budget import DeviceBudget
from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.host_copies import HostCopies
from megatron_offload.engine.observer import Observer
from megatron_offload.engine.saved_tensor import Block, BlockRef
from megatron_offload.memory.storage import num_owners

__all__ = ["Source", "Sources"]


class Source:
    """The device memory of a block whose copy to the host is issued."""

    __slots__ = ("aliases", "block", "num_bytes", "storage_key")

    def __init__(self, block: Block) -> None:
        self.block: BlockRef = weakref.ref(block)
        # Holding the aliases keeps the memory even where the graph is dropped before its copy ends.
        self.aliases = block.aliases
        self.storage_key = block.storage_key
        self.num_bytes = block.num_bytes


class Sources:
    """The sources of one manager's copies, released by group, in the order of issue.

    Args:
        backend: whose compute stream waits for the copies.
        host_copies: where the copies lie.
        budget: counts what is in flight.
        observers: are told of the waits.
    """

    def __init__(
        self,
        backend: Backend,
        host_copies: HostCopies,
        budget: DeviceBudget,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.backend = backend
        self._observers = observers
        self._host_copies = host_copies
        self.budget = budget
        self._held: deque[tuple[OffloadGroup, Event, list[Source]]] = deque()
        self._copies_in_flight: dict[int, int] = {}
        """By storage: different parts of one may be saved, and copied, by different groups."""
        self._empty: torch.Tensor | None = None

    def hold(self, group: OffloadGroup, blocks: Iterable[Block], d2h: Event) -> int:
        """Hold the sources of blocks whose copies were issued.

        Args:
            group: who has moved them.
            blocks: each with its host memory.
            d2h: the event behind the copies.

        Returns:
            The bytes that are copied.
        """
        sources = []
        num_bytes = own_bytes = 0
        for block in blocks:
            block.d2h = d2h
            block.source = Source(block)
            sources.append(block.source)
            num_bytes += block.num_bytes
            if block.group is group:
                own_bytes += block.num_bytes
            else:
                self._host_copies.add(block.group.name, block.num_bytes)
            key = block.storage_key
            self._copies_in_flight[key] = self._copies_in_flight.get(key, 0) + 1
        self._host_copies.add(group.name, own_bytes)
        self.budget.inflight_bytes += num_bytes
        self._held.append((group, d2h, sources))
        return num_bytes

    def release(self, group: OffloadGroup) -> None:
        """Make the compute stream wait for a group's copies, and free their sources.

        Args:
            group: the one whose copies were issued first; one wait covers all before it.
        """
        held, d2h, sources = self._held[0]
        assert held is group
        for observer in self._observers:
            observer.wait_starts()
        self.backend.wait(self.backend.compute_stream(), d2h, Wait.W2)
        for observer in self._observers:
            observer.wait_issued(Wait.W2, group)
        self._held.popleft()
        own_bytes = 0
        for source in sources:
            key = source.storage_key
            num_others = self._copies_in_flight.pop(key) - 1
            is_last = num_others == 0
            if not is_last:
                self._copies_in_flight[key] = num_others
            block = source.block()
            if block is None:
                self._free(source.aliases, group, is_last=is_last)
            elif not block.cancelled:
                self._release_block(block, is_last=is_last)
                if block.released and block.group is group:
                    own_bytes += block.num_bytes
                elif block.released:
                    self._host_copies.release(block.group.name, block.num_bytes)
            self._count_landed(source)
        self._host_copies.release(group.name, own_bytes)
        if group.state is GroupState.OFFLOADING:
            group.advance(GroupState.ON_HOST)

    def _release_block(self, block: Block, *, is_last: bool) -> None:
        storage = block.aliases[0].untyped_storage()
        if storage.data_ptr() != block.address:
            # Someone emptied the storage meanwhile, so the copy may have read memory that was no
            # longer its own. Whoever did it restores the contents before backward.
            self._cancel(block)
            return
        chunk = block.group.chunk
        block.released = True  # from here on the host's copy is the one that counts
        sole_owner = self._free(block.aliases, block.group, is_last=is_last)
        is_emptied = block.forced_release and is_last
        if is_emptied:
            storage.resize_(0)
        if sole_owner or is_emptied:
            if chunk.find_block(block.storage_key) is block:
                del chunk.blocks[block.storage_key]
        else:
            block.storage_ref = StorageWeakRef(storage)

    def _free(self, aliases: list[torch.Tensor], group: OffloadGroup, *, is_last: bool) -> bool:
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

    def empty(self, alias: torch.Tensor) -> None:
        """Take the storage out of an alias; its version counter stays, for the in-place check."""
        if self._empty is None:
            self._empty = torch.empty(0, dtype=torch.uint8, device=alias.device)
        alias.data = self._empty

    def _count_landed(self, source: Source) -> None:
        """Count a source as in flight no longer; a second time changes nothing."""
        self.budget.inflight_bytes -= source.num_bytes
        source.num_bytes = 0

    # What stays after all

    def keep(self, block: Block) -> None:
        """Keep a block on the device for a reader who is there before its release."""
        if block.d2h is not None and not block.cancelled and not block.released:
            self._cancel(block)

    def keep_resident(self, group: OffloadGroup) -> None:
        """Cancel the release of a group whose copies are in flight."""
        for block in group.blocks():
            self.keep(block)
        group.advance(GroupState.RESIDENT)

    def _cancel(self, block: Block) -> None:
        """Keep a block whose copy is in flight on the device after all.

        Its source is held until the copy is done, its host memory goes back now: the next copy into
        it is queued on the same stream.
        """
        block.cancelled = True
        self._host_copies.free(block, None)
        if block.source is not None:
            self._count_landed(block.source)

    def abandon(self) -> None:
        """Hold nothing any more: after a failed step, when no copy is under way."""
        self._held.clear()
        self._copies_in_flight.clear()
        self.budget.inflight_bytes = 0
