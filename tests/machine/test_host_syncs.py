"""Waits of the host, found by line with a made-up CUDA; and an offloaded step has none."""

from __future__ import annotations

import functools
import threading
import warnings

import pytest
import torch
from programs import make_manager, make_model, one_forward_one_backward, run_step

from megatron_offload.backends import cuda
from megatron_offload.machine.host_syncs import HostSync, find_host_syncs

WARNING = "called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)"


class Mode:
    """PyTorch's sync debug mode."""

    def __init__(self):
        self.value = 0

    def set(self, value):
        self.value = {"default": 0, "warn": 1, "error": 2}.get(value, value)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)


@pytest.fixture(autouse=True)
def mode(monkeypatch):
    mode = Mode()
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode.value)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.set)
    return mode


def item():
    """Do as PyTorch does at ``tensor.item()``, which is no frame of Python's."""
    warnings.warn(WARNING, stacklevel=2)


item.__code__ = item.__code__.replace(co_filename=torch.__file__)


def line_of(function, offset):
    return function.__code__.co_firstlineno + offset


def wait_twice():
    item()
    return 1 + (item() or 1)


@pytest.mark.filterwarnings("error")
def test_each_wait_is_counted_at_its_line(mode):
    with find_host_syncs() as syncs:
        assert mode.value == 1
        item()
        for _ in range(4):
            wait_twice()
    first, second = line_of(wait_twice, 1), line_of(wait_twice, 2)
    assert syncs.most_common(2) == [
        (HostSync(__file__, first, "item()"), 4),
        (HostSync(__file__, second, "return 1 + (item() or 1)"), 4),
    ]
    assert [times for _, times in syncs.most_common()] == [4, 4, 1]


def test_frames_of_torch_are_passed_over():
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            torch.utils.checkpoint.checkpoint(item, use_reentrant=False)
            return gradient

    x = torch.ones(1, requires_grad=True)
    with find_host_syncs() as syncs:
        Waits.apply(x).backward()
    (sync,) = syncs
    assert (sync.file, sync.line) == (__file__, line_of(Waits.backward, 2))


def test_a_wait_on_another_thread_is_counted_too():
    with find_host_syncs() as syncs:
        thread = threading.Thread(target=functools.partial(wait_twice))
        thread.start()
        thread.join()
    lines = [line_of(wait_twice, 1), line_of(wait_twice, 2)]
    assert sorted(sync.line for sync in syncs) == lines


def test_a_line_without_source_or_a_long_one_is_told_too():
    program = "\n\nitem()"
    with find_host_syncs() as syncs:
        exec(compile(program, "<made up>", "exec"), {"item": item})  # noqa: S102 - our own
        assert (item(), "a long line is shown as far as the table has room") != (1, "")
    made_up, long = syncs
    assert made_up == HostSync("<made up>", 3, "")
    assert len(long.call) == 60
    assert long.call.endswith("...")


@pytest.mark.parametrize("found", [0, 1, 2])
def test_what_was_set_before_is_set_again_even_after_an_error(mode, found):
    mode.value = found
    before = warnings.filters[:], warnings.showwarning
    with pytest.raises(KeyError), find_host_syncs():
        raise KeyError
    assert mode.value == found
    assert (warnings.filters[:], warnings.showwarning) == before


def test_other_warnings_go_where_they_went_and_a_wait_to_the_inner_of_two():
    with warnings.catch_warnings(record=True) as seen, find_host_syncs() as outer:
        warnings.warn("of something else", stacklevel=1)
        with find_host_syncs() as inner:
            item()
        item()
    assert [str(warning.message) for warning in seen] == ["of something else"]
    assert (inner.total(), outer.total()) == (1, 1)


def test_without_a_device_nothing_waits(monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with find_host_syncs() as syncs:
        pass
    assert not syncs


def test_an_offloaded_step_never_makes_the_host_wait(monkeypatch):
    model, manager = make_model(), make_manager()
    order = one_forward_one_backward(4, depth=2)
    for _ in range(3):
        run_step(model, manager, order)
    monkeypatch.setattr(manager.backend, "sync_copies", lambda: pytest.fail("the host waits"))
    for _ in range(2):
        run_step(model, manager, order)
    assert manager.last_step.offloaded_bytes > 0
