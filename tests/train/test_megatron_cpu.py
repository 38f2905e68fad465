"""megatron-core on a CPU: nothing is left changed, and random masks are reproducible."""

import sys

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron.core.tensor_parallel.random as megatron_random
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker

from megatron_offload.integrations.megatron_cpu import cpu_bridges

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bridges are for CPUs only")


def snapshot():
    found = {
        (name, key): id(value)
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core")
        for key, value in list(vars(module).items())
        if not key.startswith("__")
    }
    return found, "cuda" in vars(torch.Tensor), id(torch.cuda.current_device), id(torch.zeros)


def seed(value):
    megatron_random.model_parallel_cuda_manual_seed(
        value, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True
    )


def dropout(x):
    with get_cuda_rng_tracker().fork():
        inside = torch.nn.functional.dropout(x, 0.5)
    return inside + torch.nn.functional.dropout(x, 0.5)


def test_everything_is_restored_after_an_error_too():
    with cpu_bridges():
        seed(1)
    before = snapshot()

    def fail_inside():
        with cpu_bridges():
            assert snapshot() != before
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert snapshot() == before
    with cpu_bridges():
        outer = snapshot()
        with cpu_bridges():
            pass
        assert snapshot() == outer
    assert snapshot() == before


def test_masks_are_those_of_the_seed_and_disturb_no_generator_outside_the_tracker():
    x = torch.ones(64)
    masks = []
    with cpu_bridges():
        for value in (1, 1, 2):
            seed(value)
            masks.append(torch.stack([dropout(x), dropout(x)]))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0][0], masks[0][1])
    with cpu_bridges():
        seed(3)
        expected = torch.rand(8)
        seed(3)
        with get_cuda_rng_tracker().fork():
            torch.rand(5)
        assert torch.equal(torch.rand(8), expected)


def test_recompute_drops_the_same_units():
    def gradient(recompute):
        seed(4)
        x = torch.ones(64, requires_grad=True)
        function = (lambda t: checkpoint(dropout, False, t)) if recompute else dropout
        (function(x) * torch.arange(64.0) + dropout(x)).sum().backward()
        return x.grad, torch.rand(4)

    with cpu_bridges():
        plain, recomputed = gradient(False), gradient(True)
    assert torch.equal(plain[0], recomputed[0])
    assert torch.equal(plain[1], recomputed[1])


def test_a_discarded_output_is_recomputed_without_transformer_engine():
    def gradient(recompute):
        seed(5)
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        if not recompute:
            y = torch.tanh(dropout(x))
            z = y * y
        else:
            discarded = megatron_random.CheckpointWithoutOutput()
            y = discarded.checkpoint(lambda t: torch.tanh(dropout(t)), x)
            z = y * y
            discarded.discard_output_and_register_recompute(z)
            assert y.untyped_storage().nbytes() == 0
        z.sum().backward()
        return x.grad

    with cpu_bridges():
        assert torch.equal(gradient(False), gradient(True))
