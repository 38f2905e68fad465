"""One process for each GPU, to measure a machine from one command.

The calling process never opens a device, and none of its processes outlives the call.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_offload.backends import create_backend
from megatron_offload.config import OffloadConfig
from megatron_offload.machine.bandwidth import BLOCK_BYTES, BandwidthError, measure_gpu
from megatron_offload.machine.profile import GpuProfile

_KILL_TIMEOUT_S = 5.0
"""A process that is stuck in the driver may not end; it is left to the system then."""


def measure_gpus(
    pci_addresses: Sequence[str | None],
    *,
    config: OffloadConfig | None = None,
    block_bytes: int = BLOCK_BYTES,
    timeout_s: float = 120.0,
) -> tuple[GpuProfile, ...]:
    """Measure GPUs, each alone and all at once; most of the time goes into starting processes.

    Args:
        pci_addresses: of each of the GPUs that the process can use, in CUDA's order.
        config: which backend; None takes CUDA.
        block_bytes: what each copy moves.
        timeout_s: after so many seconds whatever still runs is killed.

    Raises:
        BandwidthError: a process failed or took too long.
    """
    num_ranks = len(pci_addresses)
    config = config if config is not None else OffloadConfig(backend="cuda")
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (tuple(pci_addresses), config, block_bytes, timeout_s, folder, results)
        context = mp.start_processes(
            _measure_one, arguments, num_ranks, join=False, daemon=True, start_method="spawn"
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise BandwidthError(f"the copies were not done within {timeout_s:g} s")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            last_line = str(error).strip().splitlines()[-1]
            raise BandwidthError(
                f"measuring GPU {error.error_index} failed: {last_line}"
            ) from error
        finally:
            for process in context.processes:
                process.kill()
                process.join(_KILL_TIMEOUT_S)
    profiles = dict(results.get() for _ in range(num_ranks))
    return tuple(profiles[rank] for rank in range(num_ranks))


def _measure_one(
    rank: int,
    pci_addresses: tuple[str | None, ...],
    config: OffloadConfig,
    block_bytes: int,
    timeout_s: float,
    folder: str,
    results: Any,
) -> None:
    """Be one rank: measure one GPU, in turn and together with the others."""
    num_ranks = len(pci_addresses)
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks))  # all of them share the host's memory
    backend = create_backend(config, rank)
    if num_ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
    profile = measure_gpu(backend, pci_addresses[rank], block_bytes=block_bytes)
    if num_ranks > 1:
        dist.destroy_process_group()
    results.put((rank, profile))
