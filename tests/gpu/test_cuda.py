"""The same programs on a real device: exact, bounded, and without blocking the host."""

from __future__ import annotations

import itertools
import mmap

import programs
import pytest
import torch
import torch.nn.functional as F
from programs import ORDER, assert_nothing_left, assert_same

from megatron_offload.backends import cuda
from megatron_offload.config import OffloadConfig
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.recompute.recipes import recomputable

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


class Remade(Layer):
    """A norm, and an activation with dropout that backward recomputes; two groups."""

    def forward(self, x, manager):
        def activation(hidden):
            return F.dropout(F.gelu(hidden), 0.1)

        def make(function, argument):
            return (
                recomputable(function, argument, manager=manager) if manager else function(argument)
            )

        y = start_group(manager, x, "norm") if manager else x
        with manager or torch.enable_grad():
            hidden = self.fc1(make(self.norm, y))
        hidden = commit_group(manager, hidden, "norm") if manager else hidden
        y = start_group(manager, hidden, "act") if manager else hidden
        with manager or torch.enable_grad():
            y = self.fc2(make(activation, y))
        return x + (commit_group(manager, y, "act") if manager else y)


def make_model(layers=6, width=1024, dtype=torch.float32, kind=Layer):
    torch.manual_seed(0)
    return torch.nn.ModuleList(kind(width) for _ in range(layers)).to("cuda", dtype)


def make_inputs(model, num_microbatches=6, rows=2048):
    generator = torch.Generator("cuda").manual_seed(1)
    weight = model[0].norm.weight
    shape = (num_microbatches, rows, weight.numel())
    return torch.randn(shape, generator=generator, device="cuda").to(weight.dtype)


def recomputed_bytes(model, num_microbatches=6, rows=2048):
    """Return what norms and activations make in a step."""
    width = model[0].norm.weight.numel()
    return len(model) * num_microbatches * rows * (width + 4 * width) * 4


def run_step(model, manager, inputs, order=ORDER):
    return programs.run_step(model, manager, order, inputs=inputs)


LIMITS = itertools.product((0, 96 * MIB, None), repeat=2)
SETTINGS = [{"max_inflight_bytes": one, "prefetch_bytes": other} for one, other in LIMITS]
SETTINGS += [{"checking": True}, {"host_memory_bytes": 0}]


@pytest.fixture(
    scope="module",
    params=[(Layer, torch.float32), (Layer, torch.bfloat16), (Remade, torch.float32)],
    ids=str,
)
def trained(request, deterministic):
    """A model of each kind, its inputs, and what a step without offload gives."""
    kind, dtype = request.param
    model = make_model(kind=kind, dtype=dtype)
    inputs = make_inputs(model)
    return model, inputs, run_step(model, None, inputs)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_bit_is_the_same(trained, settings):
    model, inputs, expected = trained
    manager = make_manager(**settings)
    for _ in range(4):
        assert_same(expected, run_step(model, manager, inputs))
        assert_nothing_left(manager)
    stats = manager.last_step
    is_remade = isinstance(model[0], Remade)
    assert stats.recomputed_bytes == (recomputed_bytes(model) if is_remade else 0)
    assert stats.refused_recipe_bytes == {}
    assert (stats.reloaded_bytes > 0) == (settings != {"host_memory_bytes": 0})
    manager.close()


def test_what_is_recomputed_takes_no_memory_meanwhile():
    model = make_model(kind=Remade)
    inputs = make_inputs(model, num_microbatches=2, rows=8192)
    order = [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    without = make_manager(host_memory_bytes=0)
    peaks = []
    for manager in (None, without):  # neither moves anything
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            run_step(model, manager, inputs, order)
        peaks.append(torch.cuda.max_memory_allocated())
    dropped_bytes = without.last_step.recomputed_bytes
    assert dropped_bytes == recomputed_bytes(model, 2, 8192)
    # Less what is recomputed for one layer's backward.
    assert peaks[0] - peaks[1] > dropped_bytes * (1 - 1 / len(model))
    without.close()


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
