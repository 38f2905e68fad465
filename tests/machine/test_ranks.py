"""Real processes that measure the simulated device."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.machine import ranks
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.profile import CopyRates, GpuProfile
from megatron_offload.machine.ranks import measure_gpus

SIMULATED = OffloadConfig(backend="simulated", simulated=SimulatedConfig(d2h_gbps=25, h2d_gbps=50))


def children():
    """Return the processes that this one has started and that are not gone."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


@pytest.mark.slow
def test_every_gpu_has_a_process_and_a_result():
    gpus = measure_gpus([None, "0000:00:00.0"], config=SIMULATED, block_bytes=1 << 16)
    assert len(gpus) == 2
    for gpu in gpus:
        assert gpu.rates.d2h_gbps == pytest.approx(25)
        assert gpu.rates.node_h2d_gbps == pytest.approx(50)
        assert gpu.pci is None


@pytest.mark.slow
def test_a_process_that_fails_is_told_with_its_reason():
    with pytest.raises(BandwidthError, match=r"measuring GPU 0 failed: .*must be positive, got 0"):
        measure_gpus([None], config=SIMULATED, block_bytes=0)


class Finished:
    """Stands in for processes that are done."""

    processes = ()

    def join(self, timeout):
        return True


def test_results_stand_in_the_order_of_the_gpus_whoever_was_first(monkeypatch):
    first, second = (
        GpuProfile(rates=dict.fromkeys(CopyRates.model_fields, rate), pci=None) for rate in (1, 2)
    )

    def start(function, arguments, num_processes, **settings):
        assert num_processes == 2
        arguments[-1].put((1, second))
        arguments[-1].put((0, first))
        return Finished()

    monkeypatch.setattr(ranks.mp, "start_processes", start)
    assert measure_gpus([None, None]) == (first, second)


def wait_forever(*arguments):
    signal.pause()


def test_processes_that_take_too_long_are_killed(monkeypatch):
    monkeypatch.setattr(ranks, "_measure_one", wait_forever)
    before = children()
    with pytest.raises(BandwidthError, match=r"not done within 0\.1 s"):
        measure_gpus([None], config=SIMULATED, timeout_s=0.1)
    assert children() <= before | children_of_tracker()


def children_of_tracker():
    """Return Python's own helper of spawned processes, which stays."""
    from multiprocessing import resource_tracker

    return {str(resource_tracker._resource_tracker._pid)}
