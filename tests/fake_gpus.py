"""Simulated devices that pass for GPUs: the one place at which tests replace what is measured."""

from __future__ import annotations

from megatron_offload.backends.base import DeviceInfo
from megatron_offload.backends.host_timed import HostTimedBackend
from megatron_offload.config import SimulatedConfig
from megatron_offload.machine import bandwidth

KIB = 1024


class FakeGpu(HostTimedBackend):
    """Says that it is a GPU, and keeps freed memory as an allocator does."""

    def __init__(self, gbps=25.0, bus="3b", *, pins=True):
        super().__init__(SimulatedConfig(d2h_gbps=gbps, h2d_gbps=2 * gbps, poison=False))
        self.address = f"0000:{bus}:00.0"
        self.pins = pins
        self.cached_bytes = 1000

    def describe(self):
        return DeviceInfo("Fake GPU", self.address)

    def empty_device(self, num_bytes):
        self.cached_bytes += num_bytes
        return super().empty_device(num_bytes)

    def reserved_bytes(self):
        return self.cached_bytes

    def trim_device(self):
        self.cached_bytes = 1000

    def empty_host(self, num_bytes):
        if not self.pins:
            raise RuntimeError("pinning failed: out of memory")
        return super().empty_host(num_bytes)


def copy_little(monkeypatch):
    """Let a measurement copy blocks that a CPU copies quickly."""
    monkeypatch.setattr(bandwidth, "BLOCK_BYTES", 128 * KIB)
