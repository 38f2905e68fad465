"""Faults of megatron-core's own handler that a CPU can only imitate: real copies, real memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ROWS, WIDTH = 8192, 2048  # 64 MiB
NUM_NORMS = 6


@pytest.fixture(scope="module")
def megatron(one_rank):
    """One process of megatron-core's, of a version that has the faults."""
    from megatron import core

    if not core.__version__.startswith("0.19."):
        pytest.skip(f"megatron-core {core.__version__}: the calls of 0.19 are meant")
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_offload.integrations import megatron_core
    from megatron_offload.integrations.megatron_cpu import recompute_without_transformer_engine

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    with recompute_without_transformer_engine():
        yield megatron_core
    megatron_core.uninstall()


@contextlib.contextmanager
def handler(megatron, *, ours):
    """Yield the module with Megatron's own handler in it, or with ours."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

    from megatron_offload import OffloadConfig, PipelineOffloadManager

    if ours:
        settings = {"policy": {"kind": "modules"}, "recompute": (), "max_inflight_bytes": 0}
        config = OffloadConfig(backend="cuda", min_tensor_bytes=0, **settings)
        PipelineOffloadManager.get_instance().configure(config)
        megatron.install()
        yield module
        return
    megatron.uninstall()
    switch = SimpleNamespace(CPUOffloadEnabled=False)  # not every TransformerEngine has one
    with (
        mock.patch.object(transformer_engine, "cpu_offload", switch),
        mock.patch.object(module, "print_offload_summary_table"),
    ):
        module.PipelineOffloadManager.reset_instance()
        yield module
        module.PipelineOffloadManager.OFFLOAD_MGR = None


def begin_chunk(module):
    interface = module.FineGrainedActivationOffloadingInterface
    interface.init_chunk_handler(0, 1, 0, 0, 0, 1.0)
    return interface


def late_reload(megatron, *, ours, is_late=True):
    """Return whether a gradient is right whose tensor is reloaded while copies out are late."""
    if is_late:  # pinning may wait for the device, and then nothing is late
        late_reload(megatron, ours=ours, is_late=False)
    with handler(megatron, ours=ours) as module:
        interface = begin_chunk(module)
        x = torch.randn(ROWS, WIDTH, device="cuda").requires_grad_()
        h = x * 2  # nobody but the group keeps it
        expected = h.detach().cos() * 2
        with torch.cuda.stream(module.PipelineOffloadManager.get_instance().d2h_stream):
            torch.cuda._sleep(1_000_000_000 if is_late else 1)
        mark = interface(True, h, "core_attn")
        with mark as h:
            y = h.sin()
        y = mark.group_offload(y)
        del h, mark
        y.sum().backward()
        interface.reset()
        torch.cuda.synchronize()
        return torch.equal(x.grad, expected)


def test_7398_an_inline_reload_does_not_race_its_own_copy(megatron):
    assert late_reload(megatron, ours=True)
    assert not late_reload(megatron, ours=False)


def allocated_after_forward(megatron, *, ours):
    """Return what norms that are run again leave on the device, of inputs that were offloaded."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    norm = torch.nn.LayerNorm(WIDTH, device="cuda")
    linear = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
    with handler(megatron, ours=ours) as module:
        interface = begin_chunk(module)
        before = torch.cuda.memory_allocated()
        h = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        for _ in range(NUM_NORMS):
            h = h * 2
            whole = CheckpointWithoutOutput()
            mark = interface(True, h, "attn_norm")
            with mark as h:
                y = whole.checkpoint(norm, h)
            out = linear(y)
            whole.discard_output_and_register_recompute(out)
            h = mark.group_offload(out)
            del y, out, mark, whole
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # lets the allocator see which copies are done
        held_bytes = torch.cuda.memory_allocated() - before
        h.sum().backward()
        interface.reset()
        torch.cuda.synchronize()
        return held_bytes


def test_6553_inputs_of_recomputed_norms_are_offloaded(megatron):
    original = allocated_after_forward(megatron, ours=False)
    ours = allocated_after_forward(megatron, ours=True)
    input_bytes = ROWS * WIDTH * 4
    assert original >= NUM_NORMS * input_bytes
    assert ours <= original - (NUM_NORMS - 2) * input_bytes, "the last may be kept"
