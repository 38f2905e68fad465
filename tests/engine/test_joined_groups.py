"""In steady steps groups are recorded as one: the same bits and counts, and fewer copies."""

from __future__ import annotations

from collections import Counter
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

from megatron_offload.backends.base import Wait
from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.boundary import commit_group, start_group

ORDER = one_forward_one_backward(4, depth=2)
ROOM = {"max_inflight_bytes": 32 * KIB, "prefetch_bytes": 32 * KIB}
"""Enough for joined groups of 16 KiB, which are three of the model, or four."""


def steady(model, timing="late", **settings):
    """Return a manager that has learned a step and what of it is joined."""
    manager = make_manager(timing, **{**ROOM, **settings})
    for _ in range(3):
        run_step(model, manager, ORDER)
    assert manager.learner.joining
    return manager


def counts_of(manager):
    return {
        name: (stats.num_groups, stats.offloaded_bytes + stats.kept_bytes)
        for name, stats in manager.last_step.by_name.items()
    }


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_steps_are_exact_and_count_what_they_counted_before(fraction, timing):
    model = make_layers()
    model[0].names = ["attention", "mlp"] * 6
    manager = steady(model, timing, fraction=fraction)
    whole_keys = recorded(model, manager, ORDER, needs_groups=True)
    whole, profile = manager.last_step, manager.last_profile
    whole_counts = counts_of(manager)
    for _ in range(3):
        keys = recorded(model, manager, ORDER)
        assert len(keys) < 40 < len(whole_keys) == 48
        step = manager.last_step
        assert counts_of(manager) == whole_counts
        most_bytes = whole.peak_host_bytes + manager.budget.joined_bytes
        assert 0 < step.peak_host_bytes <= most_bytes
        assert step.num_late_reloads <= whole.num_late_reloads
        assert manager.last_profile is profile


def test_each_is_one_copy_each_way():
    model = make_layers()
    manager = steady(model)
    launches = []
    for needs_groups in (True, False):
        watcher = Watcher(needs_groups=needs_groups)
        watcher.copies = Counter()
        watcher.copy_issued = lambda way, pairs, group, c=watcher.copies: c.update([way])
        with manager.observed_by(watcher):
            run_step(model, manager, ORDER)
        launches.append(watcher.copies)
    whole, joined = launches
    for way in ("d2h", "h2d"):
        assert 0 < 3 * joined[way] <= 2 * whole[way]


def test_with_nothing_set_a_small_model_has_few():
    model = make_layers(24)
    manager = steady(model, max_inflight_bytes=None, prefetch_bytes=None)
    for _ in range(2):
        run_step(model, manager, ORDER)
    assert len(recorded(model, manager, ORDER)) <= 0.4 * 96


def test_they_take_little_more_memory():
    model = make_layers(24)
    manager = steady(model)
    peaks = []
    for needs_groups in (True, False):
        meter = Meter(model.parameters())
        with manager.observed_by(meter, Watcher(needs_groups=needs_groups)), meter:
            run_step(model, manager, ORDER)
        peaks.append(meter.peak_bytes)
    whole, joined = peaks
    assert joined <= whole + 2 * manager.budget.joined_bytes


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("wait", [Wait.W1, Wait.W2, Wait.W4], ids=lambda wait: wait.name)
def test_a_missing_wait_is_named(wait, timing):
    model = make_layers()
    manager = steady(model, timing, removed_waits={None})
    manager.backend._removed_waits = {wait}
    run_step(model, manager, ORDER)
    assert wait in {hazard.wait for hazard in manager.backend.hazards}


def test_one_step_in_64_is_recorded_whole():
    model = make_layers()
    manager = steady(model)
    few = len(recorded(model, manager, ORDER))
    manager.step_number = 63
    assert [len(recorded(model, manager, ORDER)) for _ in range(3)] == [few, 48, few]


def test_other_groups_are_exact_and_the_next_steps_are_recorded_whole():
    model = make_layers()
    manager = steady(model)
    few = len(recorded(model, manager, ORDER))
    longer, other = make_layers(14), make_layers()
    other[0].names[4:7] = ["x", "y", "z"]
    for another in (longer, other, make_layers(3), make_model()):
        recorded(another, manager, ORDER)
        kinds = [len(recorded(another, manager, ORDER)) for _ in range(2)]
        assert kinds[0] == kinds[1] == manager.last_step.num_groups
        recorded(model, manager, ORDER)
        assert [len(recorded(model, manager, ORDER)) for _ in range(4)][-1] == few


class Odd(Layers):
    """Layers of which one does something else, where asked to."""

    what = None
    at = 4

    def forward(self, x, manager):
        for number, name in enumerate(self.names):
            layer = self.layers[number]
            run = partial(lambda layer, x: layer(x).sin() * 1.0, layer)
            is_odd = manager is not None and number == self.at
            x = (
                self.what(manager, run, x, name)
                if is_odd and self.what
                else in_group(manager, run, x, name)
            )
        return x


def inside(manager, run, x, name):
    """A group that is inside another."""
    return in_group(manager, lambda x: in_group(manager, run, x, "inner"), x, name)


def overlapping(manager, run, x, name):
    """A group that begins before this one and ends after it began."""
    x = start_group(manager, x, "around")
    x = start_group(manager, x, name)
    x = commit_group(manager, x, "around")
    with manager:
        y = run(x)
    return commit_group(manager, y, name)


def forced(manager, run, x, name):
    y = torch.zeros(512)
    return in_group(manager, lambda x: run(x) * (1 + y.sum()), x, name, [y])


def delayed(manager, run, x, name):
    y = in_group(manager, run, x, name, delay=True)
    manager.flush_delayed_groups()
    return y


def by_hand(manager, run, x, name):
    chunk = manager.cur_forward_chunk()
    group = manager.start_group(chunk, name)
    with manager:
        y = run(x)
    chunk.close_group(name)
    manager.commit(group)
    return y


def flushed(manager, run, x, name):
    manager.join_offloads()
    return in_group(manager, run, x, name)


def backward_in_between(manager, run, x, name):
    before = torch.ones(8, requires_grad=True)
    in_group(manager, lambda x: x.sin().exp(), before, name).sum().backward()
    assert torch.equal(before.grad, (before.sin().exp() * before.cos()).detach())
    return in_group(manager, run, x, name)


def without_grad(manager, run, x, name):
    with torch.no_grad():
        in_group(manager, run, x, name)
    return in_group(manager, run, x, name)


def with_other_hooks(manager, run, x, name):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return in_group(manager, run, x, name)


ODD = [
    inside,
    overlapping,
    forced,
    delayed,
    by_hand,
    flushed,
    backward_in_between,
    without_grad,
    with_other_hooks,
]


@pytest.mark.parametrize("what", ODD, ids=lambda what: what.__name__)
@pytest.mark.parametrize("at", [4, 5])
def test_what_comes_between_is_exact_whether_it_is_new_or_in_each_step(what, at):
    torch.manual_seed(0)
    model = nn.ModuleList([Odd(12)])
    model[0].at = at
    manager = steady(model, "random")
    few = len(recorded(model, manager, ORDER))
    model[0].what = what
    for _ in range(5):
        seen = recorded(model, manager, ORDER)
    again = len(recorded(model, manager, ORDER))
    assert again == len(seen)  # no step undoes what the one before has learned
    model[0].what, manager.step_number = None, 63
    assert [len(recorded(model, manager, ORDER)) for _ in range(5)][-1] == few


@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_a_failure_anywhere_leaves_nothing_behind(timing):
    torch.manual_seed(0)
    model = nn.ModuleList([Odd(12)])
    manager = steady(model, timing)
    few = len(recorded(model, manager, ORDER))

    class StopError(Exception):
        pass

    def stop(manager, run, x, name):
        raise StopError

    def stop_inside(manager, run, x, name):
        return in_group(manager, stop, x, name)

    for what in (stop, lambda manager, run, x, name: in_group(manager, partial(stop, 0, 0), x, 0)):
        for at in range(2, 8):
            model[0].what, model[0].at = what, at
            with pytest.raises((StopError, TypeError)):
                run_step(model, manager, ORDER)
            manager.abort()
            assert_nothing_left(manager)
            model[0].what = None
            assert len(recorded(model, manager, ORDER)) in (few, 48)


@pytest.mark.parametrize("timing", TWO_TIMINGS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_groups_go_with_what_is_inside_of_them(timing, recomputes):
    model = make_model(layers=6, recomputes=recomputes)  # each block a group and one inside
    manager = steady(model, timing, max_inflight_bytes=96 * KIB, prefetch_bytes=96 * KIB)
    whole_keys = recorded(model, manager, ORDER, needs_groups=True)
    whole = manager.last_step.by_name
    assert set(whole) == {"norm", "mlp"}
    for _ in range(3):
        keys = recorded(model, manager, ORDER)
        assert 2 * len(keys) <= len(whole_keys) == 48
        for name, stats in manager.last_step.by_name.items():
            before = whole[name]
            assert stats.num_groups == before.num_groups == 24
            assert stats.remade_bytes == before.remade_bytes
            both = before.offloaded_bytes + before.kept_bytes
            assert stats.offloaded_bytes + stats.kept_bytes == both
            assert stats.offloaded_bytes > 0
        assert bool(manager.last_step.remade_bytes) == recomputes


@pytest.mark.parametrize("timing", TIMINGS)
def test_what_groups_share_and_what_is_made_again_comes_back(timing):
    model = make_model(layers=6, recomputes=True)
    manager = make_manager(timing, **ROOM)
    check_steps(model, manager, ORDER, 6)

    class Sharing(Layers):
        def forward(self, x, manager):
            first = x
            for layer, name in zip(self.layers, self.names, strict=True):
                run = partial(lambda layer, first, x: layer(x).sin() * first, layer, first)
                first, x = x, in_group(manager, run, x, name)
            return x

    model = nn.ModuleList([Sharing(12)])
    manager = steady(model, timing)
    assert manager.last_step.offloaded_bytes > 0
    moved = manager.last_step.offloaded_bytes
    for _ in range(3):
        assert len(recorded(model, manager, ORDER)) < 48
        assert manager.last_step.offloaded_bytes == moved


def test_a_part_of_the_graph_may_need_only_a_part_of_them():
    model = make_layers()
    manager = steady(model)
    x = torch.ones(4, 32, requires_grad=True)
    outs = []
    for graphs in (None, manager):
        if graphs:
            graphs.begin_chunk()
        y, kept = x, []
        for name, layer in zip(model[0].names, model[0].layers, strict=True):
            y = in_group(graphs, lambda x, layer=layer: layer(x).sin() * 1.0, y, name)
            kept.append(y)
        outs.append(
            [
                *torch.autograd.grad(kept[4].sum(), x, retain_graph=True),
                *torch.autograd.grad(kept[-1].sum(), x),
            ]
        )
        del kept, y
    assert_same(*outs)
    manager.reset()
    assert_nothing_left(manager)


def test_a_change_in_place_is_found_and_named():
    model = make_layers()
    manager = steady(model)
    manager.begin_chunk()
    x, saved = torch.ones(4, 32, requires_grad=True), []
    for name in model[0].names:
        factor = torch.ones(4, 32)
        saved.append(factor)
        x = in_group(manager, lambda x, factor=factor: x * factor, x, name)
    saved[5].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*layer 5"):
        x.sum().backward()
    manager.abort()


def test_all_keys_lead_to_what_is_recorded():
    model = make_layers()
    manager = steady(model)
    manager.begin_chunk()
    model[0](torch.ones(4, 32, requires_grad=True), manager)
    step = manager.decisions
    firsts = {group.key: group.first_key for group in step.groups()}
    assert step.num_joined + len(firsts) == 12
    joined = {last: first for last, first in firsts.items() if first is not None}
    assert joined
    for last, first in joined.items():
        for order in range(first.order, last.order + 1):
            assert step._groups[GroupKey(0, order)].key == last
    manager.abort()


def test_what_waits_is_committed_where_another_group_comes():
    model = make_layers()
    manager = steady(model)
    assert min(manager.learner.joining) == GroupKey(0, 1)
    manager.begin_chunk()
    x, y = torch.ones(4, 32, requires_grad=True), torch.ones(4, 32)
    x = in_group(manager, torch.sin, x, model[0].names[0])
    z = in_group(manager, lambda x: x * y, x, model[0].names[1], [y])
    step = manager.decisions
    waits = step.waiting
    before = list(step.committed)
    assert waits not in before
    start_group(manager, z, "another")
    assert any(block.forced_by for block in waits.blocks())
    assert (step.waiting, step.num_joined, step.committed) == (None, 0, [*before, waits])
    assert step.is_other()
    manager.abort()
