"""The in-flight window: sources whose copy to the host is issued, and when they are released.

Owns the aliases of these sources, the wait before their memory is reused (W2), and the step's
clock, the bytes of all groups that the program has passed: from the first backward on it says when
a release is due. Must not know autograd, how copies are issued, or why a group moves.

Release without ``record_stream``: a source is held until a known later point of the program, where
the compute stream waits for its copy and the last reference is dropped. The caching allocator can
hand the memory on at once, in stream order, and does so the same way in every run.

Invariant: the window is released in the order of issue, so one wait covers all before it.
Read next: `megatron_offload.engine.transfers`, which issues the copies, and
`megatron_offload.core.budget`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_offload.backends.base import Backend, Event, Wait
from megatron_offload.core.budget import DeviceBudget
from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.host_copies import HostCopies
from megatron_offload.engine.owners import num_owners
from megatron_offload.engine.saved_tensor import Block, BlockRef

__all__ = ["InFlightWindow", "Source"]


class Source:
    """The device memory of a block whose copy to the host is issued."""

    __slots__ = ("aliases", "block", "num_bytes", "storage_key")

    def __init__(self, block: Block) -> None:
        self.block: BlockRef = weakref.ref(block)
        # Holding the aliases keeps the memory even where the graph is dropped before its copy ends.
        self.aliases = block.aliases
        self.storage_key = block.storage_key
        self.num_bytes = block.num_bytes


class _Entry:
    """A group whose copy to the host is issued and whose device memory is still held."""

    __slots__ = ("d2h", "due_bytes", "group", "sources")

    def __init__(self, group: OffloadGroup, d2h: Event, due_bytes: int, sources: list[Source]):
        self.group = group
        self.d2h = d2h
        self.due_bytes = due_bytes
        self.sources = sources


class InFlightWindow:
    """The copies to the host of one manager, from their issue to their release.

    Args:
        backend: whose compute stream waits for the copies.
        host_copies: where the copies lie.
        budget: how much device memory copies in flight may hold.
    """

    def __init__(self, backend: Backend, host_copies: HostCopies, budget: DeviceBudget) -> None:
        self.backend = backend
        self._host_copies = host_copies
        self.budget = budget
        self._entries: deque[_Entry] = deque()
        self._copies_in_flight: dict[int, int] = {}
        """By storage: different parts of one may be saved, and copied, by different groups."""
        self._passed_bytes = 0
        self._step_began_at_bytes = 0
        self._empty: torch.Tensor | None = None

    def begin_step(self) -> None:
        """Let the step's clock begin at zero."""
        self._step_began_at_bytes = self._passed_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of all groups that this step has passed; its clock."""
        return self._passed_bytes - self._step_began_at_bytes

    @property
    def num_inflight(self) -> int:
        """Groups whose copies are issued and whose sources are still held."""
        return len(self._entries)

    def add(self, group: OffloadGroup, blocks: Iterable[Block], d2h: Event) -> int:
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
        due_bytes = self._passed_bytes + self.budget.limit_bytes
        self._entries.append(_Entry(group, d2h, due_bytes, sources))
        return num_bytes

    # When something is released

    def pass_boundary(self, num_bytes: int) -> None:
        """Note that the program has gone by a group of this size; release what is due.

        Under limits that were set nothing is due until the first backward but what exceeds them.
        Where groups stay, the others' copies could take all the room that they have and still be
        due too soon; and a pipeline rank that waits there makes others wait, whose messages it then
        takes late.
        """
        self._passed_bytes += num_bytes
        if self.budget.clock_runs:
            while self._entries and self._entries[0].due_bytes < self._passed_bytes:
                self._release_oldest()
        self.release_over_budget()

    def release_over_budget(self) -> None:
        """Release from the oldest on until the budget is kept."""
        while self._entries and self.budget.is_exceeded():
            self._release_oldest()

    def limit_groups(self, name: str, num_groups: int) -> None:
        """Release from the oldest on until at most ``num_groups`` of this name are in flight."""
        num_over = sum(entry.group.name == name for entry in self._entries) - num_groups
        while num_over > 0:
            num_over -= self._release_oldest().group.name == name

    def limit_blocks(self, num_blocks: int) -> None:
        """Release from the oldest on until at most ``num_blocks`` blocks are in flight."""
        num_over = sum(len(entry.sources) for entry in self._entries) - num_blocks
        while num_over > 0:
            num_over -= len(self._release_oldest().sources)

    def drain(self) -> None:
        """Release everything in flight, in order."""
        while self._entries:
            self._release_oldest()

    # How it is released

    def _release_oldest(self) -> _Entry:
        backend = self.backend
        entry = self._entries[0]
        backend.wait(backend.compute_stream(), entry.d2h, Wait.W2)
        self._entries.popleft()
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
                    self._host_copies.release(block.group.name, block.num_bytes)
            self._count_landed(source)
        self._host_copies.release(group.name, own_bytes)
        if group.state is GroupState.OFFLOADING:
            group.advance(GroupState.ON_HOST)
        return entry

    def _release_block(self, block: Block, *, is_last: bool) -> None:
        storage = block.aliases[0].untyped_storage()
        if storage.data_ptr() != block.address:
            # Someone emptied the storage meanwhile, so the copy may have read memory that was no
            # longer its own. Whoever did it restores the contents before backward.
            self._cancel(block)
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

        Its source stays in the window until the copy is done, its host memory goes back now: the
        next copy into it is queued on the same stream.
        """
        block.cancelled = True
        self._host_copies.free(block, None)
        if block.source is not None:
            self._count_landed(block.source)

    def abandon(self) -> None:
        """Hold nothing any more: after a failed step, when no copy is under way."""
        self._entries.clear()
        self._copies_in_flight.clear()
        self.budget.inflight_bytes = 0
