"""Contexts and managers that several threads share: one thread at a time, or a clear refusal."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from programs import assert_nothing_left, assert_same, in_thread, make_config, make_manager
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload.errors import StateError
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.frontends.ratio import CPUOffload
from megatron_offload.frontends.whole_model import OffloadActivations


def make_whole():
    return OffloadActivations(min_offload_size=0, manager=make_manager())


@pytest.fixture(params=["whole", "ratio"])
def context(request):
    yield make_whole() if request.param == "whole" else CPUOffload(1.0, "shared", make_config())
    CPUOffload.forget("shared")


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


def test_another_thread_may_run_the_backward(context):
    loss, model = run(context)
    in_thread(loss.backward)
    expected, plain = run(torch.enable_grad())
    expected.backward()
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


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


def test_marked_models_in_two_threads_have_a_manager_each():
    models = [run(torch.enable_grad())[1] for _ in range(2)]

    def train(model):
        manager = make_manager()
        offload_modules(model, ["*"], manager=manager)
        for _ in range(3):
            with manager.step():
                model(torch.ones(4, 32)).sum().backward()
        assert manager.last_step.offloaded_bytes > 0
        return [p.grad for p in model.parameters()]

    with ThreadPoolExecutor(2) as pool:
        assert_same(*pool.map(train, models))


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
