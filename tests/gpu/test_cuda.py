"""The same programs on a real device: exact, bounded, and without blocking the host."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import weakref
from pathlib import Path

import programs
import pytest
import torch
from programs import ORDER, assert_nothing_left, assert_same

from megatron_offload.backends import cuda
from megatron_offload.config import OffloadConfig
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.group import Block
from megatron_offload.engine.manager import PipelineOffloadManager

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MIB = 1 << 20


def make_manager(**settings):
    return PipelineOffloadManager(
        OffloadConfig(
            backend="cuda",
            **{
                "min_tensor_bytes": 0,
                "host_slab_bytes": 64 * MIB,
                "host_memory_bytes": 24 * 1024 * MIB,
                "max_inflight_bytes": 0,
                "prefetch_bytes": 64 * MIB,
                **settings,
            },
        )
    )


def node_of_page(address):
    """Return the memory node that a page lies on, as move_pages(2) tells it."""
    status = ctypes.c_int(-1)
    page = ctypes.c_void_p(address)
    number = {"x86_64": 279, "aarch64": 239}[platform.machine()]
    result = ctypes.CDLL(None).syscall(
        ctypes.c_long(number),
        ctypes.c_int(0),
        ctypes.c_ulong(1),
        ctypes.byref(page),
        None,
        ctypes.byref(status),
        ctypes.c_int(0),
    )
    if result != 0:
        pytest.skip("the kernel doesn't tell where a page lies")
    return status.value


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.fc1 = torch.nn.Linear(width, 4 * width)
        self.fc2 = torch.nn.Linear(4 * width, width)

    def forward(self, x, manager):
        residual = x
        y = start_group(manager, x, "mlp") if manager else x
        with manager or torch.enable_grad():
            y = self.fc2(torch.nn.functional.gelu(self.fc1(self.norm(y))))
        y = commit_group(manager, y, "mlp") if manager else y
        return residual + y


def make_model(layers=6, width=1024, dtype=torch.float32, kind=Layer):
    torch.manual_seed(0)
    return torch.nn.ModuleList(kind(width) for _ in range(layers)).to("cuda", dtype)


def make_inputs(model, num_microbatches=6, rows=2048):
    generator = torch.Generator("cuda").manual_seed(1)
    weight = model[0].norm.weight
    shape = (num_microbatches, rows, weight.numel())
    return torch.randn(shape, generator=generator, device="cuda").to(weight.dtype)


def run_step(model, manager, inputs, order=ORDER):
    return programs.run_step(model, manager, order, inputs=inputs)


LIMITS = [*itertools.product((0, 96 * MIB, None), (0, 96 * MIB, None))]
"""In flight, and prefetched."""


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def trained(request, deterministic):
    """A model of each dtype, its inputs, and what a step without offload gives."""
    model = make_model(dtype=request.param)
    inputs = make_inputs(model)
    return model, inputs, run_step(model, None, inputs)


@pytest.mark.parametrize(("inflight_bytes", "prefetch_bytes"), LIMITS)
def test_every_bit_is_the_same(trained, inflight_bytes, prefetch_bytes):
    model, inputs, expected = trained
    manager = make_manager(max_inflight_bytes=inflight_bytes, prefetch_bytes=prefetch_bytes)
    for _ in range(4):
        assert_same(expected, run_step(model, manager, inputs))
        assert_nothing_left(manager)
    assert manager.last_step.reloaded_bytes > 0
    manager.close()


def test_reserved_memory_falls_and_is_flat():
    order = [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 1), ("B", 2)]
    peaks = {}
    for name in ("without", "with"):
        model = make_model(layers=12)
        inputs = make_inputs(model, num_microbatches=3, rows=8192)
        manager = make_manager(max_inflight_bytes=None, prefetch_bytes=None)
        torch.cuda.empty_cache()
        reserved = []
        for _ in range(8):
            torch.cuda.reset_peak_memory_stats()
            run_step(model, manager if name == "with" else None, inputs, order)
            torch.cuda.synchronize()
            reserved.append(torch.cuda.max_memory_reserved())
        peaks[name] = reserved
        manager.close()
        del model, inputs
        torch.cuda.empty_cache()
    assert peaks["with"][-1] < 0.6 * peaks["without"][-1]
    assert len(set(peaks["with"][3:])) == 1


@pytest.fixture
def blocks(monkeypatch):
    """All blocks that live."""
    alive, construct = weakref.WeakSet(), Block.__init__

    def construct_and_note(block, *args, **settings):
        construct(block, *args, **settings)
        alive.add(block)

    monkeypatch.setattr(Block, "__init__", construct_and_note)
    return alive


@pytest.mark.parametrize("limit_bytes", [None, 8 * MIB])
def test_nothing_grows_in_a_long_run(blocks, limit_bytes):
    model = make_model(layers=4, width=512)
    inputs = make_inputs(model, rows=512)
    manager = make_manager(max_inflight_bytes=limit_bytes, prefetch_bytes=limit_bytes)
    torch.cuda.empty_cache()
    seen = []
    for _ in range(300):
        torch.cuda.reset_peak_memory_stats()
        run_step(model, manager, inputs)
        pinned_bytes = manager.host_pool.stats.slab_bytes_total
        seen.append((torch.cuda.max_memory_reserved(), pinned_bytes))
        assert len(blocks) == 0
        assert_nothing_left(manager)
    assert manager.last_step.reloaded_bytes > 0
    assert min(seen[-1]) > 0
    assert set(seen[10:]) == {seen[10]}, "reserved and pinned bytes by step"
    manager.close()


def launch_and_wait():
    assert torch.ones(1024, device="cuda").add(1).sum().item() == 2048
    torch.cuda.synchronize()


def test_pages_that_are_pinned_already_leave_no_error_behind():
    manager = make_manager()
    pinned = manager.backend.empty_host(2 * MIB)
    with pytest.raises(RuntimeError, match="pinning 1048576 bytes of host memory failed"):
        cuda._register(pinned.data_ptr(), MIB)
    launch_and_wait()
    cuda._unregister(mmap.PAGESIZE)  # nothing was ever pinned there
    launch_and_wait()
    manager.close()


def test_a_program_whose_pins_all_fail_is_kept_on_the_device(monkeypatch):
    model = make_model()
    inputs = make_inputs(model)
    expected = run_step(model, None, inputs)
    manager = make_manager()
    pinned = manager.backend.empty_host(2 * MIB)
    register = cuda._register
    monkeypatch.setattr(cuda, "_register", lambda *_: register(pinned.data_ptr(), MIB))
    for _ in range(2):
        assert_same(expected, run_step(model, manager, inputs))
        assert manager.last_step.offloaded_bytes == 0
        assert manager.last_step.num_unpinnable_blocks > 0
        assert_nothing_left(manager)
    manager.close()


def test_pinned_memory_lies_on_the_device_s_node():
    manager = make_manager()
    address = cuda._pci_address(torch.cuda.current_device())
    path = Path(f"/sys/bus/pci/devices/{address}/numa_node")
    node = int(path.read_text()) if path.exists() else -1
    if node < 0:
        pytest.skip("the machine has one memory node, or doesn't say which is the device's")
    before = os.sched_getaffinity(0)
    region = manager.backend.empty_host(64 * MIB)
    assert {node_of_page(region.data_ptr() + offset) for offset in range(0, 64 * MIB, MIB)} == {
        node
    }
    assert os.sched_getaffinity(0) == before
    manager.close()
