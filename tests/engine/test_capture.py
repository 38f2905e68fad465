"""A whole step captured into a graph: nothing forbidden, and memory that no one else has."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from programs import (
    KIB,
    ORDER,
    TIMINGS,
    Capturing,
    assert_nothing_left,
    assert_same,
    forward,
    make_manager,
    make_model,
    run_step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import OffloadActivations
from megatron_offload.engine.observer import Observer
from megatron_offload.errors import StateError
from megatron_offload.integrations.megatron_search import MegatronSearch
from megatron_offload.run.launch import ReportedSearch

make_capturing = functools.partial(make_manager, backend_type=Capturing)


def settled(timing="late", *, model=None, **settings):
    """Return a model and its manager, which has learned what a step looks like."""
    model, manager = model or make_model(), make_capturing(timing, **settings)
    for _ in range(3):
        run_step(model, manager, ORDER)
    assert manager.last_step.reloaded_bytes > 0
    return model, manager


def host_addresses(manager):
    """Return the addresses of host memory that copies go to from here on."""
    found, copy = set(), manager.backend.copy

    def watch(pairs, stream, label):
        if stream is manager.backend.d2h_stream:
            found.update(host.data_ptr() for host, _ in pairs)
        return copy(pairs, stream, label)

    manager.backend.copy = watch
    return found


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_captured_step_asks_for_nothing_forbidden_and_has_the_same_bits(timing):
    expected = run_step(make_model(), None, ORDER)
    model, manager = settled(timing)
    moved = manager.last_step.offloaded_bytes
    with manager.backend.capture():
        assert_same(expected, run_step(model, manager, ORDER))
    assert manager.last_step.is_captured
    assert manager.last_step.offloaded_bytes == moved
    assert "replay" in str(manager.last_step)
    for _ in range(3):
        assert_same(expected, run_step(model, manager, ORDER))
    assert not manager.last_step.is_captured
    assert_nothing_left(manager)


def test_nobody_else_gets_the_host_memory_that_replays_write_to():
    model, manager = settled()
    addresses = host_addresses(manager)
    with manager.backend.capture():
        run_step(model, manager, ORDER)
    of_graph = set(addresses)
    pinned_bytes = manager.host_pool.stats.slab_bytes_total
    addresses.clear()
    waits = mock.Mock(wraps=manager.backend.sync_copies)
    manager.backend.sync_copies = waits
    for _ in range(2):
        run_step(model, manager, ORDER)
    waits.assert_not_called()  # as it is where memory is freed
    assert of_graph
    assert addresses
    assert not of_graph & addresses
    assert manager.host_pool.stats.slab_bytes_total > pinned_bytes, "both count"
    manager.trim()
    assert manager.host_pool.stats.slab_bytes_total == pinned_bytes
    manager.close()
    assert manager.host_pool.stats.slab_bytes_total == 0


def test_what_nothing_was_pinned_for_is_kept_on_the_device():
    model, manager = make_model(), make_capturing()
    expected = run_step(make_model(), None, ORDER)
    with manager.backend.capture():
        assert_same(expected, run_step(model, manager, ORDER))
    assert manager.last_step.offloaded_bytes == 0
    assert manager.last_step.num_unpinnable_blocks > 0
    assert_same(expected, run_step(model, manager, ORDER))
    assert manager.last_step.offloaded_bytes > 0


def test_what_was_reloaded_and_was_not_read_is_joined_too():
    model, manager = settled(prefetch_bytes=64 * KIB)
    graphs = []
    with manager.backend.capture():
        graphs += [forward(model, manager, seed=seed) for seed in range(2)]
        graphs[1].backward()
        for group in manager.decisions.groups():
            manager.enter_backward(group)
        manager.reset()
    in_use = manager.host_pool.stats.in_use_bytes
    graphs.clear()
    assert manager.host_pool.stats.in_use_bytes <= in_use


def test_nothing_is_learned_from_it():
    model, manager = settled()
    profile = manager.learner.profile
    with manager.backend.capture():
        run_step(model, manager, [("F", 0), ("B", 0)])
    assert manager.learner.profile is profile


def test_what_draws_random_numbers_is_not_recomputed():
    model = make_model(recomputes=True)
    _, manager = settled(model=model)
    assert manager.last_step.recomputed_bytes > 0
    expected = run_step(make_model(recomputes=True), None, ORDER)
    with manager.backend.capture():
        assert_same(expected, run_step(model, manager, ORDER))
    assert manager.last_step.recomputed_bytes == 0


def searching(manager, search=MegatronSearch):
    """Let a manager look for rows of models that are still to come."""
    manager.tuner = search(manager)
    return manager.tuner


def test_a_search_that_is_not_over_is_an_error():
    model, manager = make_model(), make_capturing(policy={"kind": "auto"})
    searching(manager)
    with pytest.raises(StateError, match="cuda_graph_warmup_steps"), manager.backend.capture():
        run_step(model, manager, ORDER)


def test_the_launcher_reports_nothing_of_a_captured_step(tmp_path):
    model, manager = settled(policy={"kind": "modules"})
    searching(manager, functools.partial(ReportedSearch, report=tmp_path))
    with manager.backend.capture():
        run_step(model, manager, ORDER)
    assert manager.tuner.is_converged
    assert not list(tmp_path.iterdir())


def test_an_evaluation_that_is_captured_takes_nothing_from_a_step():
    model, manager = settled(policy={"kind": "auto"})
    search = searching(manager)
    with manager.backend.capture(), torch.no_grad():
        forward(model, manager)
        manager.reset()
    assert manager.last_step.is_captured
    assert not search.is_converged
    run_step(model, manager, ORDER)
    assert manager.last_step.num_groups > 0


def test_a_step_that_is_looked_at_is_an_error():
    model, manager = settled()
    with (
        pytest.raises(StateError, match="is looked at"),
        manager.observed_by(Observer()),
        manager.backend.capture(),
    ):
        run_step(model, manager, ORDER)


def test_a_region_that_a_graph_has_is_never_allocated_again():
    manager = make_capturing()
    pool = manager.host_pool
    region, other = pool.allocate(4 * KIB), pool.allocate(4 * KIB)
    pool.free(other, None)
    pool.leave_to_graph()
    pool.free(region, None)
    assert pool.stats.in_use_bytes == 0
    later = [pool.allocate(4 * KIB) for _ in range(4)]
    addresses = {each.tensor.data_ptr() for each in later}
    assert not addresses & {region.tensor.data_ptr(), other.tensor.data_ptr()}
    for each in later:
        pool.free(each, None)
    assert pool.shrink(16 * KIB) == 0, "they are not the graph's"
    pinned_bytes = pool.stats.slab_bytes_total
    pool.recover(lambda _: 0)
    assert pool.stats.slab_bytes_total == pinned_bytes


@pytest.mark.parametrize("timing", ["late", "random"])
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_a_program_without_marks_is_captured_too(has_checkpoints, timing):
    manager = make_capturing(timing, policy={"kind": "modules"})
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.randn(32, 64)
    context = OffloadActivations(manager=manager)

    def take_step(context):
        model.zero_grad()
        with context:
            y = x
            for layer in model:
                y = checkpoint(layer, y, use_reentrant=False) if has_checkpoints else layer(y)
        y.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = take_step(nullcontext())
    for _ in range(3):
        take_step(context)
        assert context.end_step()
    with manager.backend.capture():
        assert_same(expected, take_step(context))
        assert context.end_step()
    assert manager.last_step.is_captured
    assert manager.last_step.reloaded_bytes > 0
    assert_same(expected, take_step(context))
    assert context.end_step()
    assert_nothing_left(manager)
