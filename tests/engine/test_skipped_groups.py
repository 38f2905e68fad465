"""Groups that are kept are skipped unrecorded in steady steps: the same bits, and the same
memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from programs import (
    KIB,
    TIMINGS,
    TWO_TIMINGS,
    Layers,
    Meter,
    Watcher,
    assert_nothing_left,
    assert_same,
    check_steps,
    in_group,
    make_layers,
    make_manager,
    make_model,
    one_forward_one_backward,
    recorded,
    run_step,
)
from torch import nn

from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.boundary import start_group
from megatron_offload.frontends.whole_model import OffloadActivations

ORDER = one_forward_one_backward(4, depth=2)
LIMITS = {"max_inflight_bytes": 4 * KIB, "prefetch_bytes": 4 * KIB}


def steady(model, *, fraction=0.4, **settings):
    """Return a manager that has learned a step."""
    manager = make_manager(fraction=fraction, **{**LIMITS, **settings})
    for _ in range(3):
        run_step(model, manager, ORDER)
    assert manager.learner.skippable
    return manager


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("fraction", [0.1, 0.4, 0.8])
def test_steps_are_exact_and_move_what_they_moved_before(fraction, timing):
    model = make_layers()
    manager = make_manager(timing, fraction=fraction, **LIMITS)
    check_steps(model, manager, ORDER, 3)
    whole, passing = manager.last_step, manager.learner.skippable
    assert {key.order for key in passing} < {*range(1, 12)}
    for _ in range(3):
        keys = recorded(model, manager, ORDER)
        assert sorted((*keys, *passing)) == [GroupKey(c, n) for c in range(4) for n in range(12)]
        step = manager.last_step
        assert step.num_groups == whole.num_groups == 48
        assert step.offloaded_bytes == whole.offloaded_bytes > 0
        assert step.kept_bytes == whole.kept_bytes > 0
        assert step.num_late_reloads == 0
        assert [x.kept_bytes_by_reason for x in step.by_name.values()]


@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.6])
def test_they_take_no_more_memory_than_steps_that_are_recorded_whole(fraction):
    model = make_layers(24)
    manager = steady(model, fraction=fraction)
    peaks = []
    for needs_groups in (True, False):
        meter = Meter(model.parameters())
        with manager.observed_by(meter, Watcher(needs_groups=needs_groups)), meter:
            run_step(model, manager, ORDER)
        peaks.append(meter.peak_bytes)
    whole, passing = peaks
    assert passing <= whole


def test_one_step_in_64_and_each_that_somebody_watches_is_recorded_whole():
    model = make_layers()
    manager = steady(model)
    assert len(recorded(model, manager, ORDER, needs_groups=True)) == 48
    num_recorded = len(recorded(model, manager, ORDER))
    assert num_recorded < 36
    manager.step_number = 63
    counts = [len(recorded(model, manager, ORDER)) for _ in range(3)]
    assert counts == [num_recorded, 48, num_recorded]


def test_a_step_with_other_groups_is_exact_and_the_next_are_recorded_whole():
    model, longer = make_layers(), make_layers(14)
    manager = steady(model)
    few = len(recorded(model, manager, ORDER))
    for order, other in ((ORDER, longer), (one_forward_one_backward(5, 2), model)):
        assert len(recorded(other, manager, order)) < 14 * 5
        num_all = sum(action == "F" for action, _ in order) * len(other[0].layers)
        counts = [len(recorded(other, manager, order)) for _ in range(4)]
        assert counts[:2] == [num_all] * 2
        assert counts[2] == counts[3] < num_all
        counts = [len(recorded(model, manager, ORDER)) for _ in range(5)]
        assert counts[1:3] == [48, 48]
        assert counts[4] == few


def test_a_group_of_another_name_is_recorded_and_a_shorter_step_goes_on():
    model = make_layers()
    manager = steady(model)
    place = min(manager.learner.skippable)
    model[0].names[place.order] = "another"
    assert place in recorded(model, manager, ORDER)
    assert len(recorded(model, manager, ORDER)) == 48
    for _ in range(2):
        recorded(model, manager, ORDER)
    expected = run_step(model, None, ORDER, rows=8)
    assert_same(expected, run_step(model, manager, ORDER, rows=8))
    assert manager.last_step.offloaded_bytes > 0
    assert_nothing_left(manager)


def test_other_rules_of_the_program_count_at_once():
    model, manager = make_layers(), make_manager(**LIMITS)
    begin, moved = manager.begin_chunk, []
    for fraction in (0.4, 0.8, 0.4):
        manager.begin_chunk = partial(begin, fraction=fraction)
        for _ in range(4):
            run_step(model, manager, ORDER)
        assert manager.learner.skippable
        moved.append(manager.last_step.offloaded_bytes)
    assert moved[0] == moved[2] < 0.6 * moved[1]


def test_evaluation_exceptions_and_aborts_between_change_nothing():
    model = make_layers()
    manager = steady(model)
    few = len(recorded(model, manager, ORDER))
    manager.begin_chunk()
    with torch.no_grad():
        model[0](torch.ones(4, 32), manager)
    assert len(recorded(model, manager, ORDER)) == few
    x = torch.ones(4, 32, requires_grad=True)
    manager.begin_chunk()
    y = model[0](x, manager)  # with grad, and no backward
    del y
    manager.reset()
    assert len(recorded(model, manager, ORDER)) == few

    class StopError(Exception):
        pass

    def place(action, microbatch):
        if (action, microbatch) == ("B", 2):
            raise StopError
        return torch.enable_grad()

    with pytest.raises(StopError):
        run_step(model, manager, ORDER, place=place)
    manager.abort()
    assert_nothing_left(manager)
    assert len(recorded(model, manager, ORDER)) == few


@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_what_shares_memory_with_what_moves_is_recorded_and_its_memory_is_reloaded(timing):
    class Sharing(Layers):
        def forward(self, x, manager):
            first = x
            for number, name in enumerate(self.names):
                layer = self.layers[number]
                x = in_group(manager, lambda x, layer=layer: layer(x).sin() * 1.0, x, name)
                if number == 8:
                    x = in_group(manager, lambda x: x * first.square(), x, "again")
            return x

    model = nn.ModuleList([Sharing(12)])
    manager = make_manager(timing, fraction=0.3, **LIMITS)
    check_steps(model, manager, ORDER, 3)
    held = manager.last_step.externally_referenced_bytes
    again = {g.key for g in manager.last_profile.groups if g.name == "again"}
    assert again
    assert not again & manager.learner.skippable.keys()
    for _ in range(2):
        check_steps(model, manager, ORDER)
        assert manager.last_step.externally_referenced_bytes == held


def test_a_group_inside_one_that_is_recorded_is_recorded_too():
    model = make_model()  # each block a group and one inside
    manager = make_manager(fraction=0.3, **LIMITS)
    check_steps(model, manager, ORDER, 3)
    groups = {group.key: group for group in manager.last_profile.groups}
    for outer, inner in ((2, 3), (4, 5)):
        alone = {GroupKey(1, inner): groups[GroupKey(1, inner)]}
        manager.learner.skippable = alone
        assert GroupKey(1, inner) in recorded(model, manager, ORDER)
        manager.learner.skippable = alone | {GroupKey(1, outer): groups[GroupKey(1, outer)]}
        assert not {GroupKey(1, inner), GroupKey(1, outer)} & set(recorded(model, manager, ORDER))
    assert manager.learner.is_steady


def test_groups_by_hand_are_recorded_whatever_is_kept():
    model = make_layers(3)
    manager = steady(model, fraction=0.01)
    chunk = manager.begin_chunk()
    for name in model[0].names:
        group = manager.start_group(chunk, name)
        assert not group.is_skipped
        chunk.close_group(name)
        manager.commit(group)
    manager.abort()


def test_a_skipped_group_may_be_committed_by_hand():
    model = make_layers()
    manager = steady(model)
    passing = manager.learner.skippable
    chunk = manager.begin_chunk()
    x = torch.ones(4, 32, requires_grad=True)
    for name in model[0].names:
        start_group(manager, x, name)
        manager.commit(chunk.close_group(name))
    assert passing.keys() > manager.decisions.skipped.keys() > {*()}
    committed = {group.key for group in manager.decisions.committed}
    assert not committed & manager.decisions.skipped.keys()
    manager.abort()


@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_groups_without_marks_are_skipped_with_the_same_cuts(timing):
    model = make_layers(30)
    settings = {**LIMITS, "fraction": 0.3, "min_tensor_bytes": 0}
    manager = make_manager(timing, **settings)
    offload = OffloadActivations(max_fwd_stash_size=2, min_offload_size=0, manager=manager)
    x, expected, counts = torch.randn(16, 32), None, []
    for number in range(8):
        watcher = Watcher()
        with manager.observed_by(watcher):
            for parameter in model.parameters():
                parameter.grad = None
            with offload:
                loss = model[0](x.clone().requires_grad_(), None).square().mean()
            loss.backward()
            del loss
            assert offload.end_step()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        expected = expected or grads
        assert_same(expected, grads)
        assert manager.last_step.num_late_reloads == 0 or number == 0
        counts.append((len(watcher.keys), manager.last_step.num_groups))
        assert_nothing_left(manager)
    assert manager.last_step.offloaded_bytes > 0
    assert len(set(counts[-3:])) == 1
    few, all_groups = counts[-1]
    assert few < all_groups == counts[0][0]
