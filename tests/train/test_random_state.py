"""Every generator goes on where it was; a state that is none is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_offload.errors import ConfigError
from megatron_offload.train.checkpoint import random_states, restore_random_states

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def same_afterwards():
    tracker = get_cuda_rng_tracker()
    found = random.getstate(), np.random.get_state(), torch.get_rng_state(), tracker.get_states()
    tracker.set_states({"dropout": torch.Generator().manual_seed(5).get_state()})
    yield
    random.setstate(found[0])
    np.random.set_state(found[1])
    torch.set_rng_state(found[2])
    tracker.set_states(found[3])


def draws():
    state = get_cuda_rng_tracker().get_states()["dropout"]
    generator = torch.Generator()
    generator.set_state(state)
    drawn = [
        [random.random(), random.gauss(0, 1)],
        [np.random.random(), np.random.standard_normal()],
        torch.rand(3).tolist(),
        torch.rand(3, generator=generator).tolist(),
    ]
    state.copy_(generator.get_state())
    return drawn


@pytest.mark.parametrize("before", [0, 1, 2])
def test_every_generator_goes_on_where_it_was(before):
    for _ in range(before):
        draws()  # a second Gaussian number is kept for later, or not
    states = random_states(CPU)
    first = draws()
    assert draws() != first
    restore_random_states(states, CPU)
    assert draws() == first


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("numpy", -2, 10**6),
        ("numpy", -2, -1),
        ("numpy", -2, 0.5),
        ("python", -2, 625),
        ("python", 3, float("nan")),
        ("python", 0, 2**32),
        ("python", 0, float("inf")),
        ("numpy", 0, -1),
        ("torch", slice(0, 100), 255),
        ("megatron.dropout", slice(0, 5000), 255),
    ],
)
def test_a_state_that_is_none_is_refused(name, place, value):
    states = random_states(CPU)
    states[name][place] = value
    with pytest.raises(ConfigError, match="random state"):
        restore_random_states(states, CPU)
