"""Waits of the host, found by line on the simulated device."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch
from programs import make_manager, make_model, one_forward_one_backward, run_step

from megatron_offload.backends.host_timed import HostTimedBackend
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.machine.host_syncs import HostSync, find_host_syncs


def line_of(function, offset):
    return function.__code__.co_firstlineno + offset


def wait_twice(backend):
    backend.sync_copies()
    return 1 + (backend.sync_copies() or backend.num_pending)


def test_each_wait_is_counted_at_its_line_and_what_comes_most_often_comes_first():
    backend = SimulatedBackend()
    with find_host_syncs(backend, num_steps=2) as syncs:
        backend.sync_copies()
        for _ in range(4):
            wait_twice(backend)
    first, second = line_of(wait_twice, 1), line_of(wait_twice, 2)
    source = "return 1 + (backend.sync_copies() or backend.num_pending)"
    assert syncs.per_step()[:2] == [
        (HostSync(__file__, first, "backend.sync_copies()", "sync_copies"), 2),
        (HostSync(__file__, second, source, "sync_copies"), 2),
    ]
    assert [times for _, times in syncs.per_step()] == [2, 2, 0.5]


def test_frames_of_torch_and_of_backends_are_passed_over():
    backend = HostTimedBackend()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            torch.utils.checkpoint.checkpoint(backend.sync_copies, use_reentrant=False)
            return gradient

    x = torch.ones(1, requires_grad=True)
    with find_host_syncs(backend) as syncs:
        Waits.apply(x).backward()
    (sync,) = syncs.counts
    assert sync.file == __file__
    assert sync.line == line_of(Waits.backward, 2)
    assert sync.call.startswith("torch.utils.checkpoint.checkpoint(")


def test_a_wait_on_another_thread_is_counted_too():
    backend = SimulatedBackend()
    with find_host_syncs(backend) as syncs:
        thread = threading.Thread(target=functools.partial(wait_twice, backend))
        thread.start()
        thread.join()
    assert sorted(sync.line for sync in syncs.counts) == [
        line_of(wait_twice, 1),
        line_of(wait_twice, 2),
    ]


def test_a_line_without_source_or_a_long_one_is_told_too():
    backend = SimulatedBackend()
    program = "\n\nbackend.sync_copies()"
    with find_host_syncs(backend) as syncs:
        exec(compile(program, "<made up>", "exec"), {"backend": backend})  # noqa: S102 - our own
        (backend if backend.name == "simulated" else SimulatedBackend(None)).sync_copies()
    made_up, long = syncs.counts
    assert made_up == HostSync("<made up>", 3, "", "sync_copies")
    assert len(long.call) == 60
    assert long.call.endswith("...")


def test_nothing_is_counted_before_and_after_nor_once_the_program_failed():
    backend = SimulatedBackend()
    backend.sync_copies()
    with contextlib.suppress(KeyError), find_host_syncs(backend) as syncs:
        backend.sync_copies()
        raise KeyError
    backend.sync_copies()
    assert sum(syncs.counts.values()) == 1


def test_the_inner_of_two_contexts_is_told():
    backend = SimulatedBackend()
    with find_host_syncs(backend) as outer:
        with find_host_syncs(backend) as inner:
            backend.sync_copies()
        backend.sync_copies()
        backend.sync_copies()
    assert sum(inner.counts.values()) == 1
    assert sum(outer.counts.values()) == 2


def test_a_step_has_a_positive_number():
    with pytest.raises(ValueError, match="at least 1, got 0"), find_host_syncs(num_steps=0):
        pass


def test_without_a_backend_the_device_that_is_there_is_watched():
    with find_host_syncs() as syncs:
        pass
    assert not syncs.counts


def test_an_offloaded_step_never_makes_the_host_wait():
    model, manager = make_model(), make_manager()
    order = one_forward_one_backward(4, depth=2)
    for _ in range(3):
        run_step(model, manager, order)
    with find_host_syncs(manager.backend, num_steps=2) as syncs:
        for _ in range(2):
            run_step(model, manager, order)
    assert manager.last_step.offloaded_bytes > 0
    assert not syncs.counts
