"""Pinned host memory: a few large slabs, sub-allocated by bytes, and the one count of its bytes.

Pinned bytes never exceed the cap. What was freed is reusable at once: the event behind the last
copy that reads it protects it (W5; the engine waits for `HostRegion.ready_event`). Nothing depends
on how far the device has come, except `shrink`. The pool serves one thread.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from megatron_offload.backends.base import Backend, Event
from megatron_offload.core.units import format_bytes
from megatron_offload.memory.host_region import HostRegion as HostRegion
from megatron_offload.memory.host_region import Piece, aligned
from megatron_offload.memory.layout import ALIGNMENT_BYTES, ViewSpec

_logger = logging.getLogger(__name__)


class Ledger:
    """Bytes by name: now, and when there were most of them."""

    def __init__(self) -> None:
        self.by_name: Counter[str] = Counter()
        self.total_bytes = 0
        self.restart_peak()

    def restart_peak(self) -> None:
        """Let the peak begin with what there is now."""
        self._peak_bytes = self.total_bytes
        self._at_peak: Counter[str] | None = None  # as long as that is now

    def peak(self) -> tuple[int, dict[str, int]]:
        """Return the most bytes since the peak was restarted, and those by name."""
        found = self.by_name if self._at_peak is None else self._at_peak
        return self._peak_bytes, dict(+found)  # without zeros

    def add(self, name: str, num_bytes: int) -> None:
        """Count bytes, or count them no more where ``num_bytes`` is negative."""
        if num_bytes < 0 and self._at_peak is None:
            self._at_peak = self.by_name.copy()
        self.by_name[name] += num_bytes
        self.total_bytes += num_bytes
        if self.total_bytes > self._peak_bytes:
            self._peak_bytes, self._at_peak = self.total_bytes, None

    def clear(self) -> None:
        """Count from zero; the peak remains."""
        self._at_peak = self.by_name if self._at_peak is None else self._at_peak
        self.by_name, self.total_bytes = Counter(), 0


@dataclass(slots=True)
class HostPoolStats:
    """What a `HostPool` holds, each region rounded up to `ALIGNMENT_BYTES`."""

    in_use_bytes: int = 0
    """Bytes of live regions."""
    peak_in_use_bytes: int = 0
    """The most since `HostPool.restart_peaks`."""
    slab_bytes_total: int = 0
    """Bytes that are pinned now."""
    peak_slab_bytes: int = 0
    """The most that were."""
    num_unpinnable: int = 0
    """Requests for which the cap had room, but whose memory could not be pinned."""


class HostPool:
    """Allocates pinned host memory by bytes.

    Args:
        backend: pins the slabs and answers whether events are done.
        slab_bytes: slabs are at least this large, as far as the cap allows and such can be pinned.
        cap_bytes: most bytes that may be pinned, or what says it; 0 allocates nothing.
    """

    def __init__(
        self, backend: Backend, *, slab_bytes: int, cap_bytes: int | Callable[[], int]
    ) -> None:
        self._cap_bytes = cap_bytes
        self.slab_bytes = aligned(slab_bytes)
        self.alone = Ledger()  # the bytes of it that are nowhere else, and those to be recomputed
        self.stats = HostPoolStats()
        self.last_pin_error = ""  # text: an exception keeps its frames, and what they hold
        self.is_closed = False
        self._backend = backend
        self._slabs: list[Piece] = []  # the first piece of each
        self._slabs_of_graphs: list[Piece] = []
        # Free pieces by exact size, the longest free first: its last H2D copy is likeliest to be
        # over, so that the next D2H copy needn't wait for it.
        self._free: defaultdict[int, deque[Piece]] = defaultdict(deque)
        self._may_coalesce = False
        self._num_reads = 0
        # What of the pinned bytes was in use when they were last too few: pieces waste some.
        self._full_share = 1.0
        # The smallest slab that could not be pinned: nothing as large is tried again.
        self._unpinnable_bytes = math.inf
        self._warned_of: set[bool] = set()

    @property
    def cap_bytes(self) -> int:
        """Most bytes that may be pinned by now."""
        return self._cap_bytes if isinstance(self._cap_bytes, int) else self._cap_bytes()

    def allocate(
        self, num_bytes: int, like: tuple[torch.Size, torch.dtype] | None = None
    ) -> HostRegion | None:
        """Allocate ``num_bytes``, or return None when memory is short, which is warned of once."""
        region = self.allocate_views([(num_bytes, like)])
        if region is None:
            self._refuse(num_bytes)
        return region

    def allocate_views(self, specs: Sequence[ViewSpec]) -> HostRegion | None:
        """Allocate memory for several tensors, each aligned; None when it is short, uncounted.

        Each part has bytes. A pool that is closed is a `ValueError`.
        """
        if self.is_closed:
            raise ValueError("the host pool is closed")
        key = tuple(specs)
        size_bytes = ALIGNMENT_BYTES * sum([-(-many // ALIGNMENT_BYTES) for many, _ in key])
        same_size = self._free.get(size_bytes)
        piece = same_size.popleft() if same_size else self._find(size_bytes)
        if piece is None:
            return None
        stats = self.stats
        stats.in_use_bytes += size_bytes
        if stats.in_use_bytes > stats.peak_in_use_bytes:
            stats.peak_in_use_bytes = stats.in_use_bytes
        views = piece.views.get(key) or piece.show(key)
        region = piece.region = HostRegion(piece, views, size_bytes, piece.event, len(specs))
        return region

    def free(self, region: HostRegion, after: Event | None, num_views: int = 1) -> None:
        """Free parts of a region; with the last, its bytes may be allocated again at once.

        ``after`` is the event behind the last H2D copy out of it; None leaves the former users' in
        force. All events are of one stream, and come in its order: the newest stands for those
        before it where neighbours are joined. A second free is a `ValueError`.
        """
        piece = region._piece
        if piece is None:
            raise ValueError(f"a region of {region.size_bytes} bytes was freed before")
        if after is not None and piece.turn >= 0:
            self._num_reads += 1
            piece.event, piece.turn = after, self._num_reads
        region.num_users -= num_views
        if region.num_users > 0:
            return
        region._piece = piece.region = None
        self.stats.in_use_bytes -= piece.num_bytes
        for name, num_bytes in region.alone_bytes:
            self.alone.add(name, -num_bytes)
        if not self.is_closed and piece.turn >= 0:
            self._may_coalesce = True
            self._free[piece.num_bytes].append(piece)

    def count_alone(self, region: HostRegion, name: str, num_bytes: int) -> None:
        """Count bytes of a region that are nowhere else from here on, under a name."""
        region.alone_bytes += ((name, num_bytes),)
        self.alone.add(name, num_bytes)

    def regions(self) -> Iterator[HostRegion]:
        """Yield what is allocated."""
        for slab in self._slabs:
            yield from (piece.region for piece in slab if piece.region is not None)

    def restart_peaks(self) -> None:
        """Let the peaks of all counts begin with what there is now."""
        self.stats.peak_in_use_bytes = self.stats.in_use_bytes
        self.alone.restart_peak()

    def shrink(self, keep_bytes: int = 0) -> int:
        """Free slabs that are free, copied out of, and over ``keep_bytes``; return how much.

        Copies into a region that was freed before they ran are not known here: the caller waits for
        those first (`Backend.sync_copies`). What couldn't be pinned may be tried again.
        """
        self._coalesce()
        before_bytes, gone = self.stats.slab_bytes_total, list[Piece]()
        for slab in list(self._slabs):
            left_bytes = self.stats.slab_bytes_total - slab.num_bytes
            is_free = slab.region is None and slab.next is None
            is_over = slab.event is None or self._backend.is_done(slab.event)
            if is_free and is_over and left_bytes - self.bytes_of_graphs >= keep_bytes:
                self._free[slab.num_bytes].remove(slab)
                self._slabs.remove(slab)
                gone.append(slab)
                self.stats.slab_bytes_total = left_bytes
            del slab
        self._backend.discard(gone)
        self._unpinnable_bytes = math.inf
        return before_bytes - self.stats.slab_bytes_total

    def prepare(self, num_bytes: int) -> None:
        """Let so much more be pinned quickly, as far as the cap allows; 0 lets what is left go."""
        most_bytes = min(num_bytes, self.cap_bytes - self.stats.slab_bytes_total)
        self._backend.prepare_host(self.slab_bytes, max(0, -(-most_bytes // self.slab_bytes)))

    def pin_prepared(self) -> None:
        """Pin what is ready of that: little at a time, it delays no step."""
        for _ in range(self._backend.num_host_prepared):
            room_bytes = self.cap_bytes - self.stats.slab_bytes_total
            if room_bytes < self.slab_bytes or not self._pin(self.slab_bytes):
                break

    def pinned_for(self, in_use_bytes: int) -> int:
        """Return what has to be pinned for so much in use, as far as this pool has seen."""
        return int(in_use_bytes / self._full_share)

    def forget_events(self) -> None:
        """Wait for no copy out of here any more: when all are over, and a capture begins."""
        for piece in chain.from_iterable(self._slabs):
            piece.event = None

    def leave_to_graph(self) -> None:
        """No longer allocate what is pinned now: each replay of a captured graph writes into it.

        It counts as pinned, and is there until `close`, since no event says when a graph goes.
        """
        for piece in chain.from_iterable(self._slabs):
            piece.turn = -1
        self._slabs_of_graphs += self._slabs
        self._slabs.clear()
        self._free.clear()
        self._unpinnable_bytes = math.inf  # of what the capture has refused

    @property
    def bytes_of_graphs(self) -> int:
        """Bytes that are pinned for captured graphs."""
        return sum(slab.base.nbytes for slab in self._slabs_of_graphs)

    def recover(self, count_users: Callable[[HostRegion], int]) -> None:
        """Put the books right after a call that an exception cut short; no copy is under way.

        ``count_users`` says how many parts of a region are still allocated.
        """
        stats = self.stats
        stats.in_use_bytes = 0
        stats.slab_bytes_total = self.bytes_of_graphs
        self.alone.clear()
        for slab in self._slabs:
            stats.slab_bytes_total += slab.base.nbytes
            for piece in slab:
                end = piece.base.nbytes if piece.next is None else piece.next.offset
                piece.num_bytes = end - piece.offset
                region = piece.region
                if region is None:
                    continue
                region.num_users = count_users(region)
                if region.num_users:
                    stats.in_use_bytes += region.size_bytes
                    for name, num_bytes in region.alone_bytes:
                        self.alone.add(name, num_bytes)
                else:
                    region._piece = piece.region = None  # a late free is an error
        self._may_coalesce = True
        self._coalesce()

    def close(self) -> None:
        """Wait for the copies under way and free all slabs. Twice is fine.

        A region that is still out keeps its slab alive, and may be freed late.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._backend.sync_copies()
        self._slabs.clear()
        self._slabs_of_graphs.clear()
        self._free.clear()
        self.stats.slab_bytes_total = 0

    # Where a piece comes from when none of its exact size is free.

    def _find(self, size_bytes: int) -> Piece | None:
        """Cut a piece out of the smallest larger one, after coalescing, or out of a new slab."""
        if not self.stats.in_use_bytes:
            self._coalesce()  # a step of other sizes begins, for which pieces of the last are small
        piece = self._cut_best_fit(size_bytes)
        if piece is None:
            self._coalesce()
            piece = self._cut_best_fit(size_bytes)
        if piece is None and self._add_slab(size_bytes):
            piece = self._cut_best_fit(size_bytes)
        return piece

    def _cut_best_fit(self, size_bytes: int) -> Piece | None:
        sizes = [size for size, pieces in self._free.items() if pieces and size >= size_bytes]
        if not sizes:
            return None
        piece = self._free[min(sizes)].popleft()
        if piece.num_bytes > size_bytes:
            rest = piece.cut(size_bytes)
            self._free[rest.num_bytes].append(rest)
        return piece

    def _coalesce(self) -> None:
        """Join free neighbours, and list anew what is free."""
        if not self._may_coalesce:
            return
        self._may_coalesce = False
        self._free.clear()
        for piece in chain.from_iterable(self._slabs):
            if piece.region is None:
                while piece.next is not None and piece.next.region is None:
                    piece.join(piece.next)
                self._free[piece.num_bytes].append(piece)

    def _add_slab(self, size_bytes: int) -> bool:
        """Pin a slab that holds ``size_bytes``: a full one, else just what was asked."""
        free_bytes = self.cap_bytes - self.stats.slab_bytes_total
        free_bytes -= free_bytes % ALIGNMENT_BYTES
        if size_bytes > free_bytes:
            return False
        pinned_bytes = self.stats.slab_bytes_total - self.bytes_of_graphs + size_bytes
        self._full_share = min(1.0, (self.stats.in_use_bytes + size_bytes) / pinned_bytes)
        largest_bytes = max(size_bytes, min(self.slab_bytes, free_bytes))
        return self._pin(largest_bytes) or self._pin(size_bytes)

    def _pin(self, num_bytes: int) -> bool:
        if num_bytes >= self._unpinnable_bytes:
            return False
        try:
            tensor = self._backend.empty_host(num_bytes)
        except (RuntimeError, MemoryError) as error:
            self.last_pin_error = str(error) or type(error).__name__
            self._unpinnable_bytes = num_bytes
            return False
        slab = Piece(tensor, 0, num_bytes)
        self._slabs.append(slab)
        self._free[num_bytes].append(slab)
        stats = self.stats
        stats.slab_bytes_total += num_bytes
        stats.peak_slab_bytes = max(stats.peak_slab_bytes, stats.slab_bytes_total)
        return True

    def _refuse(self, num_bytes: int) -> None:
        """Warn once of why memory is short, with the numbers."""
        stats = self.stats
        pinned, asked = format_bytes(stats.slab_bytes_total), format_bytes(num_bytes)
        is_full = stats.slab_bytes_total + aligned(num_bytes) > self.cap_bytes
        if is_full:
            why = (
                f"host pool is full: asked {asked}, {format_bytes(stats.in_use_bytes)} in use, "
                f"{pinned} of {format_bytes(self.cap_bytes)} pinned; the tensors are kept on the "
                "device (raise host_memory_bytes or lower the fraction)"
            )
        else:
            stats.num_unpinnable += 1
            why = (
                f"host memory can't be pinned: asked {asked}, {pinned} pinned, error: "
                f"{self.last_pin_error}; the tensors are kept (lower host_memory_bytes "
                "or host_slab_bytes)"
            )
        if is_full not in self._warned_of:
            self._warned_of.add(is_full)
            _logger.warning(why)
