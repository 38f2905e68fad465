"""Every generator goes on where it was."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_offload.train.checkpoint import random_states, restore_random_states

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def same_afterwards():
    tracker = get_cuda_rng_tracker()
    found = torch.get_rng_state(), tracker.get_states()
    tracker.set_states({"dropout": torch.Generator().manual_seed(5).get_state()})
    yield
    torch.set_rng_state(found[0])
    tracker.set_states(found[1])


def draws():
    state = get_cuda_rng_tracker().get_states()["dropout"]
    generator = torch.Generator()
    generator.set_state(state)
    drawn = [torch.rand(3).tolist(), torch.rand(3, generator=generator).tolist()]
    state.copy_(generator.get_state())
    return drawn


def test_every_generator_goes_on_where_it_was():
    states = random_states(CPU)
    first = draws()
    assert draws() != first
    restore_random_states(states, CPU)
    assert draws() == first
