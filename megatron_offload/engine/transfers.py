"""What is done about a decision: the copies, and the waits that order them.

Every copy of the package is issued here, with five of the six waits, one call each; W2 is in
`megatron_offload.engine.release`. What something else keeps on the device is neither reloaded nor,
from the next step on, copied at all.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Any
from weakref import ref

import torch

from megatron_offload.backends.base import Backend, Event, Stream, Wait
from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import OFFLOADING, ON_HOST, RELOADED, RELOADING, RESIDENT
from megatron_offload.core.profile import RecomputeUnit
from megatron_offload.core.window import InFlightWindow
from megatron_offload.engine.group import (
    INPUT_NOT_SAVED,
    Block,
    Flight,
    Lease,
    OffloadGroup,
    Reload,
)
from megatron_offload.engine.guard import Guard, guarded
from megatron_offload.engine.observer import Observer
from megatron_offload.engine.owners import ForeignOwners
from megatron_offload.engine.release import Sources
from megatron_offload.engine.stats import StepStats
from megatron_offload.errors import StateError
from megatron_offload.memory.host_pool import HostPool, HostRegion
from megatron_offload.memory.tensor_pool import TensorPool, num_owners

_logger = logging.getLogger(__name__)

_SLAB_SHARE = 16
"""Blocks of a group share a host region where they are at most this fraction of a slab: what is
larger is allocated piece by piece, which fills slabs better, and copying it takes longer than
that."""


@dataclass(eq=False, repr=False)
class Transfers:
    """Moves blocks between device and host for all groups of one manager.

    Attributes:
        guard: held by the caller; `keep_source` and `target_of` take it themselves.
        sources: what is being copied to the host, of the groups in ``window``.
    """

    backend: Backend
    host_pool: HostPool
    tensor_pool: TensorPool
    budget: DeviceBudget
    guard: Guard
    observers: Sequence[Observer]

    def __post_init__(self) -> None:
        self.sources = Sources(self.backend, self.host_pool, self.budget, self.observers)
        self.window = InFlightWindow[OffloadGroup](self.sources.release, self.budget)
        self.stats = StepStats()
        self.owners = ForeignOwners()
        self._said: set[str] = set()
        self.by_rows = False
        """Whether what no row names is saved without a record."""
        self.takes_targets = self.tensor_pool.keeps or self.backend.observes
        self._leases: set[Lease] = set()
        """Of blocks that have something to free; kept here, since nothing reports one that
        goes together with its block."""
        self._shared_bytes = self.host_pool.slab_bytes // _SLAB_SHARE

    # Device to host

    def measure(self, group: OffloadGroup) -> None:
        """Drop what is recomputed, and see what offloading the rest of a group would copy.

        Counts what is kept by choice, or is kept anyway.
        """
        moving: list[Block] = []
        owners, chooses = self.owners, group.rules.should_offload
        knows_any = bool(owners.known)
        drops_only = group.pick is not None and group.pick.drops_only
        num_bytes = 0
        for found in group.references:
            block = found()
            if block is None or block.flight is not None:
                continue
            if block.recipe is not None and self._drops(group, block):
                continue
            block_bytes, counted_bytes = block.num_bytes, block.counted_bytes
            if chooses is not None and not counted_bytes and not owners.knows(block):
                block.is_kept = block.is_kept or not chooses(block_bytes)
            if block.is_kept or drops_only:
                if group.pick is None:  # else the next call doesn't even see it
                    group.kept_bytes += block_bytes
                self._count_kept(block, "beyond the share that is offloaded")
                continue
            block.counted_bytes = block_bytes
            if knows_any and owners.knows(block):
                self.stats.externally_referenced_bytes += block_bytes - counted_bytes
            else:
                num_bytes += block_bytes
                if block.mover is not group:
                    block.mover, block.name = group, group.name
                    block.forced_by = ()  # the group that asked for it is kept
                moving.append(block)
        group.moving, group.num_bytes = moving, num_bytes

    def _drops(self, group: OffloadGroup, block: Block) -> bool:
        """Drop a block that has a recipe, if its unit is recomputed and it can be; say whether."""
        recipe = block.recipe
        assert recipe is not None
        is_dropped = block.released  # with a group before this, which shares it
        num_bytes = block.num_bytes
        if not is_dropped:
            units = group.rules.recompute
            is_dropped = units is None or recipe.unit in units
            refusal = "something else keeps it alive" if self.owners.knows(block) else ""
            refusal = refusal or recipe.bind(block, drops=is_dropped)
            if refusal:
                block.recipe = None
                refused = self.stats.refused_recipe_bytes
                refused[refusal] = refused.get(refusal, 0) + num_bytes
                if self.by_rows and refusal == INPUT_NOT_SAVED and recipe.unit not in self._said:
                    self._said.add(recipe.unit)
                    _logger.warning(
                        "rows: what %r returns is kept: it doesn't save what it takes, so that "
                        "to recompute it would take as much memory",
                        recipe.unit,
                    )
                return False
        if not is_dropped:
            block.recipe = None
            return False
        needs = tuple(sorted(recipe.needs() - {group.key}))
        group.recomputed += (RecomputeUnit(recipe.unit, num_bytes, needs),)
        group.needs += needs
        if not block.released:
            for observer in self.observers:
                observer.block_offloads(block, _region_of(block))
            self.sources.drop(block, group.label)
            if group.pick is not None and group.pick.drops_only:
                block.name = recipe.unit  # what one call saves may be of several
            name, dropped = block.name, group.dropped_bytes
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
            self._count_kept(block, reason)
        group.advance(RESIDENT)

    def _count_kept(self, block: Block, reason: str) -> None:
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
        backend, observers, by_name = self.backend, self.observers, self.stats.by_name
        moving: list[Block] = []
        for block in group.moving:
            block.address = address = block.alias.untyped_storage().data_ptr()
            if address:
                moving.append(block)
        group.moving = ()
        reused: list[Event] = []
        moving, regions, hosts = self._take_host(group, moving, reused)
        if not moving:
            group.advance(RESIDENT)
            return
        aliases = [block.alias for block in moving]
        sources = [_region_of(block) if block.spec[1] is None else block.alias for block in moving]
        streams = [block.stream for block in moving]
        flight = Flight(group, list(map(ref, moving)), streams, aliases)
        produced: list[Event] = []
        num_bytes, is_ready = 0, True
        for block, region, host in zip(moving, regions, hosts, strict=False):
            block.lease = lease = Lease(block, self.guard.left.append)
            lease.free, lease.group, lease.region = self.free, block.group, region
            self._leases.add(lease)
            block.host, block.flight = host, flight
            num_bytes += block.num_bytes
            by_name[block.name].offloaded_bytes += block.num_bytes
            if block.ready is None:
                is_ready = False
            else:
                _add(block.ready, produced)
        if observers or backend.observes:
            self._report_offloads(group, moving, sources)
        pairs = list(zip(hosts, sources, strict=True))
        d2h_stream = backend.d2h_stream
        if not is_ready:
            backend.wait_compute(d2h_stream, Wait.W1)
            here = backend.compute_stream()  # the forward may be over
            produced += [backend.record(one) for one in dict.fromkeys(streams) if one is not here]
        for event in produced:
            backend.wait(d2h_stream, event, Wait.W1)
        for event in reused:
            backend.wait(d2h_stream, event, Wait.W5)
        for observer in observers:
            observer.copy_starts("d2h")
        flight.d2h = backend.copy(pairs, d2h_stream, self._label(group))
        for observer in observers:
            observer.copy_issued("d2h", pairs, group)
        self.sources.hold(flight, num_bytes)
        self.window.add(group, len(pairs))
        group.advance(OFFLOADING)
        rules = group.rules
        if rules.max_inflight_groups is not None:
            self.window.limit(rules.max_inflight_groups, lambda one, _: one.name == group.name)
        if rules.max_inflight_blocks is not None:
            self.window.limit(rules.max_inflight_blocks, lambda _, num_blocks: num_blocks)

    def _report_offloads(
        self, group: OffloadGroup, blocks: Sequence[Block], sources: Sequence[torch.Tensor]
    ) -> None:
        """Report to the observers that these blocks leave."""
        backend = self.backend
        for block, source in zip(blocks, sources, strict=True):
            if backend.observes and block.ready is None:
                with backend.computing_on(block.stream):
                    backend.note_produced(source, group.label)
            for observer in self.observers:
                observer.block_offloads(block, source)

    def _take_host(
        self, group: OffloadGroup, moving: list[Block], reused: list[Event]
    ) -> tuple[list[Block], Iterable[HostRegion], Sequence[torch.Tensor]]:
        """Return the blocks for which there is host memory, each with it; add its last readers."""
        pool, owners = self.host_pool, group.references
        if len(moving) > 1 and group.num_bytes <= self._shared_bytes:
            region = pool.allocate_views([block.spec for block in moving])
            if region is not None:
                region.owners = owners
                if region.ready_event is not None:
                    reused.append(region.ready_event)
                return moving, repeat(region), region.views
        taken: list[Block] = []
        regions: list[HostRegion] = []
        num_unpinnable = pool.stats.num_unpinnable
        for block in moving:
            found = pool.allocate(*block.spec)
            if found is None:
                self.stats.num_refused_blocks += 1
                self.stats.refused_bytes += block.num_bytes - block.kept_bytes
                self._count_kept(block, "the host memory is full")
                continue
            found.owners = owners
            if found.ready_event is not None:
                _add(found.ready_event, reused)
            taken.append(block)
            regions.append(found)
        self.stats.num_unpinnable_blocks += pool.stats.num_unpinnable - num_unpinnable
        return taken, regions, [region.tensor for region in regions]

    def cancel(self, group: OffloadGroup, *, is_late: bool) -> None:
        """Leave a group on the device whose copies are in flight."""
        self.stats.num_cancelled_offloads += is_late
        for block in group.blocks():
            self.sources.cancel(block)
        group.advance(RESIDENT)

    # Host to device

    def reload(self, group: OffloadGroup, *, is_late: bool) -> bool:
        """Issue the reload of a group that is on the host; see `Actions.reload`.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it, and it is late.
        """
        if is_late:
            self.stats.num_late_reloads += 1
            self.stats.by_name[group.name].num_late_reloads += 1
        return self._reload(group, group.blocks(), may_fail=not is_late)

    def _reload(self, group: OffloadGroup, blocks: Iterable[Block], *, may_fail: bool) -> bool:
        """Issue the reload of blocks; return False where there is no memory, and that may be."""
        # Backward is on forward's streams: each gets the memory of what it will read.
        moving: defaultdict[Stream, list[Block]] = defaultdict(list)
        for block in blocks:
            is_on_host = block.region is not None and block.released
            if is_on_host and (block.storage_ref is None or not self._revive(block)):
                moving[block.stream].append(block)
        batches: list[tuple[Any, ...]] = []
        for stream, same in moving.items():
            hosts: list[Any] = [block.host for block in same]
            with self.backend.computing_on(stream):
                targets = self._allocate_targets(hosts, may_fail=may_fail)
            if targets is None:
                return False
            batches.append((stream, same, hosts, *targets))
        if group.state is ON_HOST:
            group.advance(RELOADING)
        for stream, *batch in batches:
            with self.backend.computing_on(stream):
                self._issue_reload(group, *batch)
        return True

    def _allocate_targets(
        self, hosts: Sequence[torch.Tensor], *, may_fail: bool
    ) -> tuple[list[torch.Tensor], list[Event]] | None:
        """Allocate what host tensors are reloaded to; None where that may fail and does."""
        if torch.is_inference_mode_enabled():  # an evaluation between forward and backward
            with torch.inference_mode(False):
                return self._allocate_targets(hosts, may_fail=may_fail)
        try:
            return self.tensor_pool.allocate(hosts)
        except torch.OutOfMemoryError:
            self.stats.num_memory_shortages += 1
        # What is in flight is the only memory that is the engine's to give.
        self.window.drain()
        self.tensor_pool.clear()
        with contextlib.suppress(*[torch.OutOfMemoryError] if may_fail else []):
            return self.tensor_pool.allocate(hosts)
        return None

    def _issue_reload(
        self,
        group: OffloadGroup,
        blocks: Sequence[Block],
        hosts: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        last_uses: Sequence[Event],
    ) -> None:
        backend, observers = self.backend, self.observers
        pairs = list(zip(targets, hosts, strict=True))
        h2d_stream = backend.h2d_stream
        if len(last_uses) < len(targets):
            backend.wait_compute(h2d_stream, Wait.W6)
        for event in last_uses:
            backend.wait(h2d_stream, event, Wait.W6)
        for flight in dict.fromkeys([block.flight for block in blocks]):
            assert flight is not None
            backend.wait(h2d_stream, flight.d2h, Wait.W3)
        for observer in observers:
            for target in targets:
                observer.tensor_reloaded(target)
            observer.copy_starts("h2d")
        event = backend.copy(pairs, h2d_stream, self._label(group))
        for observer in observers:
            observer.copy_issued("h2d", pairs, group)
        reload = Reload(event, backend.compute_stream(), targets)
        read: list[HostRegion] = []
        by_name = self.stats.by_name
        for block, target in zip(blocks, targets, strict=True):
            block.target = target  # from here on this is the copy that counts
            read.append(block.take_region())
            assert block.lease is not None
            block.reload = block.lease.reload = reload
            if self.takes_targets:
                block.lease.target = target
            by_name[block.name].reloaded_bytes += block.num_bytes
        for region, users in groupby(read):
            self.host_pool.free(region, event, len(list(users)))

    def _revive(self, block: Block) -> bool:
        """Take a block's bytes from its source where something else has kept that alive.

        They are the bytes that autograd alone would have used, whatever may have written to them
        since.
        """
        source = block.live_source()
        if source is None:
            return False
        block.target = source
        self.host_pool.free(block.take_region(), None)
        self.stats.externally_referenced_bytes += block.num_bytes
        return True

    def wait_reloads(self, groups: Iterable[OffloadGroup]) -> None:
        """Make the compute stream wait for the reloads of these groups that are under way."""
        for group in groups:
            for block in group.blocks():
                if block.target is not None:
                    self._wait_reloaded(block)

    def target_of(self, block: Block) -> torch.Tensor:
        """Return a released block's reload target, ordered before what the program does next.

        Raises:
            StateError: the data went with a step that was aborted.
            CorruptionError: in checking mode, reloaded bits differ from offloaded ones.
            torch.OutOfMemoryError: the device has no memory for it.
        """
        target = block.target
        if target is not None and not self.observers and not self.backend.observes:
            reload = block.reload  # this takes no lock, because it only looks
            if reload is None or (
                reload.is_waited and self.backend.compute_stream() is reload.stream
            ):
                return target
        return self._ready_target(block) if block.recipe is None else self._recomputed_target(block)

    def _recomputed_target(self, block: Block) -> torch.Tensor:
        """Recompute a dropped block, once for all who need it on a stream.

        Its function is the program's, so no lock is held. What something else has kept all the time
        is taken from there.
        """
        recipe, stream = block.recipe, self.backend.compute_stream()
        assert recipe is not None
        if block.target is not None:
            return block.target
        if block.made is None:
            block.target = block.live_source()
            if block.target is not None:
                self.stats.externally_referenced_bytes += block.target.nbytes
                return block.target
        if block.made is None or block.made[0] is not stream:
            for observer in self.observers:
                observer.recompute_starts(block)
            made = recipe.run()
            for observer in self.observers:
                observer.recomputed(block, made)
            if block.low or not made.is_contiguous():
                region = made.new_empty(0, dtype=torch.uint8)
                size = (block.high - block.low,)
                made = region.set_(made.untyped_storage(), block.low, size, (1,))
            block.made = stream, made
        target = block.made[1]
        for observer in self.observers:
            observer.block_read(block, target)
        return target

    @guarded
    def _ready_target(self, block: Block) -> torch.Tensor:
        """Reload what is not reloaded yet, the whole group if it is on the host; and wait."""
        group = block.group
        if block.target is None:
            if block.region is None:
                raise StateError(
                    f"group {group.label} was saved in a step that was aborted; its data is "
                    "gone, run the forward again"
                )
            if group.state is ON_HOST:
                self.reload(group, is_late=True)
            if block.target is None:
                self._reload(group, [block], may_fail=False)
        assert block.target is not None
        self._wait_reloaded(block)
        if self.backend.observes and block.reload is not None:  # else it is the program's memory
            self.backend.note_consumed(block.target, group.label)
        for observer in self.observers:
            observer.block_read(block, block.target)
        return block.target

    def _wait_reloaded(self, block: Block) -> None:
        if block.reload is not None:  # else it never left the device
            assert block.target is not None
            self._wait(block.reload, block.group, block.target)
        if block.group.state is RELOADING:
            block.group.advance(RELOADED)

    def _wait(self, reload: Reload, group: OffloadGroup, target: torch.Tensor) -> None:
        """Make the compute stream wait for a reload whose target it reads."""
        backend = self.backend
        stream = backend.compute_stream()
        is_home = stream is reload.stream
        if is_home and reload.is_waited:
            return
        for observer in self.observers:
            observer.wait_starts()
        backend.wait(stream, reload.event, Wait.W4)
        for observer in self.observers:
            observer.wait_issued(Wait.W4, group)
        if is_home:
            reload.is_waited, reload.targets = True, ()
        else:
            reload.is_read_on_other_stream = True
            backend.read_on(stream, target)

    # What records do with their blocks

    def read(self, block: Block, memory: torch.Tensor) -> None:
        """Know that the program reads the memory of a block now, on whatever stream."""
        stream = self.backend.compute_stream()
        if stream is not block.stream:
            self.backend.read_on(stream, memory)

    @guarded
    def keep_source(self, block: Block) -> None:
        """Keep a block on the device for a reader who is there before its release."""
        self.sources.cancel(block)

    def free(self, lease: Lease) -> None:
        """Free what dead blocks have left."""
        region, reload, target = lease.region, lease.reload, lease.target
        if region is not None:
            self.host_pool.free(region, None)
        if reload is not None and (target is not None or not reload.is_waited):
            self._free_target(lease.group, reload, target)
        self._leases.discard(lease)

    def _free_target(
        self, group: OffloadGroup, reload: Reload, target: torch.Tensor | None
    ) -> None:
        with self.backend.computing_on(reload.stream):  # to which the memory goes back
            if not reload.is_waited:
                # It is unread there; still the copy must not write into what was handed on.
                self._wait(reload, group, reload.targets[0])
            if target is None:
                return
            if self.backend.observes:
                sole_owner = num_owners(target.untyped_storage()) == 2  # target and the handle
                self.backend.note_freed(target, group.label, sole_owner=sole_owner)
            if self.tensor_pool.keeps and not reload.is_read_on_other_stream:
                self.tensor_pool.free(target)

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
        self.sources.abandon()
        self._leases = {lease for lease in self._leases if lease() is not None}
        for group in groups:
            group.moving, group.dropped_bytes = (), {}
            # A failed backward may leave its graph alive for long: its data goes now.
            for block in group.blocks():
                block.cancelled = True
                block.host = None
                if block.lease is not None:
                    block.lease.region = None
                if block.reload is not None or block.recipe is not None:
                    block.target = block.made = block.recipe = None
        self.host_pool.recover(_count_users)

    def _label(self, group: OffloadGroup) -> str:
        """Name a group for its copies; in full only where someone reads it."""
        return group.label if self.backend.observes else group.name


def _region_of(block: Block) -> torch.Tensor:
    """Return the bytes of a block that has its source."""
    source = block.alias
    if block.spec[1] is not None:
        return source
    region = torch.empty(0, dtype=torch.uint8, device=source.device)
    return region.set_(source.untyped_storage(), block.low, (block.num_bytes,), (1,))


def _add(event: Event, events: list[Event]) -> None:
    """Add an event unless it is the last; to wait for one twice changes nothing."""
    if not events or events[-1] is not event:
        events.append(event)


def _count_users(region: HostRegion) -> int:
    """Count the blocks that are alive and have their data in a region."""
    blocks = (found() for found in region.owners)
    return sum(block is not None and block.region is region for block in blocks)
