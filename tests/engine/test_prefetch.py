"""What is reloaded next, how far ahead, and what a wrong prediction costs: never correctness."""

from __future__ import annotations

import pytest
import torch
from programs import (
    KIB,
    TIMINGS,
    assert_nothing_left,
    assert_same,
    make_manager,
    make_model,
    run_step,
)
from torch import nn

from megatron_offload.engine.automatic import AutomaticGroups


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_wrong_prediction_is_exact(timing):
    model, manager = make_model(), make_manager(timing, prefetch_bytes=40 * KIB)
    forwards = [("F", m) for m in range(4)]
    in_order = [*forwards, *[("B", m) for m in range(4)]]
    reverse = [*forwards, *[("B", m) for m in reversed(range(4))]]
    mixed = [*forwards, *[("B", m) for m in (2, 0, 3, 1)]]
    expected = {}
    for name, order in {"in_order": in_order, "reverse": reverse, "mixed": mixed}.items():
        expected[name] = run_step(model, None, order), order
    for name in ("in_order", "reverse", "mixed", "reverse", "in_order", "mixed", "mixed"):
        reference, order = expected[name]
        assert_same(reference, run_step(model, manager, order))
        assert_nothing_left(manager)
    assert manager.last_step.num_late_reloads == 0, "the order of the last step is learned at once"


def test_after_a_wrong_turn_the_rest_of_a_chunk_is_reloaded_in_time():
    model, manager = make_model(), make_manager(prefetch_bytes=40 * KIB)
    forwards = [("F", m) for m in range(4)]
    for _ in range(2):
        run_step(model, manager, [*forwards, *[("B", m) for m in range(4)]])
    run_step(model, manager, [*forwards, *[("B", m) for m in (2, 0, 1, 3)]])
    # What was reloaded for the wrong microbatch takes the budget of the one that came (6 groups).
    assert manager.last_step.num_late_reloads == 6


def test_what_a_second_pass_will_need_again_leaves_the_room_to_what_is_ahead():
    """As a zero-bubble schedule goes: the gradients of inputs first, those of weights later."""
    manager = make_manager(prefetch_bytes=8 * KIB)
    groups = AutomaticGroups(manager, "layer", max_inflight_tensors=1, finds_steps=False)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)))
    for parameter in model.parameters():
        manager.mark_not_offload(parameter)
    x = torch.randn(32, 32, requires_grad=True)

    def two_passes(offloads):
        if offloads:
            groups.begin()
        loss = model(x).square().sum()
        if offloads:
            groups.end()
        inputs = torch.autograd.grad(loss, [x], retain_graph=True)
        return [*inputs, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = two_passes(offloads=False)
    late = []
    for _ in range(6):
        with groups.step():
            assert all(map(torch.equal, two_passes(offloads=True), expected))
        late.append(manager.last_step.num_late_reloads)
        assert not groups._reached, "each group is left in its own step"
        assert manager.last_step.reloaded_bytes > 4 * manager.budget.prefetch_bytes
    # Of 25 groups. The input is found to be held by the program, and the clock differs by it.
    assert max(late) <= 2
    assert_nothing_left(manager)
