"""How fast a backend copies: each way alone, both ways at once, and with all ranks of the machine.

Bandwidth belongs to the machine and not to one GPU: so ranks measure alone one after the other,
then all together. Copies are timed by the device's clock, and count only while all directions copy.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_offload.backends import create_backend
from megatron_offload.backends.base import Backend, Wait
from megatron_offload.config import OffloadConfig
from megatron_offload.errors import OffloadError
from megatron_offload.machine.job_ranks import gather, rank_in
from megatron_offload.machine.profile import CopyRates, GpuProfile, PciPath, read_pci_path

BLOCK_BYTES = 128 * 1024**2
"""What one copy moves: starting it costs nothing, and two don't stay in a processor's cache."""

_NUM_COPIES = 6
"""In each round and direction; the first warms up. At 3 GB/s all rounds take 5 s, at 50 0.3 s."""

_NUM_ROUNDS = 3

_WAITS = {"d2h": Wait.W1, "h2d": Wait.W6}
"""What the first copy of a round waits for: whatever used its device memory before."""


class BandwidthError(OffloadError, RuntimeError):
    """Bandwidth can't be measured: memory is short or can't be pinned, or a process failed."""


def measure_gpus(
    num_gpus: int,
    *,
    config: OffloadConfig | None = None,
    block_bytes: int = BLOCK_BYTES,
    timeout_s: float = 120.0,
) -> tuple[GpuProfile, ...]:
    """Measure all GPUs that this process can use, by `measure_copies` in a process for each.

    This one opens no device, and none outlives the call. A process that fails, or takes longer than
    ``timeout_s``, is a `BandwidthError`. ``config`` names the backend; None takes CUDA.
    """
    config = config if config is not None else OffloadConfig(backend="cuda")
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_gpus, config, block_bytes, timeout_s, folder, results)
        context = mp.start_processes(
            _measure_one, arguments, num_gpus, join=False, daemon=True, start_method="spawn"
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise BandwidthError(f"the copies were not done within {timeout_s:g} s")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            last_line = str(error).strip().splitlines()[-1]
            message = f"measuring GPU {error.error_index} failed: {last_line}"
            raise BandwidthError(message) from error
        finally:
            for process in context.processes:
                process.kill()
                process.join(5.0)  # one that is stuck in the driver is left to the system
    return tuple(results.get())


def _measure_one(
    rank: int,
    num_ranks: int,
    config: OffloadConfig,
    block_bytes: int,
    timeout_s: float,
    folder: str,
    results: Any,
) -> None:
    """Be one rank: measure one GPU, in turn and together with the others."""
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks))  # all of them share the host's memory
    backend = create_backend(config, rank)
    if num_ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
    gpus = gather(measure_copies(backend, block_bytes=block_bytes))
    if num_ranks > 1:
        dist.destroy_process_group()
    if rank == 0:
        results.put(gpus)


def measure_copies(backend: Backend, *, block_bytes: int = BLOCK_BYTES) -> GpuProfile:
    """Measure what the backend's device gets, each number the median of a few rounds; collective.

    All ranks, of one machine, take turns and then copy together. Twice ``block_bytes`` is pinned,
    and taken on the device; all is given back. The link is read meanwhile, for idle GPUs run it
    slower. A rank that can't have so much memory, or can't pin it, is a `BandwidthError` on all.
    """
    link, problem = None, ""
    try:
        link = Link(backend, block_bytes)
    except BandwidthError as error:
        problem = str(error)
    # Whoever gave up now would leave the others waiting for the next turn.
    problems = gather(problem)
    if link is None or any(problems):
        link = None  # what holds the error must not hold the memory
        rank = next(rank for rank, each in enumerate(problems) if each)
        raise BandwidthError(f"rank {rank}: {problems[rank]}")
    alone = [0.0] * 4
    for turn in range(len(problems)):
        _meet(len(problems))
        if turn == rank_in():
            link.rates("d2h", "h2d")  # one that was idle has to wake
            alone = [*link.median("d2h"), *link.median("h2d"), *link.median("d2h", "h2d")]
    node = alone[2:]
    if len(problems) > 1:
        node = link.median("d2h", "h2d", before_each=lambda: _meet(len(problems)))
    rates = dict(zip(CopyRates.model_fields, [*alone, *node], strict=True))
    return GpuProfile(rates=CopyRates.model_validate(rates), pci=link.path)


def _meet(num_ranks: int) -> None:
    if num_ranks > 1:
        dist.barrier()


class Link:
    """Blocks of memory on both sides of a device's link."""

    def __init__(self, backend: Backend, block_bytes: int) -> None:
        device = backend.describe()
        self.path: PciPath | None = None
        """The link itself as it was in the last round."""
        self._address = device.pci_address if device is not None else None
        self._backend = backend
        self._block_bytes = block_bytes
        self._streams = {"d2h": backend.d2h_stream, "h2d": backend.h2d_stream}
        self._pairs = {}
        for name in self._streams:
            try:
                host = backend.empty_host(block_bytes).fill_(0)
                block = backend.empty_device(block_bytes).fill_(0)
            except (RuntimeError, MemoryError) as error:
                why = str(error).split("\n")[0]
                raise BandwidthError(f"two blocks of {block_bytes} bytes: {why}") from error
            self._pairs[name] = (host, block) if name == "d2h" else (block, host)

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
        self.path = read_pci_path(self._address)
        backend.sync_copies()
        first = ends[names[0]][0]
        ends_us = [[backend.sync_elapsed_us(first, end) for end in ends[name]] for name in names]
        return gbps_while_all_copy(ends_us, self._block_bytes)


def gbps_while_all_copy(ends_us: Sequence[Sequence[float]], block_bytes: int) -> list[float]:
    """Return each direction's bandwidth while all of them copied, in GB/s, by its copies' ends.

    That is from where the first copy of each has ended, which warms up, until one has made its
    last. Directions that took turns instead share all of the time.
    """
    start_us, end_us = max(ends[0] for ends in ends_us), min(ends[-1] for ends in ends_us)
    if start_us >= end_us:
        start_us, end_us = min(ends[0] for ends in ends_us), max(ends[-1] for ends in ends_us)
    rates = []
    for ends in ends_us:
        copied = np.interp([start_us, end_us], ends, np.arange(len(ends)) * block_bytes)
        rates.append(float(copied[1] - copied[0]) / (end_us - start_us) / 1e3)
    return rates
