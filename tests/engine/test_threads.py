"""Contexts and managers that several threads share: one thread at a time, or a clear refusal.

And graphs that die between any two lines or in another thread, or outlive an abort.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from programs import (
    KIB,
    assert_nothing_left,
    assert_same,
    check_steps,
    forward,
    in_thread,
    make_config,
    make_manager,
    make_model,
    run_step,
)
from test_interruption import ORDER, SETTINGS, check_tiling
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from traps import LineTrap, Trap

from megatron_offload.engine import transfers
from megatron_offload.errors import StateError
from megatron_offload.frontends.ratio import CPUOffload
from megatron_offload.frontends.whole_model import OffloadActivations


def make_whole():
    return OffloadActivations(min_offload_size=0, manager=make_manager())


@pytest.fixture(params=["whole", "ratio"])
def context(request):
    return make_whole() if request.param == "whole" else CPUOffload(1.0, "shared", make_config())


def run(context):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    with context:
        loss = model(torch.randn(4, 32)).square().mean()
    return loss, model


def test_a_second_thread_is_refused_while_the_first_is_inside(context):
    with context:
        with pytest.raises(StateError, match=r"in use in thread 'MainThread'.*asked for in 'other"):
            in_thread(lambda: context.__enter__())
        y = torch.ones(1024, requires_grad=True).sin().exp()
    y.sum().backward()
    del y
    context.end_step()
    assert context.last_step.offloaded_bytes > 0


def test_a_second_thread_is_refused_until_the_first_s_backward_is_over(context):
    loss, model = run(context)
    with pytest.raises(StateError, match="a context or manager of its own"):
        in_thread(lambda: run(context))
    loss.backward()
    expected = [p.grad for p in model.parameters()]

    def step():
        loss, model = run(context)
        loss.backward()
        return [p.grad for p in model.parameters()]

    assert_same(expected, in_thread(step))


def test_what_a_thread_has_left_when_it_ended_blocks_no_other(context):
    loss, _ = in_thread(lambda: run(context))
    other, _ = run(context)
    loss.backward()
    other.backward()


def test_marked_groups_belong_to_one_thread():
    manager = make_manager()
    chunk = manager.begin_chunk()
    manager.start_group(chunk, "mine")
    with manager:
        kept = torch.ones(64, requires_grad=True).sin()
    for asked in (lambda: manager.start_group(chunk, "other's"), manager.begin_chunk):
        with pytest.raises(StateError, match="in use in thread 'MainThread'"):
            in_thread(asked)
    manager.commit(chunk.close_group("mine"))
    kept.sum().backward()
    del kept
    manager.reset()
    in_thread(manager.begin_chunk)
    assert_nothing_left(manager)


def test_threads_that_race_are_right_or_refused():
    models = [run(torch.enable_grad())[1] for _ in range(4)]
    x = torch.linspace(-1, 1, 128).view(4, 32)
    expected = torch.autograd.grad(models[0](x).sum(), list(models[0].parameters()))
    context, start = make_whole(), threading.Barrier(len(models))

    def train(model):
        start.wait()
        for _ in range(20):
            try:
                with context:
                    loss = model(x).sum()
            except StateError:
                continue
            yield torch.autograd.grad(loss, list(model.parameters()))
            del loss

    with ThreadPoolExecutor(len(models)) as pool:
        results = list(pool.map(lambda model: list(train(model)), models))
    assert any(results)
    for found in results:
        for gradients in found:
            assert_same(expected, gradients)
    context.end_step()
    assert_nothing_left(context.manager)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_in_autograd_s_own_thread_enters_the_context_again(context, reentrant):
    # On a GPU backward, and so every recompute, runs in another thread than forward.
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    x = torch.randn(16, 64, requires_grad=True)

    def block(x):
        with context:
            return second(x).sin()

    def gradients(block, backward):
        with context:
            y = first(x).cos()
        loss = checkpoint(block, y, use_reentrant=reentrant).exp().mean()
        del y
        backward(loss)
        found = [p.grad.clone() for p in (x, *first.parameters(), *second.parameters())]
        for p in (x, *first.parameters(), *second.parameters()):
            p.grad = None
        return found

    expected = gradients(lambda x: second(x).sin(), torch.Tensor.backward)
    for _ in range(3):
        assert_same(expected, gradients(block, lambda loss: in_thread(loss.backward)))
    context.end_step()
    assert context.last_step.offloaded_bytes > 0


def test_torch_is_as_it_was_behind_the_last_forward_of_all_threads():
    original = saved_tensors_hooks.__enter__

    def enter():
        with OffloadActivations():
            assert saved_tensors_hooks.__enter__ is not original

    with OffloadActivations():
        threads = [threading.Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert saved_tensors_hooks.__enter__ is not original
    assert saved_tensors_hooks.__enter__ is original


@pytest.mark.sampled(2)
@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("timing", ["late", "random"])
def test_a_graph_may_die_between_any_two_lines(timing, offset):
    # As it does where the garbage collector finds it in a cycle.
    model = make_model(layers=2, recomputes=True)
    manager = make_manager(timing, host_slab_bytes=16 * KIB, **SETTINGS)
    expected = run_step(model, None, ORDER)
    old = []

    class Killer(LineTrap):
        def passed(self):
            self.num_calls += 1
            if old and self.num_calls % 17 == offset:
                old.pop()

    for _ in range(3):
        old.extend(forward(model, manager) for _ in range(60))
        manager.reset()
        killer = Killer()
        killer.arm(None)
        results = run_step(model, manager, ORDER)
        killer.disarm()
        assert_same(expected, results)
        old.clear()
        assert_nothing_left(manager)
        check_tiling(manager.host_pool)


def test_a_block_that_dies_inside_a_call_is_freed_by_the_next(monkeypatch):
    model, manager = make_model(layers=2), make_manager(**SETTINGS)
    old = forward(model, manager)
    manager.reset()
    allocate, pool = manager.host_pool.allocate_views, manager.host_pool
    assert pool.stats.in_use_bytes > 0

    def allocate_while_a_graph_dies(parts):
        nonlocal old
        in_use_bytes, old = pool.stats.in_use_bytes, None
        assert pool.stats.in_use_bytes == in_use_bytes, "the pool is in use just now"
        return allocate(parts)

    monkeypatch.setattr(pool, "allocate_views", allocate_while_a_graph_dies)
    check_steps(model, manager, ORDER)


def test_what_died_during_another_thread_s_call_is_not_counted_as_left():
    model, manager = make_model(layers=2), make_manager(**SETTINGS)
    old = [forward(model, manager)]
    manager.reset()
    with manager.guard.lock:
        in_thread(old.clear)
    assert manager.host_pool.stats.in_use_bytes > 0, "put off"
    assert not any(manager.state_of().values())
    assert manager.host_pool.stats.in_use_bytes == 0


@pytest.mark.parametrize("position", [*range(6), "aborted"])
def test_a_graph_that_survives_an_interrupt_or_an_abort_is_still_right(monkeypatch, position):
    model, trap = make_model(layers=2), Trap()
    manager = make_manager(max_inflight_bytes=4096 * KIB)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(forward(model, None), parameters)
    loss = forward(model, manager)
    if position == "aborted":
        manager.abort()
    else:
        trap.error = KeyboardInterrupt
        counts = trap.around(transfers.use_count_of, after=True)
        monkeypatch.setattr(transfers, "use_count_of", counts)
        trap.arm(position)
        with contextlib.suppress(KeyboardInterrupt):
            manager.join_offloads()
        trap.disarm()
        assert manager.guard.has_failed
    assert_same(expected, torch.autograd.grad(loss, parameters))
    del loss
    if position == "aborted":
        assert_nothing_left(manager)
    else:
        manager.reset()
    check_steps(model, manager, ORDER)
