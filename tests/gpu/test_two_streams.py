"""Microbatches on two streams that nothing orders: no memory is handed on before its copy is over.

Copies are made late, so that what does not wait for one meets bytes that are not its own.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from programs import Times, assert_nothing_left, assert_same, one_forward_one_backward, run_step
from test_cuda import MIB, make_inputs, make_manager, make_model

from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.recompute.recipes import recomputable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

ORDER = one_forward_one_backward(8, depth=4)
LATE_CYCLES = 3_000_000


def copies_late(monkeypatch, backend):
    copy = backend.copy

    def copy_late(pairs, stream, label):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE_CYCLES)
        return copy(pairs, stream, label)

    monkeypatch.setattr(backend, "copy", copy_late)


@pytest.mark.parametrize("inflight_bytes", [0, 96 * MIB, 384 * MIB])
@pytest.mark.parametrize("crosses", [False, True])
def test_every_bit_is_the_same(monkeypatch, inflight_bytes, crosses):
    model = make_model(width=512)
    inputs = make_inputs(model, num_microbatches=8)
    streams = [torch.cuda.Stream() for _ in range(2)]

    @contextlib.contextmanager
    def place(action, microbatch):
        if (action, microbatch) == ORDER[0]:
            torch.cuda.synchronize()
        here, other = streams[microbatch % 2], streams[1 - microbatch % 2]
        if action == "B":
            here.wait_stream(other)  # both add to the same gradients
        if crosses and action == "B":
            here = other  # autograd itself goes on where forward was
        with torch.cuda.stream(here):
            yield
        if (action, microbatch) == ORDER[-1]:
            torch.cuda.synchronize()

    def take():
        return run_step(model, manager, ORDER, inputs=inputs, place=place)

    manager = None
    expected = take()
    manager = make_manager(max_inflight_bytes=inflight_bytes, prefetch_bytes=96 * MIB)
    copies_late(monkeypatch, manager.backend)
    for _ in range(4):
        assert_same(expected, take())
        assert_nothing_left(manager)
    assert manager.last_step.reloaded_bytes > 0
    manager.close()


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_another_stream_allocated_is_not_its_own_again_too_soon(monkeypatch, recomputes):
    computing, sending = (torch.cuda.Stream() for _ in range(2))
    manager = make_manager(prefetch_bytes=0)
    copies_late(monkeypatch, manager.backend)
    for number in range(4):
        with torch.cuda.stream(sending):
            received = torch.full((8 * MIB,), number + 1.0, device="cuda")
        torch.cuda.synchronize()
        manager.begin_chunk()
        with torch.cuda.stream(computing):
            x = torch.ones(8 * MIB, device="cuda", requires_grad=True)
            start_group(manager, x, "g")
            torch.cuda._sleep(LATE_CYCLES)
            with manager:
                made = (
                    recomputable(torch.neg, received, manager=manager) if recomputes else received
                )
                y = Times.apply(Times.apply(x, received), made)
            del received, made
            commit_group(manager, y, "g")
            manager.join_offloads()
        with torch.cuda.stream(sending):  # nothing orders it behind what has been computed
            other = torch.zeros(8 * MIB, device="cuda")
        with torch.cuda.stream(computing):
            y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
        sign = -1 if recomputes else 1
        assert (x.grad == sign * (number + 1.0) ** 2).all()
        manager.reset()
        assert manager.last_step.reloaded_bytes == 32 * MIB
        del x, y, other
    manager.close()
