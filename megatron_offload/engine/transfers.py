"""The copies to the host.

Every copy of the engine is issued here or in `megatron_offload.engine.reloads`; the six waits are
made there and in `megatron_offload.engine.releases`, each at one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from megatron_offload.backends.base import Event, Pair, Stream, Wait
from megatron_offload.core.group import RESIDENT
from megatron_offload.engine.block_state import IN_FLIGHT, MOVES
from megatron_offload.engine.group import Block, Lease, OffloadGroup
from megatron_offload.engine.releases import Releases
from megatron_offload.engine.stats import StepStats
from megatron_offload.memory.host_pool import HostRegion

_SLAB_SHARE = 16
"""Blocks of a group share a host region where they are at most this fraction of a slab: what is
larger is allocated piece by piece, which fills slabs better, and copying it takes longer than
that."""

_Taken: TypeAlias = tuple[HostRegion, Sequence[Block], Sequence[torch.Tensor]]
"""Host memory, the blocks that have a part of it, and these parts."""


class Transfers(Releases):
    """Moves blocks between device and host for all groups of one manager."""

    def keep(self, group: OffloadGroup, reason: str) -> None:
        """Leave a group whose forward is over on the device."""
        moving, group.moving = group.moving, ()
        for block in moving:
            self.count_kept(block, reason)
        group.advance(RESIDENT)

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

    # Steps

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
