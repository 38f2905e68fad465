"""What a function draws, it draws again: also from a tracker whose states a CUDA graph may use."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from megatron_offload.recompute.call_state import RandomStates


class Tracker:
    """As Megatron-core's: by name a state, or a generator where it is safe for graphs."""

    def __init__(self):
        self.states_ = {"plain": torch.Generator().get_state(), "graph": torch.Generator()}

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def draw(self):
        generator = torch.Generator().set_state(self.states_["plain"])
        drawn = torch.rand(3, generator=generator), torch.rand(3, generator=self.states_["graph"])
        self.states_["plain"] = generator.get_state()
        return torch.cat([torch.rand(3), *drawn])


@pytest.fixture
def tracker(monkeypatch):
    home = types.SimpleNamespace(_CUDA_RNG_STATE_TRACKER=Tracker())
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", home)
    return home._CUDA_RNG_STATE_TRACKER


def test_the_host_and_the_tracker_draw_again_and_go_on_where_they_were(tracker):
    states = RandomStates({"cpu"})
    assert states.are_current()
    first, generator = tracker.draw(), tracker.states_["graph"]
    assert not states.are_current()
    behind = RandomStates()
    for _ in range(2):
        assert torch.equal(states.run(tracker.draw), first)
        assert behind.are_current()
        assert tracker.states_["graph"] is generator
    torch.rand(3, generator=generator)  # of the tracker alone counts too
    assert not behind.are_current()
    assert not torch.equal(tracker.draw(), first)
