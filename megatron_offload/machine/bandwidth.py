"""How fast a backend copies: each way alone, both ways at once, and with all ranks of the machine.

Bandwidth belongs to the machine and not to one GPU: where host memory is the limit, what a GPU gets
alone says little about a step in which all copy. So ranks measure alone one after the other, then
all together. Copies are timed by the device's own clock, and count only while all directions that
are measured copy.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch

from megatron_offload.backends.base import Backend, Wait
from megatron_offload.errors import ConfigError, OffloadError
from megatron_offload.machine.job_ranks import JobRanks
from megatron_offload.machine.pci import PciPath, read_pci_path
from megatron_offload.machine.profile import CopyRates, GpuProfile
from megatron_offload.memory.host_pool import HostPool

BLOCK_BYTES = 128 * 1024**2
"""What one copy moves: large enough that starting it costs nothing, and that two of them don't stay
in a processor's cache."""

_NUM_COPIES = 6
"""In each round and direction; the first warms up. At 3 GB/s all rounds take 5 s, at 50 0.3 s."""

_NUM_ROUNDS = 3

_WAITS = {"d2h": Wait.W1, "h2d": Wait.W6}
"""What the first copy of a round waits for: whatever used its device memory before."""


class BandwidthError(OffloadError, RuntimeError):
    """Bandwidth can't be measured: memory is short or can't be pinned, or a process failed."""


def measure_gpu(
    backend: Backend,
    pci_address: str | None,
    *,
    block_bytes: int = BLOCK_BYTES,
    ranks: JobRanks | None = None,
) -> GpuProfile:
    """Measure a GPU as `measure_copies` does, and read its links meanwhile; collective.

    Args:
        backend: the GPU's.
        pci_address: the GPU's place on the bus; None where it isn't known.
        block_bytes: as for `measure_copies`.
        ranks: likewise.

    Raises:
        BandwidthError: as for `measure_copies`.
    """
    seen: list[PciPath | None] = []
    rates = measure_copies(
        backend,
        block_bytes=block_bytes,
        while_copying=lambda: seen.append(read_pci_path(pci_address)),
        ranks=ranks,
    )
    return GpuProfile(rates=rates, pci=seen[-1])


def measure_copies(
    backend: Backend,
    *,
    block_bytes: int = BLOCK_BYTES,
    while_copying: Callable[[], None] | None = None,
    ranks: JobRanks | None = None,
) -> CopyRates:
    """Measure what the backend's device gets, each number the median of a few rounds; collective.

    Memory is given back: the host's to the system, the device's to the backend's allocator.

    Args:
        backend: takes the memory and makes the copies.
        block_bytes: what each copy moves; twice that is pinned, and taken on the device.
        while_copying: called once in each round, with copies under way.
        ranks: all that measure together; None for all there are.

    Raises:
        BandwidthError: a rank can't have so much memory, or can't pin it; on all ranks.
    """
    ranks = ranks if ranks is not None else JobRanks()
    with contextlib.ExitStack() as stack:
        link, problem = None, ""
        try:
            pool = HostPool(backend, slab_bytes=block_bytes, cap_bytes=None)
            stack.enter_context(contextlib.closing(pool))
            link = _Link(backend, pool, block_bytes, while_copying)
        except (BandwidthError, ConfigError) as error:
            problem = str(error)
        # Whoever gave up now would leave the others waiting for the next turn.
        problems = ranks.gather(problem)
        if link is None or any(problems):
            link = None  # what holds the error must not hold the memory
            rank = next(rank for rank, each in enumerate(problems) if each)
            raise BandwidthError(f"rank {rank}: {problems[rank]}")
        alone = [0.0] * 4
        for turn in range(ranks.num_turns):
            ranks.meet()
            if turn == ranks.turn:
                link.rates("d2h", "h2d")  # one that was idle has to wake
                alone = [*link.median("d2h"), *link.median("h2d"), *link.median("d2h", "h2d")]
        node = alone[2:]
        if ranks.num_turns > 1:
            node = link.median("d2h", "h2d", before_each=ranks.meet)
    return CopyRates.model_validate(dict(zip(CopyRates.model_fields, [*alone, *node], strict=True)))


class _Link:
    """Blocks of memory on both sides of a device's link."""

    def __init__(
        self,
        backend: Backend,
        pool: HostPool,
        block_bytes: int,
        while_copying: Callable[[], None] | None,
    ) -> None:
        self._backend = backend
        self._block_bytes = block_bytes
        self._while_copying = while_copying
        self._streams = {"d2h": backend.d2h_stream, "h2d": backend.h2d_stream}
        self._pairs = {}
        for name in self._streams:
            region = pool.allocate(block_bytes)
            if region is None:
                why = pool.last_pin_error or f"{pool.cap_bytes} may be used"
                raise BandwidthError(f"{2 * block_bytes} bytes of host memory can't be had: {why}")
            region.tensor.fill_(0)
            try:
                device = backend.empty_device(block_bytes).fill_(0)
            except torch.OutOfMemoryError as error:
                why = str(error).split("\n")[0]
                raise BandwidthError(f"device memory can't be had: {why}") from error
            ends = (region.tensor, device)
            self._pairs[name] = ends if name == "d2h" else ends[::-1]

    def median(self, *names: str, before_each: Callable[[], None] = lambda: None) -> list[float]:
        """Return the median bandwidth of each direction over the rounds, in GB/s."""
        rounds = []
        for _ in range(_NUM_ROUNDS):
            before_each()
            rounds.append(self.rates(*names))
        return [statistics.median(rates) for rates in zip(*rounds, strict=True)]

    def rates(self, *names: str) -> list[float]:
        """Return the bandwidth of each direction in one round in which they copy at once."""
        backend = self._backend
        ends: dict[str, list[object]] = {name: [] for name in names}
        start = backend.record(backend.compute_stream())
        for name in names:
            backend.wait(self._streams[name], start, _WAITS[name])
        for _ in range(_NUM_COPIES):
            for name in names:
                backend.copy([self._pairs[name]], self._streams[name], "bandwidth")
                ends[name].append(backend.timestamp(self._streams[name]))
        if self._while_copying is not None:
            self._while_copying()
        backend.sync_copies()
        first = ends[names[0]][0]
        ends_us = [[backend.sync_elapsed_us(first, end) for end in ends[name]] for name in names]
        return gbps_while_all_copy(ends_us, self._block_bytes)


def gbps_while_all_copy(ends_us: Sequence[Sequence[float]], block_bytes: int) -> list[float]:
    """Return each direction's bandwidth while all of them copied, in GB/s.

    That is from where the first copy of each has ended, which warms up, until one has made its
    last. Directions that took turns instead share all of the time.

    Args:
        ends_us: for each direction, when each of its copies ended; at least two.
        block_bytes: what each copy moved.
    """
    start_us, end_us = max(ends[0] for ends in ends_us), min(ends[-1] for ends in ends_us)
    if start_us >= end_us:
        start_us, end_us = min(ends[0] for ends in ends_us), max(ends[-1] for ends in ends_us)
    rates = []
    for ends in ends_us:
        copied = np.interp([start_us, end_us], ends, np.arange(len(ends)) * block_bytes)
        rates.append(float(copied[1] - copied[0]) / (end_us - start_us) / 1e3)
    return rates
