"""The process's manager on the simulated device, and a layer's weight and input."""

from __future__ import annotations

import pytest
import torch
from one_layer import CONFIG

from megatron_offload.fine_grained_activation_offload import PipelineOffloadManager


@pytest.fixture
def manager():
    manager = PipelineOffloadManager.get_instance()
    manager.configure(CONFIG)
    yield manager
    manager.configure(CONFIG)
    manager.in_replay = False


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))


@pytest.fixture
def x():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(4), requires_grad=True)
