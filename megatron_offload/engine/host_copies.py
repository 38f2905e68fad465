"""What blocks have on the host: the regions they hold in the pinned pool, and the count of them.

Owns that a block holds a region, and the ledger of what lies on the host now and at most. Must not
know streams, or when a copy is issued: whoever gives a region back says behind which event.

Invariant: all that is counted is a region that some block holds. Read next:
`megatron_offload.memory.host_pool`.
"""

from __future__ import annotations

import weakref
from collections import Counter

from megatron_offload.backends.base import Event
from megatron_offload.engine.saved_tensor import Block, _Remains
from megatron_offload.engine.stats import StepStats
from megatron_offload.memory.host_pool import HostPool, HostRegion

__all__ = ["HostCopies"]


class HostCopies:
    """The host memory of all blocks of one manager.

    Counts are by name of the group that saved a block first, which may be another than the one that
    moves it. Many blocks of one group are counted at once: `add`, `release` and `remove` count
    alone, `free` gives a block's region back and counts it.

    Args:
        pool: lends the regions.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.host_bytes = 0
        """Host memory in use."""
        self.away_bytes = 0
        """The part of it whose device memory is released."""
        self.host_bytes_by_name: Counter[str] = Counter()
        self.away_bytes_by_name: Counter[str] = Counter()
        self._stats = StepStats()

    def begin_step(self, stats: StepStats) -> None:
        """Write peaks into ``stats`` from here on; what is still on the host stays counted."""
        self._stats = stats
        stats.peak_host_bytes = self.host_bytes
        stats.peak_host_bytes_by_name = dict(self.host_bytes_by_name)
        stats.peak_away_bytes = self.away_bytes
        stats.peak_away_bytes_by_name = dict(self.away_bytes_by_name)

    # Regions

    def take(self, block: Block) -> HostRegion | None:
        """Let a block hold a region, not counted yet; None where the host has no room."""
        region = self.pool.allocate(block.num_bytes)
        if region is not None:
            block.host = region
            region.owner = weakref.ref(block)
        return region

    def give_back(self, block: Block | _Remains, after: Event | None) -> None:
        """Give a block's region back and leave the count to `remove`.

        Args:
            block: holds one.
            after: the event behind the last copy that reads the region, if one may be under way.
        """
        region, block.host = block.host, None
        assert region is not None
        self.pool.free(region, after)

    def free(self, block: Block | _Remains, after: Event | None) -> None:
        """Give a block's region back, and count it no more; see `give_back`."""
        self.give_back(block, after)
        self.remove(block.group.name, block.num_bytes, were_away=block.released)

    def recover(self) -> None:
        """Take back what no living block holds, and count anew: after a failed step."""
        blocks = [region.owner() for region in self.pool.recover(_is_owned)]
        # Nothing of what is left is on the device.
        self.host_bytes_by_name = Counter()
        for block in blocks:
            self.host_bytes_by_name[block.group.name] += block.num_bytes
        self.away_bytes_by_name = self.host_bytes_by_name.copy()
        self.host_bytes = self.away_bytes = self.host_bytes_by_name.total()

    # The ledger

    def add(self, name: str, num_bytes: int) -> None:
        """Count host memory that a copy was issued into."""
        self.host_bytes_by_name[name] += num_bytes
        self.host_bytes += num_bytes
        if self.host_bytes > self._stats.peak_host_bytes:
            self._stats.peak_host_bytes = self.host_bytes
            self._stats.peak_host_bytes_by_name = dict(self.host_bytes_by_name)

    def release(self, name: str, num_bytes: int) -> None:
        """Count bytes that are on the host alone from here on."""
        self.away_bytes_by_name[name] += num_bytes
        self.away_bytes += num_bytes
        if self.away_bytes > self._stats.peak_away_bytes:
            self._stats.peak_away_bytes = self.away_bytes
            self._stats.peak_away_bytes_by_name = dict(self.away_bytes_by_name)

    def remove(self, name: str, num_bytes: int, *, were_away: bool) -> None:
        """Count host memory that was given back."""
        self.host_bytes_by_name[name] -= num_bytes
        self.host_bytes -= num_bytes
        if were_away:
            self.away_bytes_by_name[name] -= num_bytes
            self.away_bytes -= num_bytes


def _is_owned(region: HostRegion) -> bool:
    """Whether a block that is alive, of an earlier step, has its data there."""
    block = region.owner() if region.owner is not None else None
    return block is not None and block.host is region
