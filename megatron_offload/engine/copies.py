"""The copies, to the host and back: every copy of the engine is issued here.

Of the six waits all but one are made here, each at one place; W2 is in
`megatron_offload.engine.transfers`. What something else has kept on the device all the time is
taken from there, and not copied back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from megatron_offload.backends.base import Backend, Event, Pair, Stream, Wait
from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import ON_HOST, RELOADING, RESIDENT
from megatron_offload.core.window import InFlightWindow
from megatron_offload.engine.block_state import EXTERNAL, IN_FLIGHT, MOVES, RELEASED, RELOADED
from megatron_offload.engine.group import Block, Lease, OffloadGroup, Reload
from megatron_offload.engine.guard import Guard
from megatron_offload.engine.observer import Direction, Observer
from megatron_offload.engine.stats import StepStats
from megatron_offload.memory.host_pool import HostPool, HostRegion
from megatron_offload.memory.storage_ref import num_owners

_SLAB_SHARE = 16
"""Blocks of a group share a host region where they are at most this fraction of a slab: what is
larger is allocated piece by piece, which fills slabs better, and copying it takes longer than
that."""

_Taken: TypeAlias = tuple[HostRegion, Sequence[Block], Sequence[torch.Tensor]]
"""Host memory, the blocks that have a part of it, and these parts."""


@dataclass(eq=False, repr=False)
class Copies:
    """Copies blocks of one manager's groups, and frees what they had.

    Attributes:
        guard: held by the caller.
        window: the groups whose copies to the host are in flight.
    """

    backend: Backend
    host_pool: HostPool
    budget: DeviceBudget
    guard: Guard
    observers: Sequence[Observer]
    window: InFlightWindow[OffloadGroup] = field(init=False)

    def __post_init__(self) -> None:
        self.stats = StepStats()
        self.step_number = 0
        self._leases: set[Lease] = set()
        """Of blocks that have something to free; kept here, since nothing reports one that
        goes together with its block."""

    def begin_step(self) -> None:
        """Count from zero; what is still on the host remains counted."""
        self.stats = StepStats()
        self.step_number += 1
        self.host_pool.restart_peaks()

    def counted(self) -> StepStats:
        """Return the counters of the step so far."""
        stats, pool = self.stats, self.host_pool
        stats.peak_host_bytes = pool.stats.peak_in_use_bytes
        stats.peak_released_bytes, stats.peak_released_bytes_by_name = pool.alone.peak()
        return stats

    # To the host

    def offload(self, group: OffloadGroup) -> None:
        """Issue the copies of the blocks that `measure` has found, and put them into the window.

        A block for which the host has no room is kept on the device, and so is one whose storage
        was emptied since: its user restores it before backward. Moves the group to
        OFFLOADING, or to RESIDENT where nothing is left to move.
        """
        backend = self.backend
        moving, group.moving = group.moving, ()
        taken = self._take_host(group, moving)
        if not taken:
            group.advance(RESIDENT)
            return
        copies: list[tuple[Lease, Stream, torch.Tensor]] = []
        group.copies = copies
        pairs: list[Pair] = []
        produced: dict[Event, None] = {}
        reused: dict[Event, None] = {}
        unready: dict[Stream, None] = {}
        num_bytes, left, free = 0, self.guard.left.append, self.free
        for region, blocks, hosts in taken:
            if region.ready_event is not None:
                reused[region.ready_event] = None
            for block, host in zip(blocks, hosts, strict=False):
                block.lease = lease = Lease(block, left)
                lease.free, lease.group, lease.region = free, group, region
                self._leases.add(lease)
                block.host = host
                block.state = MOVES[block.state, IN_FLIGHT]
                source = alias = block.aliases[0]
                if block.spec[1] is None:
                    source = block.source()
                stream = block.stream
                copies.append((lease, stream, alias))
                pairs.append((host, source))
                num_bytes += block.num_bytes
                if block.ready is not None:
                    produced[block.ready] = None
                else:
                    unready[stream] = None
                    if backend.observes:
                        with backend.computing_on(stream):
                            backend.note_produced(source, group.label)
                for observer in self.observers:
                    observer.block_offloads(block, source)
        self.stats.by_name[group.name].offloaded_bytes += num_bytes
        d2h_stream = backend.d2h_stream
        if unready:
            backend.wait_compute(d2h_stream, Wait.W1)
            unready.pop(backend.compute_stream(), None)  # the forward may be over
            for stream in unready:
                produced[backend.record(stream)] = None
        for event in produced:
            backend.wait(d2h_stream, event, Wait.W1)
        for event in reused:
            backend.wait(d2h_stream, event, Wait.W5)
        group.d2h = self._copy("d2h", pairs, group)
        self.window.add(group, num_bytes, len(pairs))
        rules = group.rules
        if rules.max_inflight_groups is not None:
            self.window.limit(rules.max_inflight_groups, lambda one, _: one.name == group.name)
        if rules.max_inflight_blocks is not None:
            self.window.limit(rules.max_inflight_blocks, lambda _, num_blocks: num_blocks)

    def _take_host(self, group: OffloadGroup, moving: Sequence[Block]) -> list[_Taken]:
        """Return host memory with the blocks for which there is some."""
        pool, stats = self.host_pool, self.stats
        found: list[Block] = []
        for block in moving:
            block.address = address = block.aliases[0].untyped_storage().data_ptr()
            if address:
                found.append(block)
        if found and group.num_bytes * _SLAB_SHARE <= pool.slab_bytes:
            region = pool.allocate_views([block.spec for block in found])
            if region is not None:
                return [(region, found, region.views)]
        taken: list[_Taken] = []
        num_unpinnable = pool.stats.num_unpinnable
        for block in found:
            region = pool.allocate(*block.spec)
            if region is not None:
                taken.append((region, [block], region.views))
                continue
            stats.num_refused_blocks += 1
            stats.refused_bytes += block.num_bytes - block.kept_bytes
            self.count_kept(block, "the host memory is full")
        stats.num_unpinnable_blocks += pool.stats.num_unpinnable - num_unpinnable
        return taken

    def count_kept(self, block: Block, reason: str) -> None:
        """Count a block as kept, but for what was counted of it before."""
        num_bytes = block.num_bytes - block.kept_bytes
        if num_bytes:
            block.kept_bytes = block.num_bytes
            self.stats.by_name[block.name].keep(num_bytes, reason)

    # And back

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
        moving: dict[Stream, list[Block]] = {}
        for block in blocks:
            is_gone = block.storage_ref is None
            if block.state is RELEASED and (is_gone or not self._finds_source(block)):
                moving.setdefault(block.stream, []).append(block)
        pairs: dict[Stream, list[Pair]] = {}
        for stream, same in moving.items():
            hosts: list[Any] = [block.host for block in same]
            with self.backend.computing_on(stream):
                found = self._allocate_targets(hosts, may_fail=may_fail)
            if found is None:
                return False
            pairs[stream] = list(zip(found, hosts, strict=True))
        if group.state is ON_HOST:
            group.advance(RELOADING)
        for stream, same in moving.items():
            with self.backend.computing_on(stream):
                self._issue_reload(group, same, pairs[stream])
        return True

    def _allocate_targets(
        self, hosts: Sequence[torch.Tensor], *, may_fail: bool
    ) -> list[torch.Tensor] | None:
        """Allocate what host tensors are reloaded to; None where that may fail and does."""
        if torch.is_inference_mode_enabled():  # an evaluation between forward and backward
            with torch.inference_mode(False):
                return self._allocate_targets(hosts, may_fail=may_fail)
        empty_like = self.backend.empty_device_like
        try:
            return [empty_like(host) for host in hosts]
        except torch.OutOfMemoryError:
            self.stats.num_memory_shortages += 1
        # What is in flight is the only memory that is the engine's to give.
        self.window.drain()
        with contextlib.suppress(*[torch.OutOfMemoryError] if may_fail else []):
            return [empty_like(host) for host in hosts]
        return None

    def _issue_reload(
        self, group: OffloadGroup, blocks: Sequence[Block], pairs: Sequence[Pair]
    ) -> None:
        backend, targets = self.backend, [target for target, _ in pairs]
        # [Note: a reload races its own copy to the host] W3 has no call. Only what was released is
        # reloaded: the stream that the block was saved on has waited for the copy to the host (W2),
        # and the reload is queued behind that stream (W6). From another stream, or before the
        # release, it would read host memory that is being written.
        backend.wait_compute(backend.h2d_stream, Wait.W6)
        for observer in self.observers:
            for target in targets:
                observer.tensor_reloaded(target)
        event = self._copy("h2d", pairs, group)
        reload = Reload(event, backend.compute_stream(), targets)
        num_read: dict[HostRegion, int] = {}
        for block, target in zip(blocks, targets, strict=True):
            lease = block.lease
            block.target, lease.reload = target, reload
            if backend.observes:
                lease.target = target
            # From here on the target is read, in whichever thread.
            block.state = MOVES[block.state, RELOADED]
            region = block.take_region()
            num_read[region] = num_read.get(region, 0) + 1
            self.stats.by_name[block.name].reloaded_bytes += block.num_bytes
        for region, number in num_read.items():
            self.host_pool.free(region, event, number)

    def _finds_source(self, block: Block) -> bool:
        """Take a block's bytes from its source, if something else has kept that alive.

        They are the bytes that autograd alone would have used, whatever may have written to them
        since.
        """
        source = block.live_source()
        if source is None:
            return False
        block.target = source
        block.state = MOVES[block.state, EXTERNAL]
        self.host_pool.free(block.take_region(), None)
        self.stats.externally_referenced_bytes += source.nbytes
        return True

    def wait_reloads(self, groups: Iterable[OffloadGroup]) -> None:
        """Make the compute stream wait for the reloads of these groups that are under way."""
        for group in groups:
            for block in group.blocks():
                if block.state is RELOADED:
                    self._wait_reload(block.lease, block.target)

    def _wait_reload(self, lease: Lease, target: torch.Tensor) -> None:
        """Make the compute stream wait for the reload of a target that it reads."""
        reload, stream = lease.reload, self.backend.compute_stream()
        is_home = stream is reload.stream
        if is_home and not reload.targets:
            return
        self.wait(lease.group, [stream], reload.event, Wait.W4)
        if is_home:
            reload.targets = ()
        else:
            self.backend.read_on(stream, target)

    def free(self, lease: Lease) -> None:
        """Free what a dead block has left."""
        backend, reload, target = self.backend, lease.reload, lease.target
        if lease.region is not None:
            self.host_pool.free(lease.region, None)
        if reload is not None and (target is not None or reload.targets):
            with backend.computing_on(reload.stream):  # to which the memory goes back
                # Unread it may be there; still the copy must not write into what was handed on.
                if reload.targets:
                    self._wait_reload(lease, reload.targets[0])
                if target is not None:
                    sole_owner = num_owners(target.untyped_storage()) == 2  # target and the handle
                    backend.note_freed(target, lease.group.label, sole_owner=sole_owner)
        self._leases.discard(lease)

    # Both ways

    def wait(self, group: OffloadGroup, streams: Iterable[Stream], event: Event, why: Wait) -> None:
        """Make streams of the program wait for a copy of a group."""
        for observer in self.observers:
            observer.wait_starts()
        for stream in streams:
            self.backend.wait(stream, event, why)
        for observer in self.observers:
            observer.wait_issued(why, group)

    def _copy(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> Event:
        """Queue copies of a group, named in full only where someone reads it."""
        backend = self.backend
        stream = backend.d2h_stream if direction == "d2h" else backend.h2d_stream
        for observer in self.observers:
            observer.copy_starts(direction)
        event = backend.copy(pairs, stream, group.label if backend.observes else group.name)
        for observer in self.observers:
            observer.copy_issued(direction, pairs, group)
        return event
