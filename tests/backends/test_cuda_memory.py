"""What the CUDA backend tells of the allocator, with made-up statistics."""

from __future__ import annotations

import pytest
import torch

from megatron_offload.backends import cuda
from megatron_offload.backends.base import DeviceMemory


@pytest.fixture
def backend(monkeypatch):
    backend = object.__new__(cuda.CudaBackend)
    backend.device = torch.device("cuda", 3)
    return backend


def test_there_is_nothing_to_describe_without_a_device(monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert cuda.visible_devices() == ()


def test_memory_is_that_of_all_pools_of_the_backends_own_device(backend, monkeypatch):
    def stats(device):
        assert device == backend.device
        pools = {"small_pool": {"current": 1, "peak": 2}, "large_pool": {"current": 9, "peak": 18}}
        return {
            "allocated_bytes": pools | {"all": {"current": 10, "peak": 20}},
            "reserved_bytes": pools | {"all": {"current": 30, "peak": 40}},
        }

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    assert backend.memory() == DeviceMemory(10, 30, 20, 40)


def test_before_anything_was_allocated_there_is_nothing(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    assert backend.memory() == DeviceMemory(0, 0, 0, 0)


def test_peaks_are_reset_on_the_backends_own_device(backend, monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", told.append)
    backend.reset_memory_peaks()
    assert told == [backend.device]
