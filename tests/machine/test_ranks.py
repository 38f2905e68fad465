"""Real processes that measure the simulated device."""

from __future__ import annotations

import os

import pytest

from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.ranks import measure_gpus

SIMULATED = OffloadConfig(backend="simulated", simulated=SimulatedConfig(d2h_gbps=25, h2d_gbps=50))


def children():
    """Return the processes that this one has started and that are not gone."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


def test_every_gpu_has_a_process_and_a_result():
    gpus = measure_gpus([None, "0000:00:00.0"], config=SIMULATED, block_bytes=1 << 16)
    assert len(gpus) == 2
    for gpu in gpus:
        assert gpu.rates.d2h_gbps == pytest.approx(25)
        assert gpu.rates.node_h2d_gbps == pytest.approx(50)
        assert gpu.pci is None


def test_a_process_that_fails_is_told_with_its_reason():
    with pytest.raises(BandwidthError, match=r"measuring GPU 0 failed: .*must be positive, got 0"):
        measure_gpus([None], config=SIMULATED, block_bytes=0)


def test_processes_that_take_too_long_are_killed():
    before = children()
    with pytest.raises(BandwidthError, match=r"not done within 0\.1 s"):
        measure_gpus([None], config=SIMULATED, timeout_s=0.1)
    assert children() <= before | children_of_tracker()


def children_of_tracker():
    """Return Python's own helper of spawned processes, which stays."""
    from multiprocessing import resource_tracker

    return {str(resource_tracker._resource_tracker._pid)}
