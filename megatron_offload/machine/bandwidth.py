"""How fast GPUs copy: each way alone, both ways at once, and with all GPUs of the machine.

Copies are timed by the device's clock, and count only while all directions copy.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from megatron_offload.backends import create_backend
from megatron_offload.backends.base import Backend, Event, Wait
from megatron_offload.config import OffloadConfig
from megatron_offload.errors import OffloadError
from megatron_offload.machine.profile import CopyRates

BLOCK_BYTES = 128 * 1024**2
"""What one copy moves: starting it costs nothing, and two don't fit into a processor's cache."""


class BandwidthError(OffloadError, RuntimeError):
    """Bandwidth can't be measured: memory is short or can't be pinned, or it takes too long."""


def measure_gpus(num_gpus: int, *, timeout_s: float = 120.0) -> tuple[CopyRates, ...]:
    """Measure GPUs by `measure_copies` in another process, so that this one opens no device.

    One that fails, or takes longer than ``timeout_s``, is a `BandwidthError`.
    """
    command = [sys.executable, "-m", __name__, str(num_gpus)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        rates, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise BandwidthError(f"the copies were not done within {timeout_s:g} s") from error
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)  # one that is stuck in the driver is left to the system
    if process.returncode:
        last_line = [f"exit status {process.returncode}", *errors.strip().splitlines()][-1]
        raise BandwidthError(f"measuring failed: {last_line}")
    return tuple(CopyRates.model_validate(gpu) for gpu in json.loads(rates))


def measure_copies(
    backends: Sequence[Backend], *, block_bytes: int = BLOCK_BYTES
) -> tuple[CopyRates, ...]:
    """Measure what the devices of a machine get, each number the median of a few rounds.

    They copy together and then in turn. For each, twice ``block_bytes`` is pinned, and taken on the
    device; all is freed. Memory that can't be had is a `BandwidthError`.
    """
    links = [Link(backend, block_bytes) for backend in backends]
    median_rates(links, "d2h", "h2d")  # those that were idle have to wake
    together = median_rates(links, "d2h", "h2d")
    ways = (["d2h"], ["h2d"], ["d2h", "h2d"])
    alone = [[rate for names in ways for rate in median_rates([link], *names)[0]] for link in links]
    return tuple(
        CopyRates(**dict(zip(CopyRates.model_fields, [*own, *node], strict=True)))
        for own, node in zip(alone, together, strict=True)
    )


def median_rates(links: Sequence[Link], *names: str) -> list[list[float]]:
    """Return each link's median bandwidth in each direction over a few rounds, in GB/s.

    All copy at once.
    """
    rounds = []
    for _ in range(3):
        for link in links:
            link.start(*names)
        rounds.append([link.finish() for link in links])
    return np.median(rounds, axis=0).tolist()


class Link:
    """Blocks of memory on both sides of a device's link."""

    def __init__(self, backend: Backend, block_bytes: int) -> None:
        self._backend = backend
        self._block_bytes = block_bytes
        self._streams = {"d2h": backend.d2h_stream, "h2d": backend.h2d_stream}
        self._ends: list[list[Event]] = []
        self._pairs = {}
        for name in self._streams:
            try:
                host = backend.empty_host(block_bytes).fill_(0)
                block = backend.empty_device_like(host).fill_(0)
            except (RuntimeError, MemoryError) as error:
                why = str(error).split("\n")[0]
                raise BandwidthError(f"two blocks of {block_bytes} bytes: {why}") from error
            self._pairs[name] = (host, block) if name == "d2h" else (block, host)

    def start(self, *names: str) -> None:
        """Queue one round of copies in these directions at once."""
        backend = self._backend
        self._ends = [[] for _ in names]
        start = backend.record(backend.compute_stream())
        for name in names:  # whatever used its device memory before
            backend.wait(self._streams[name], start, Wait.W1 if name == "d2h" else Wait.W6)
        for _ in range(6):  # the first warms up; at 3 GB/s all rounds take 5 s, at 50 0.3 s
            for name, ends in zip(names, self._ends, strict=True):
                backend.copy([self._pairs[name]], self._streams[name], "bandwidth")
                ends.append(backend.timestamp(self._streams[name]))

    def finish(self) -> list[float]:
        """Wait for the round; return each direction's bandwidth in GB/s."""
        self._backend.sync_copies()
        elapsed_us, first = self._backend.sync_elapsed_us, self._ends[0][0]
        ends_us = [[elapsed_us(first, end) for end in ends] for ends in self._ends]
        return gbps_while_all_copy(ends_us, self._block_bytes)


def gbps_while_all_copy(ends_us: Sequence[Sequence[float]], block_bytes: int) -> list[float]:
    """Return each direction's bandwidth while all of them copied, in GB/s, by its copies' ends.

    That is from where the first copy of each has ended, which warms up, until one has made its
    last. Directions that took turns instead share all of the time.
    """
    start_us, end_us = max(ends[0] for ends in ends_us), min(ends[-1] for ends in ends_us)
    if start_us >= end_us:
        start_us, end_us = min(ends[0] for ends in ends_us), max(ends[-1] for ends in ends_us)
    span_us = [start_us, end_us]
    copied = [np.diff(np.interp(span_us, ends, np.arange(len(ends)))) for ends in ends_us]
    return [float(blocks[0]) * block_bytes / (end_us - start_us) / 1e3 for blocks in copied]


if __name__ == "__main__":
    cuda = OffloadConfig(backend="cuda")
    found = measure_copies([create_backend(cuda, index) for index in range(int(sys.argv[1]))])
    sys.stdout.write(json.dumps([gpu.model_dump() for gpu in found]))
