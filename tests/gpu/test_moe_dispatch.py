"""The MoE dispatch step on a real device: Megatron's bits, and a host that doesn't wait."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("megatron.core")

from moe_programs import megatrons, outcome, random_case

from megatron_offload.integrations.megatron_moe import indices_to_multihot

pytestmark = pytest.mark.gpu

WAITED = "synchronizing CUDA operation"
NAN_ON_CPU, NAN_ON_GPU = str(0x7FC00000), str(0x7FFFFFFF)


@pytest.fixture(autouse=True)
def _left_as_found():
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)


def on_device(case):
    return [each.to("cuda") if isinstance(each, torch.Tensor) else each for each in case]


def make_arguments():
    generator = torch.Generator("cuda").manual_seed(0)
    indices = torch.rand(4096, 32, generator=generator, device="cuda").topk(8).indices
    probs = torch.rand(indices.shape, generator=generator, device="cuda", requires_grad=True)
    indices = indices.masked_fill(probs.detach() < 0.5, -1)
    weights = torch.rand(4096, 32, generator=generator, device="cuda")
    torch.cuda.synchronize()
    return indices, probs, weights


def test_megatrons_own_step_waits_in_forward_and_in_backward():
    indices, probs, weights = make_arguments()
    _, multihot_probs = megatrons(indices, probs, 32)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=WAITED):
        megatrons(indices, probs, 32)
    with pytest.raises(RuntimeError, match=WAITED):
        multihot_probs.backward(weights)


@pytest.mark.parametrize("deterministic", [False, True])
def test_this_step_never_waits(deterministic):
    torch.use_deterministic_algorithms(deterministic)
    indices, probs, weights = make_arguments()
    for dtype in (torch.int64, torch.int32):
        converted = indices.to(dtype)
        torch.cuda.set_sync_debug_mode("error")
        _, multihot_probs = indices_to_multihot(converted, probs, 32)
        multihot_probs.backward(weights)
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [False, True])
def test_bits_and_strides_are_megatrons(deterministic):
    torch.use_deterministic_algorithms(deterministic)
    for seed in range(100):
        case = on_device(random_case(random.Random(seed), repeats=False))
        assert outcome(indices_to_multihot, *case) == outcome(megatrons, *case), f"seed {seed}"


def test_repeated_experts_are_what_they_are_on_a_cpu():
    for seed in range(100):
        case = random_case(random.Random(seed), repeats=True)
        expected = outcome(indices_to_multihot, *case)
        found = outcome(indices_to_multihot, *on_device(case))
        # A GPU's addition makes another NaN of a NaN than a CPU's.
        assert str(found).replace(NAN_ON_GPU, NAN_ON_CPU) == str(expected), f"seed {seed}"
