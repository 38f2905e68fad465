"""Bandwidths on the simulated device's virtual clock, and as another process measures them."""

from __future__ import annotations

import sys

import pytest
import torch
from programs import Forgetful

from megatron_offload.backends.base import Wait
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import SimulatedConfig
from megatron_offload.errors import HazardError
from megatron_offload.machine import bandwidth
from megatron_offload.machine.bandwidth import (
    BandwidthError,
    gbps_while_all_copy,
    measure_copies,
    measure_gpus,
)

KIB = 1024


def measured_rates(*args, **settings):
    """Return what is measured with small blocks."""
    return measured(make_backend(*args, **settings))[0]


def measured(*backends):
    return measure_copies(backends, block_bytes=64 * KIB)


def make_backend(timing="late", kind=SimulatedBackend, d2h_gbps=25, **settings):
    return kind(SimulatedConfig(d2h_gbps=d2h_gbps, h2d_gbps=50, copy_timing=timing), **settings)


@pytest.mark.parametrize("timing", ["eager", "late", "random"])
def test_each_direction_gets_what_its_stream_carries(timing):
    rates = measured_rates(timing).model_dump()
    assert rates == pytest.approx({name: 25 if "d2h" in name else 50 for name in rates})


@pytest.mark.parametrize("wait", [Wait.W1, Wait.W6])
def test_copies_are_ordered_after_what_used_their_memory(wait):
    with pytest.raises(HazardError, match=wait.name):
        measured_rates(kind=Forgetful, removed_waits={wait}, raises=True)


class OneEngine(SimulatedBackend):
    """Copies in one direction push the other's back: they share what carries them."""

    def copy(self, pairs, stream, label):
        for other in (self.d2h_stream, self.h2d_stream):
            stream.time_us = max(stream.time_us, other.time_us)
        return super().copy(pairs, stream, label)


def test_directions_that_share_an_engine_are_slower_together():
    rates = measured_rates(kind=OneEngine)
    assert (rates.d2h_gbps, rates.h2d_gbps) == pytest.approx((25, 50))
    # A block each way takes 1/25 + 1/50: both get 16.7 GB/s.
    assert rates.both_d2h_gbps == pytest.approx(50 / 3, rel=0.15)
    assert rates.both_h2d_gbps == pytest.approx(50 / 3, rel=0.15)


class SlowStart(SimulatedBackend):
    """The first copies after a while take long, as on a link that has to wake."""

    num_slow = 4

    def copy(self, pairs, stream, label):
        if self.num_slow:
            self.num_slow -= 1
            stream.time_us += 1e6
        return super().copy(pairs, stream, label)


def test_a_link_that_wakes_slowly_is_measured_awake():
    rates = measured_rates(kind=SlowStart)
    assert rates.d2h_gbps == pytest.approx(25)


class Crowded(SimulatedBackend):
    """Of several devices, one that copies while another does takes twice as long."""

    num_pending_of_all = 0

    def copy(self, pairs, stream, label):
        Crowded.num_pending_of_all += 1
        others = Crowded.num_pending_of_all - self.mine
        self.mine += 1
        before_us = stream.time_us
        event = super().copy(pairs, stream, label)
        stream.time_us += (stream.time_us - before_us) if others > 1 else 0.0
        return event

    mine = 0

    def sync_copies(self):
        super().sync_copies()
        Crowded.num_pending_of_all -= self.mine
        self.mine = 0


def test_devices_copy_together_and_alone():
    first, second = measured(make_backend("eager", d2h_gbps=20), make_backend("eager"))
    assert (first.d2h_gbps, second.d2h_gbps) == pytest.approx((20, 25))
    assert (first.node_d2h_gbps, second.node_d2h_gbps) == pytest.approx((20, 25))
    _, crowded = measured(*(make_backend("eager", kind=Crowded) for _ in range(2)))
    assert crowded.both_h2d_gbps == pytest.approx(50)
    assert crowded.node_h2d_gbps == pytest.approx(25)


class Unpinnable(SimulatedBackend):
    def empty_host(self, num_bytes):
        raise RuntimeError("pinning failed: out of memory")


class Full(SimulatedBackend):
    def empty_device_like(self, host):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")


@pytest.mark.parametrize(
    ("kind", "why"), [(Unpinnable, "pinning failed: out of memory"), (Full, "CUDA out of memory.")]
)
def test_memory_that_can_t_be_had_is_named(kind, why):
    with pytest.raises(BandwidthError, match=rf"two blocks of 65536 bytes: {why}$"):
        measured_rates(kind=kind)


@pytest.mark.parametrize(
    ("ends_us", "gbps"),
    [
        # The second direction begins 10 us later and goes on for long: from 20 to 30 us both copy.
        ([[0, 10, 20, 30], [20, 25, 30, 35, 40]], [0.1, 0.2]),
        ([[0, 10], [5, 25]], [0.1, 0.05]),  # a part of a copy counts in part
        ([[0, 10, 20], [30, 40]], [0.05, 0.025]),  # those that took turns share the time
    ],
)
def test_only_the_time_in_which_all_copy_counts(ends_us, gbps):
    assert gbps_while_all_copy(ends_us, 1000) == pytest.approx(gbps)


# Another process, which a program of one line replaces.


def program(monkeypatch, text):
    """Have this program measure, in place of the module."""
    started, popen = [], bandwidth.subprocess.Popen

    def start(command, **options):
        assert command[1:] == ["-m", "megatron_offload.machine.bandwidth", "2"]
        started.append(popen([sys.executable, "-c", text], **options))
        return started[-1]

    monkeypatch.setattr(bandwidth.subprocess, "Popen", start)
    return started


def test_the_rates_of_another_process_are_read(monkeypatch):
    (gpu,) = measured(make_backend())
    program(monkeypatch, f"print('[{gpu.model_dump_json()}, {gpu.model_dump_json()}]')")
    assert measure_gpus(2) == (gpu, gpu)


def test_a_process_that_fails_is_reported_with_its_reason(monkeypatch):
    program(monkeypatch, "raise RuntimeError('no pages')")
    with pytest.raises(BandwidthError, match="measuring failed: RuntimeError: no pages"):
        measure_gpus(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a device")
def test_without_a_device_the_process_says_so():
    with pytest.raises(BandwidthError, match=r"measuring failed: .*needs a CUDA device"):
        measure_gpus(1)


def test_a_process_that_takes_too_long_is_killed(monkeypatch):
    started = program(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(BandwidthError, match=r"not done within 0\.1 s"):
        measure_gpus(2, timeout_s=0.1)
    assert started[0].returncode == -9
