"""What is done about a decision: the copies, and the waits that order them.

Every copy of the engine is issued here or in `megatron_offload.engine.reloads`, with the six waits,
each at one place.

Release without ``record_stream``: the source of a copy to the host is held until a known later
point of the program, where the compute stream waits for the copy (W2) and the last reference is
dropped. The caching allocator can hand the memory on at once, in stream order, and does so the same
way in every run. What is released when, `megatron_offload.core.window` decides. What something else
keeps on the device isn't copied any more from the next step on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TypeAlias
from weakref import ref

import torch

from megatron_offload.backends.base import Event, Pair, Stream, Wait
from megatron_offload.core.group import OFFLOADING, ON_HOST, RESIDENT
from megatron_offload.core.profile import GroupKey
from megatron_offload.core.window import InFlightWindow
from megatron_offload.engine.group import INPUT_NOT_SAVED, Block, Flight, Lease, OffloadGroup
from megatron_offload.engine.guard import guarded
from megatron_offload.engine.reloads import Reloads
from megatron_offload.engine.stats import StepStats
from megatron_offload.memory.host_pool import HostRegion
from megatron_offload.memory.layout import bytes_of
from megatron_offload.memory.storage_ref import StorageRef, has_no_other, num_owners, use_count_of

_logger = logging.getLogger(__name__)

_SLAB_SHARE = 16
"""Blocks of a group share a host region where they are at most this fraction of a slab: what is
larger is allocated piece by piece, which fills slabs better, and copying it takes longer than
that."""

_INPUT_NOT_SAVED = (
    "rows: what {!r} returns is kept: it doesn't save what it takes, so that to recompute it would "
    "take as much memory"
)

_Taken: TypeAlias = tuple[Block, HostRegion, torch.Tensor]
"""A block, the host memory of which it has a part, and that part."""


class Transfers(Reloads):
    """Moves blocks between device and host for all groups of one manager."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Weakly, since memory goes with its manager and no cycle may keep that.
        found = ref(self)
        self.window = InFlightWindow(lambda group: found().release(group), self.budget)  # type: ignore[union-attr]
        self.kept_by_others: set[tuple[GroupKey, int]] = set()
        """The identities of blocks that something else keeps on the device until their backward."""
        self.by_rows = False
        """Whether what no row names is saved without a record."""
        self._said: set[str] = set()
        self._shared_bytes = self.host_pool.slab_bytes // _SLAB_SHARE
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._empty = self.backend.empty_device_like(nothing)
        self.device = self._empty.device

    def warn_once(self, message: str, *values: object) -> None:
        """Warn, unless this was said, with whatever values."""
        if message not in self._said:
            self._said.add(message)
            _logger.warning(message, *values)

    # To the host

    def measure(self, group: OffloadGroup) -> None:
        """Drop what is recomputed, and see what offloading the rest of a group would copy.

        Counts what is kept by choice, or is kept anyway.
        """
        moving: list[Block] = []
        others, chooses = self.kept_by_others, group.rules.should_offload
        drops_only = group.pick is not None and group.pick.drops_only
        num_bytes = 0
        for found in group.references:
            block = found()
            if block is None or block.flight is not None:
                continue
            if block.recipe is not None and self._drops(group, block):
                continue
            block_bytes, counted_bytes = block.num_bytes, block.counted_bytes
            is_others = bool(others) and block.identity in others
            if chooses is not None and not counted_bytes and not is_others:
                block.is_kept = block.is_kept or not chooses(block_bytes)
            if block.is_kept or drops_only:
                if group.pick is None:  # else the next call doesn't even see it
                    group.kept_bytes += block_bytes
                self.count_kept(block, "beyond the share that is offloaded")
                continue
            block.counted_bytes = block_bytes
            if is_others:
                self.stats.externally_referenced_bytes += block_bytes - counted_bytes
            else:
                num_bytes += block_bytes
                block.name = group.name
                block.forced_by = ()  # a group before that has asked for it is kept
                moving.append(block)
        group.moving, group.num_bytes = moving, num_bytes

    def _drops(self, group: OffloadGroup, block: Block) -> bool:
        """Drop a block that has a recipe, if it is to be and can be; say whether."""
        recipe = block.recipe
        assert recipe is not None
        num_bytes = block.num_bytes
        if not block.released:  # else it is dropped with a group before this, which shares it
            is_others = block.identity in self.kept_by_others
            refusal = "something else keeps it alive" if is_others else ""
            refusal = refusal or recipe.bind(block, drops=group.rules.recomputes)
            if refusal:
                refused = self.stats.refused_recipe_bytes
                refused[refusal] = refused.get(refusal, 0) + num_bytes
                if self.by_rows and refusal == INPUT_NOT_SAVED:
                    self.warn_once(_INPUT_NOT_SAVED.format(recipe.unit))
            if refusal or not group.rules.recomputes:
                block.recipe = None
                return False
        group.needs = tuple(sorted({*group.needs, *recipe.needs()} - {group.key}))
        if not block.released:
            for observer in self.observers:
                observer.block_offloads(block, block.source())
            self._drop(block, group.label)
            if group.pick is not None and group.pick.drops_only:
                block.name = recipe.unit  # what one call saves may be of several
            name, dropped = block.name, group.dropped_bytes
            by_unit = self.stats.recomputed_bytes_by_unit
            by_unit[recipe.unit] = by_unit.get(recipe.unit, 0) + num_bytes
            self.stats.by_name[name].recomputed_bytes += num_bytes
            group.dropped_bytes = {**dropped, name: dropped.get(name, 0) + num_bytes}
            self.host_pool.alone.add(name, num_bytes)
        return True

    def count_recomputed(self, group: OffloadGroup) -> None:
        """Count what was dropped of a group as off the device no more."""
        if group.dropped_bytes:
            for name, num_bytes in group.dropped_bytes.items():
                self.host_pool.alone.add(name, -num_bytes)
            group.dropped_bytes = {}

    def keep(self, group: OffloadGroup, reason: str) -> None:
        """Leave a group whose forward is over on the device."""
        moving, group.moving = group.moving, ()
        for block in moving:
            self.count_kept(block, reason)
        group.advance(RESIDENT)

    def count_kept(self, block: Block, reason: str) -> None:
        """Count a block as kept, but for what was counted of it before."""
        num_bytes = block.num_bytes - block.kept_bytes
        if num_bytes:
            block.kept_bytes = block.num_bytes
            self.stats.by_name[block.name].keep(num_bytes, reason)

    def offload(self, group: OffloadGroup) -> None:
        """Issue the copies of the blocks that `measure` has found, and put them into the window.

        A block for which the host has no room is kept on the device, and so does one whose storage
        was emptied since: its user restores it before backward. Moves the group to
        OFFLOADING, or to RESIDENT where nothing is left to move.
        """
        backend = self.backend
        moving: list[Block] = []
        for block in group.moving:
            block.address = address = block.alias.untyped_storage().data_ptr()
            if address:
                moving.append(block)
        group.moving = ()
        taken = self._take_host(group, moving) if moving else None
        if not taken:
            group.advance(RESIDENT)
            return
        group.flight = flight = Flight([], {})
        pairs: list[Pair] = []
        produced: dict[Event, None] = {}
        reused: dict[Event, None] = {}
        num_bytes, is_ready, left, free = 0, True, self.guard.left.append, self.free
        for block, region, host in taken:
            block.lease = lease = Lease(block, left)
            lease.free, lease.group, lease.region = free, block.group, region
            self._leases.add(lease)
            block.host, block.flight = host, flight
            flight.copies.append((lease, block.stream, block.alias))
            flight.streams[block.stream] = None
            pairs.append((host, block.source()))
            num_bytes += block.num_bytes
            if region.ready_event is not None:
                reused[region.ready_event] = None
            if block.ready is None:
                is_ready = False
            else:
                produced[block.ready] = None
        self.stats.by_name[group.name].offloaded_bytes += num_bytes
        if self.observers or backend.observes:
            self._report_offloads(group, pairs, taken)
        d2h_stream = backend.d2h_stream
        if not is_ready:
            backend.wait_compute(d2h_stream, Wait.W1)
            here = backend.compute_stream()  # the forward may be over
            for stream in flight.streams:
                if stream is not here:
                    produced[backend.record(stream)] = None
        for event in produced:
            backend.wait(d2h_stream, event, Wait.W1)
        for event in reused:
            backend.wait(d2h_stream, event, Wait.W5)
        flight.d2h = self._copy("d2h", pairs, group)
        flight.num_bytes = num_bytes
        self.budget.inflight_bytes += num_bytes
        self.window.add(group, len(pairs))
        group.advance(OFFLOADING)
        rules = group.rules
        if rules.max_inflight_groups is not None:
            self.window.limit(rules.max_inflight_groups, lambda one, _: one.name == group.name)
        if rules.max_inflight_blocks is not None:
            self.window.limit(rules.max_inflight_blocks, lambda _, num_blocks: num_blocks)

    def _report_offloads(
        self, group: OffloadGroup, pairs: Sequence[Pair], taken: Sequence[_Taken]
    ) -> None:
        """Report to the observers that these blocks leave."""
        backend = self.backend
        for (_, source), (block, _, _) in zip(pairs, taken, strict=True):
            if backend.observes and block.ready is None:
                with backend.computing_on(block.stream):
                    backend.note_produced(source, group.label)
            for observer in self.observers:
                observer.block_offloads(block, source)

    def _take_host(self, group: OffloadGroup, moving: Sequence[Block]) -> list[_Taken]:
        """Return the blocks for which there is host memory, each with it."""
        pool, owners = self.host_pool, group.references
        if group.num_bytes <= self._shared_bytes:
            region = pool.allocate_views([block.spec for block in moving])
            if region is not None:
                region.owners = owners
                return list(zip(moving, repeat(region), region.views, strict=False))
        taken: list[_Taken] = []
        num_unpinnable = pool.stats.num_unpinnable
        for block in moving:
            found = pool.allocate(*block.spec)
            if found is None:
                self.stats.num_refused_blocks += 1
                self.stats.refused_bytes += block.num_bytes - block.kept_bytes
                self.count_kept(block, "the host memory is full")
                continue
            found.owners = owners
            taken.append((block, found, found.tensor))
        self.stats.num_unpinnable_blocks += pool.stats.num_unpinnable - num_unpinnable
        return taken

    def cancel(self, group: OffloadGroup, *, is_late: bool) -> None:
        """Leave a group on the device whose copies are in flight."""
        self.stats.num_cancelled_offloads += is_late
        for block in group.blocks():
            self._cancel(block)
        group.advance(RESIDENT)

    # Sources

    def release(self, group: OffloadGroup) -> None:
        """Make what was computed on wait for a group's copies, and free their sources.

        It is the one whose copies were issued first; one wait covers all before it.
        """
        flight, backend = group.flight, self.backend
        assert flight is not None
        for observer in self.observers:
            observer.wait_starts()
        # Not what is current now: the memory goes back to these.
        for stream in flight.streams:
            backend.wait(stream, flight.d2h, Wait.W2)
        for observer in self.observers:
            observer.wait_issued(Wait.W2, group)
        observes, empty, use_count = backend.observes, self._empty, use_count_of
        region: HostRegion | None = None
        region_bytes = 0
        read_on = backend.read_on
        for lease, stream, alias in flight.copies:
            block = lease()  # None where it is dead
            read_on(stream, alias)  # the program may have allocated it on another
            if block is not None and block.cancelled:
                continue
            storage = alias.untyped_storage()
            if block is not None:
                if storage.data_ptr() != block.address:
                    # Someone emptied the storage meanwhile, so the copy may have read memory that
                    # was no longer its own. Its user restores the contents before backward.
                    self._cancel(block)
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
            elif block.forced_by and has_no_other(storage, block.forced_by):
                storage.resize_(0)
                block.storage_key = 0
            else:
                block.storage_ref = StorageRef(storage)
            if lease.region is not region:
                if region is not None:
                    self.host_pool.count_alone(region, group.name, region_bytes)
                region, region_bytes = lease.region, 0
            region_bytes += block.num_bytes
        if region is not None:
            self.host_pool.count_alone(region, group.name, region_bytes)
        group.flight = None
        self.budget.inflight_bytes -= flight.num_bytes
        flight.num_bytes = 0
        if group.state is OFFLOADING:
            group.advance(ON_HOST)

    def _drop(self, block: Block, label: str) -> None:
        """Drop the source of a block that is recomputed, without a copy."""
        storage = block.alias.untyped_storage()
        block.address = storage.data_ptr()
        block.num_bytes = 0
        block.released = True  # from here on its recipe counts
        self.backend.read_on(block.stream, block.alias)
        for alias in (block.alias, *block.others):
            alias.data = self._empty
        is_sole_owner = num_owners(storage) == 1  # the Python handle
        if self.backend.observes:
            self._note_freed(storage, label, block.stream, is_sole_owner=is_sole_owner)
        if is_sole_owner:
            block.storage_key = 0
        else:
            block.storage_ref = StorageRef(storage)

    def _note_freed(
        self, storage: torch.UntypedStorage, label: str, stream: Stream, *, is_sole_owner: bool
    ) -> None:
        """Note that a storage is free, unless a copy of another part of it is in flight."""
        flights = (group.flight for group in self.window if group.flight is not None)
        copied = (alias.untyped_storage()._cdata for one in flights for _, _, alias in one.copies)
        if storage._cdata in copied:
            return
        region = bytes_of(storage)
        with self.backend.computing_on(stream):
            self.backend.note_produced(region, label)  # all of it, though parts alone are copied
            self.backend.note_freed(region, label, sole_owner=is_sole_owner)

    def empty(self, alias: torch.Tensor) -> None:
        """Take the storage out of an alias; its version counter remains, for the in-place check."""
        alias.data = self._empty

    def _cancel(self, block: Block) -> None:
        """Keep a block on the device after all, if its copy is in flight.

        Its source is held until the copy is done, its host memory goes back now: the next copy into
        it is queued on the same stream.
        """
        flight = block.flight
        if block.region is None or flight is None or block.cancelled or block.released:
            return
        block.cancelled = True
        self.host_pool.free(block.take_region(), None)
        if flight.num_bytes:
            self.budget.inflight_bytes -= block.num_bytes
            flight.num_bytes -= block.num_bytes

    @guarded
    def keep_source(self, block: Block) -> None:
        """Keep a block on the device for a reader who is there before its release."""
        self._cancel(block)

    # What something else keeps

    def learn_owners(self, group: OffloadGroup) -> None:
        """See, now that backward is here, which blocks something else keeps on the device.

        Whether a storage has other owners is unknown at the commit, where the frames of the forward
        still hold it. Those that are kept so aren't moved in the next step: nothing is gained by
        that. One that was kept for that reason and has no other owner any more is moved again.
        """
        for block in group.blocks():
            if block.reload is not None or block.was_reached:
                continue  # it left, or what another group has read of it is an owner now
            block.was_reached = True
            if block.flight is not None or block.released or block.identity in self.kept_by_others:
                if _is_kept_by_others(block):
                    self.kept_by_others.add(block.identity)
                else:
                    self.kept_by_others.discard(block.identity)

    # Steps

    def begin_step(self) -> None:
        """Count from zero; what is still on the host remains counted."""
        self.stats = StepStats()
        self.host_pool.restart_peaks()

    def counted(self) -> StepStats:
        """Return the counters of the step so far."""
        stats, pool = self.stats, self.host_pool
        stats.peak_host_bytes = pool.stats.peak_in_use_bytes
        stats.peak_released_bytes, stats.peak_released_bytes_by_name = pool.alone.peak()
        return stats

    def abandon(self, groups: Iterable[OffloadGroup]) -> None:
        """Take everything from these groups, and count anew what is left: after a failed step.

        Nothing is assumed of the books: any line that changes them may have been the last that ran.
        """
        self.backend.sync_copies()
        self.window.abandon()
        self.budget.inflight_bytes = 0
        self._leases = {lease for lease in self._leases if lease() is not None}
        for group in groups:
            group.moving, group.flight, group.dropped_bytes = (), None, {}
            # A failed backward may leave its graph alive for long: its data goes now.
            for block in group.blocks():
                block.cancelled = True
                block.host = None
                if block.lease is not None:
                    block.lease.region = None
                if block.reload is not None or block.recipe is not None:
                    block.target = block.made = block.recipe = None
        self.host_pool.recover(_count_users)


def _count_users(region: HostRegion) -> int:
    """Count the blocks that are alive and have their data in a region."""
    blocks = (found() for found in region.owners)
    return sum(block is not None and block.region is region for block in blocks)


def _is_kept_by_others(block: Block) -> bool:
    """Whether something else keeps a block on the device, when backward has come to it."""
    if block.flight is None and block.released:  # it was dropped, to be recomputed
        return block.live_source() is not None
    if block.flight is None:
        own = [block.alias, *block.others]
    elif block.target is not None and block.reload is None:
        own = [block.target]  # it was to leave, and its source was still there
    else:
        return False  # it left, or may have
    own += (block.handed or {}).values()
    return num_owners(own[0].untyped_storage()) > len(own) + 1  # and this line's handle
