"""Programs that compute on two streams, as where one microbatch's exchanges overlap another's work.

Neither stream is ordered behind the other but where the program says so: what the engine does on
the way of one must order the memory of the other too.
"""

from __future__ import annotations

import pytest
import torch
from programs import (
    KIB,
    ORDER,
    TIMINGS,
    Times,
    assert_nothing_left,
    assert_same,
    check_steps,
    make_manager,
    make_model,
)

from megatron_offload.backends.base import Wait
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.recompute.recipes import recomputable

SETTINGS = [
    {"max_inflight_bytes": 0, "prefetch_bytes": 0},
    {"max_inflight_bytes": 16 * KIB, "prefetch_bytes": 24 * KIB},
    {"max_inflight_bytes": 0, "prefetch_bytes": 64 * KIB},
]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("crosses", [False, True])
def test_each_microbatch_and_its_backward_may_have_a_stream(timing, settings, recomputes, crosses):
    manager = make_manager(timing, **settings)
    backend = manager.backend
    streams = backend.compute_stream(), backend.side_stream
    model = make_model(recomputes=recomputes)

    def place(action, microbatch):
        here = streams[(microbatch + (crosses and action == "B")) % 2]
        if crosses and action == "B":  # it needs what forward has computed; nothing waits for it
            here.wait_event(streams[microbatch % 2].record_event())
        return backend.computing_on(here)

    check_steps(model, manager, ORDER, 3, place=place)
    assert manager.last_step.reloaded_bytes > 0
    assert (manager.last_step.recomputed_bytes > 0) == recomputes


def shared_by_two(manager):
    """Return an input, two outputs that share a saved tensor, and the gradients to expect."""
    x, saved = torch.randn(512, requires_grad=True), torch.randn(512)
    expected = [saved.clone()]
    manager.begin_chunk()
    start_group(manager, x, "g")
    with manager:
        outputs = [Times.apply(x, saved), Times.apply(x, saved)]
    del saved  # else it is read as it is
    commit_group(manager, outputs[0], "g")
    manager.join_offloads()
    return x, outputs, expected


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("is_read", [False, True])
def test_a_graph_may_be_dropped_on_another_stream(timing, is_read):
    manager = make_manager(timing)
    backend = manager.backend
    for _ in range(2):
        x, outputs, expected = shared_by_two(manager)
        if is_read:
            found = torch.autograd.grad(outputs[0].sum(), x, retain_graph=True)
            assert_same(expected, found)
        else:
            for group in manager.decisions.groups():
                manager.enter_backward(group)
        with backend.computing_on(backend.side_stream):
            del x, outputs
        manager.reset()
        assert manager.last_step.reloaded_bytes == 512 * 4
        assert_nothing_left(manager)


def test_each_that_reads_waits(monkeypatch):  # where nothing is watched, a wait is not looked for
    manager = make_manager("eager")
    backend, waited, read = manager.backend, [], []
    wait, manager.backend.observes = backend.wait, False

    def waiting(stream, event, why):
        if why is Wait.W4:
            waited.append(stream)
        wait(stream, event, why)

    monkeypatch.setattr(backend, "wait", waiting)
    streams = backend.compute_stream(), backend.side_stream
    x, outputs, expected = shared_by_two(manager)
    monkeypatch.setattr(backend, "read_on", lambda stream, tensor: read.append(stream))
    for stream in streams:
        with backend.computing_on(stream):
            assert_same(expected, torch.autograd.grad(outputs.pop().sum(), x))
    assert waited == list(streams)
    assert read == [backend.side_stream]
    manager.reset()


def test_what_is_recomputed_may_read_what_is_kept_of_another_stream(monkeypatch):
    manager = make_manager("eager", max_inflight_bytes=1 << 20, begins_chunk=True)
    backend, read = manager.backend, []
    x = torch.randn(512, requires_grad=True)
    y = start_group(manager, x, "g")
    with manager:
        y = y * torch.ones(512)  # saves the ones, and y by the next
        z = recomputable(torch.cos, y, manager=manager)
        out = Times.apply(Times.apply(x, y), z)
    commit_group(manager, out, "g")
    place = y.data_ptr()
    del y, z
    monkeypatch.setattr(
        backend, "read_on", lambda stream, tensor: read.append((stream, tensor.data_ptr()))
    )
    with backend.computing_on(backend.side_stream):
        out.sum().backward()
    assert (backend.side_stream, place) in read
    manager.reset()


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_leaves_is_known_to_be_read_where_it_was_saved(monkeypatch, recomputes):
    # The program may have allocated it on another, which hands it on by what the allocator knows.
    manager = make_manager("eager")
    backend, read = manager.backend, []
    monkeypatch.setattr(
        backend, "read_on", lambda stream, tensor: read.append((stream, tensor.data_ptr()))
    )
    manager.begin_chunk()
    x, saved = torch.randn(512, requires_grad=True), torch.randn(512)
    places = [saved.data_ptr()]
    with backend.computing_on(backend.side_stream):
        start_group(manager, x, "g")
        with manager:
            made = recomputable(torch.cos, saved, manager=manager) if recomputes else saved
            places += [made.data_ptr()] * recomputes
            out = Times.apply(Times.apply(x, saved), made)
    commit_group(manager, out, "g")
    manager.join_offloads()
    assert {stream for stream, _ in read} == {backend.side_stream}
    assert sorted(place for _, place in read) == sorted(places)
    del out
    manager.reset()
