"""Megatron's MoE dispatch step and random input for it."""

from __future__ import annotations

import types

import torch
from megatron.core.transformer.moe import token_dispatcher

MEGATRONS = token_dispatcher._DeepepManager._indices_to_multihot  # as it was before any install()
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, float("inf"), float("-inf"), float("nan"))


def megatrons(indices, probs, num_experts):
    return MEGATRONS(types.SimpleNamespace(num_local_experts=num_experts), indices, probs)


def form_of(tensor):
    """Return all that a caller could see of a tensor."""
    bits = tensor if tensor.dtype is torch.bool else tensor.view(torch.int32)
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), bits.tolist()


def outcome(step, indices, probs, num_experts, weights):
    """Return the forms of both results and of the gradient of the probabilities."""
    leaf = probs.clone(memory_format=torch.preserve_format).requires_grad_()
    routing_map, multihot_probs = step(indices, leaf, num_experts)
    assert not routing_map.requires_grad
    assert multihot_probs.requires_grad
    multihot_probs.backward(weights)
    return [form_of(tensor) for tensor in (routing_map, multihot_probs.detach(), leaf.grad)]


def random_case(rng, *, repeats):
    """Return what `outcome` takes after the step, on the CPU; experts repeat if they may."""
    num_experts = rng.choice([1, 2, 3, 8, 33])
    topk = rng.randint(1, min(num_experts, 8))
    num_tokens = rng.choice([0, 1, 2, 7, 60])
    indices = random_indices(rng, num_tokens, topk, num_experts, repeats=repeats)
    probs = random_floats(rng, num_tokens, topk)
    weights = random_floats(rng, num_tokens, num_experts)
    if rng.random() < 0.5:
        indices, probs, weights = (each.T.contiguous().T for each in (indices, probs, weights))
    return indices, probs, num_experts, weights


def random_indices(rng, num_tokens, topk, num_experts, *, repeats):
    share_masked = rng.choice([0.0, 0.4, 1.0])
    choose = rng.choices if repeats else rng.sample
    rows = [
        [-1 if rng.random() < share_masked else e for e in choose(range(num_experts), k=topk)]
        for _ in range(num_tokens)
    ]
    dtype = rng.choice([torch.int64, torch.int32])
    return torch.tensor(rows, dtype=dtype).reshape(num_tokens, topk)


def random_floats(rng, *shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    for place in range(values.numel()):
        if rng.random() < 0.2:
            values.view(-1)[place] = rng.choice(SPECIAL)
    return values
