"""Steps of one layer in the documented groups, and what they give without offload."""

from __future__ import annotations

import torch
from programs import assert_same

from megatron_offload.config import OffloadConfig
from megatron_offload.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface,
)

CONFIG = OffloadConfig(
    backend="simulated", host_slab_bytes=1 << 20, max_inflight_bytes=0, prefetch_bytes=0
)


def begin(manager, min_elements=0, **options):
    manager.init_model_chunk_offload_handler(1, 0, min_elements, **options)
    return manager.cur_forward_chunk()


def layer(x, weight, name="mlp", **commit):
    with FineGrainedActivationOffloadingInterface(True, x, name) as x:
        y = torch.tanh(x @ weight)
    return FineGrainedActivationOffloadingInterface.group_commit(y, name, **commit)


def take_step(manager, x, weight, **options):
    """Take a step of one layer; return what it has moved."""
    begin(manager, **options)
    layer(x, weight).sum().backward()
    manager.reset()
    return manager.last_step.offloaded_bytes


def reference(x, weight, num_layers=3):
    y = x = x.detach().requires_grad_()
    for _ in range(num_layers):
        y = torch.tanh(y @ weight)
    return torch.autograd.grad(y.sum(), (x, weight))


def assert_exact(x, weight, num_layers=3):
    assert_same(reference(x, weight, num_layers), [x.grad, weight.grad])


def end_exactly(manager, y, x, weight, num_layers):
    """End a step by its backward, whose gradients are those without offload."""
    y.sum().backward()
    manager.reset()
    assert_exact(x, weight, num_layers)
