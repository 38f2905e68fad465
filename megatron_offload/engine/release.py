"""The sources of copies to the host: held until their release, freed then.

Release without ``record_stream``: a source is held until a known later point of the program, where
the compute stream waits for its copy (W2) and the last reference is dropped. The caching allocator
can hand the memory on at once, in stream order, and does so the same way in every run. What is
released when, `megatron_offload.core.window` decides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch

from megatron_offload.backends.base import Backend, Stream, Wait
from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import OFFLOADING, ON_HOST
from megatron_offload.engine.group import Block, Flight, OffloadGroup
from megatron_offload.engine.observer import Observer
from megatron_offload.memory.host_pool import HostPool, HostRegion
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.memory.tensor_pool import num_owners, use_count_of


@dataclass(eq=False, repr=False)
class Sources:
    """The sources of one manager's copies, released by group, in the order of issue."""

    _backend: Backend
    _host_pool: HostPool
    budget: DeviceBudget
    _observers: Sequence[Observer]

    def __post_init__(self) -> None:
        self._held: deque[Flight] = deque()
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._empty = self._backend.empty_device_like(nothing)

    def hold(self, flight: Flight, num_bytes: int) -> None:
        """Hold the sources of copies that were issued, and count their bytes in flight."""
        flight.num_bytes = num_bytes
        self.budget.inflight_bytes += num_bytes
        self._held.append(flight)

    def release(self, group: OffloadGroup) -> None:
        """Make what was computed on wait for a group's copies, and free their sources.

        It is the one whose copies were issued first; one wait covers all before it.
        """
        flight, backend = self._held[0], self._backend
        assert flight.group is group
        for observer in self._observers:
            observer.wait_starts()
        # Not what is current now: the memory goes back to these.
        for stream in dict.fromkeys(flight.streams):
            backend.wait(stream, flight.d2h, Wait.W2)
        for observer in self._observers:
            observer.wait_issued(Wait.W2, group)
        observes, empty, use_count = backend.observes, self._empty, use_count_of
        region: HostRegion | None = None
        name, name_bytes = "", 0
        read_on = backend.read_on
        for found, alias, stream in zip(flight.blocks, flight.aliases, flight.streams, strict=True):
            block = found()  # None where it is dead
            read_on(stream, alias)  # the program may have allocated it on another
            if block is not None and block.cancelled:
                continue
            storage = alias.untyped_storage()
            if block is not None:
                if storage.data_ptr() != block.address:
                    # Someone emptied the storage meanwhile, so the copy may have read memory that
                    # was no longer its own. Its user restores the contents before backward.
                    self.cancel(block)
                    continue
                block.released = True  # from here on the host's copy is the one that counts
                for other in block.others:
                    other.data = empty
            alias.data = empty
            is_sole_owner = use_count(storage._cdata) == 1  # the Python handle
            if observes:
                self._note_freed(storage, group.label, stream, is_sole_owner=is_sole_owner)
            if block is None:
                continue
            if is_sole_owner:
                block.storage_key = 0  # another storage may be found under it from here on
            elif block.forced_by and _has_no_other(storage, block.forced_by):
                storage.resize_(0)
                block.storage_key = 0
            else:
                block.storage_ref = StorageRef(storage)
            if block.region is not region or block.name is not name:
                if region is not None:
                    self._host_pool.count_alone(region, name, name_bytes)
                region, name, name_bytes = block.region, block.name, 0
            name_bytes += block.num_bytes
        if region is not None:
            self._host_pool.count_alone(region, name, name_bytes)
        self._held.popleft()
        self.budget.inflight_bytes -= flight.num_bytes
        flight.num_bytes = 0
        if group.state is OFFLOADING:
            group.advance(ON_HOST)

    def drop(self, block: Block, label: str) -> None:
        """Drop the source of a block that is recomputed, without a copy."""
        storage = block.alias.untyped_storage()
        block.address = storage.data_ptr()
        block.num_bytes = 0
        block.released = True  # from here on its recipe counts
        self._backend.read_on(block.stream, block.alias)
        for alias in (block.alias, *block.others):
            alias.data = self._empty
        is_sole_owner = num_owners(storage) == 1  # the Python handle
        if self._backend.observes:
            self._note_freed(storage, label, block.stream, is_sole_owner=is_sole_owner)
        if is_sole_owner:
            block.storage_key = 0
        else:
            block.storage_ref = StorageRef(storage)

    def _note_freed(
        self, storage: torch.UntypedStorage, label: str, stream: Stream, *, is_sole_owner: bool
    ) -> None:
        """Note that a storage is free, unless a copy of another part of it is in flight."""
        copied = (alias for flight in self._held for alias in flight.aliases)
        if any(alias.untyped_storage()._cdata == storage._cdata for alias in copied):
            return
        region = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        with self._backend.computing_on(stream):
            self._backend.note_produced(region, label)  # all of it, though parts alone are copied
            self._backend.note_freed(region, label, sole_owner=is_sole_owner)

    def empty(self, alias: torch.Tensor) -> None:
        """Take the storage out of an alias; its version counter remains, for the in-place check."""
        alias.data = self._empty

    def cancel(self, block: Block) -> None:
        """Keep a block on the device after all, if its copy is in flight.

        Its source is held until the copy is done, its host memory goes back now: the next copy into
        it is queued on the same stream.
        """
        flight = block.flight
        if block.region is None or flight is None or block.cancelled or block.released:
            return
        block.cancelled = True
        self._host_pool.free(block.take_region(), None)
        if flight.num_bytes:
            self.budget.inflight_bytes -= block.num_bytes
            flight.num_bytes -= block.num_bytes

    def abandon(self) -> None:
        """Hold nothing any more: after a failed step, when no copy is under way."""
        self._held.clear()
        self.budget.inflight_bytes = 0


def _has_no_other(storage: torch.UntypedStorage, owners: Iterable[ref[torch.Tensor]]) -> bool:
    """Whether nothing has a storage but these tensors and what they are views of, in Python alone.

    Another tensor may be read, an input that a norm before the group has saved, say; and so may one
    of these that a node of no group has saved.
    """
    alive = [tensor for owner in owners if (tensor := owner()) is not None]
    alive += [tensor._base for tensor in alive if tensor._base is not None]
    known = {id(x): x for x in alive if x.untyped_storage()._cdata == storage._cdata}
    if num_owners(storage) > len(known) + 1:  # the Python handle
        return False
    views = Counter(id(x._base) for x in known.values() if x._base is not None)
    for key, x in known.items():
        has_accumulator = x.is_leaf and x.requires_grad  # the node that sums its gradient has it
        if x._use_count() > 1 + views[key] + has_accumulator:  # type: ignore[attr-defined]
            return False
    return True
