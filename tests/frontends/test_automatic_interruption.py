"""Errors at every position of a program without marks: nothing leaks, the next step is right."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
import zoo
from programs import assert_nothing_left, assert_same, make_manager
from traps import BACKEND_CALLS, InjectedError, LineTrap, Trap

from megatron_offload.frontends.whole_model import OffloadActivations

pytestmark = pytest.mark.usefixtures("quick_collections")

SETTINGS = {"max_inflight_bytes": 8192, "prefetch_bytes": 8192}


def make_offload(timing):
    return OffloadActivations(
        max_fwd_stash_size=3, min_offload_size=0, manager=make_manager(timing, **SETTINGS)
    )


def step(offload):
    return zoo.train("views", offload, steps=1, order="FFBB")


def check_every_position(offload, trap, positions=range):
    expected = step(None)
    trap.disarm()
    for _ in range(2):
        assert_same(expected, step(offload))
    trap.arm(None)
    step(offload)
    num_positions = trap.num_calls
    for position in positions(num_positions):
        trap.arm(position)
        try:
            step(offload)
        except (InjectedError, KeyboardInterrupt):
            pass
        else:
            assert position >= trap.num_calls > 0.8 * num_positions
            break
        trap.disarm()
        for _ in range(2):
            gc.collect()  # the exception's traceback held the graphs
            assert_same(expected, step(offload))
        offload.end_step()
        gc.collect()
        assert_nothing_left(offload.manager)
        assert not offload._groups._forwards
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return num_positions


@pytest.mark.slow
@pytest.mark.parametrize(("timing", "after"), [("late", False), ("random", True)])
def test_an_error_at_every_call_of_the_backend(monkeypatch, timing, after):
    offload, trap = make_offload(timing), Trap()
    for name in BACKEND_CALLS:
        call = getattr(offload.manager.backend, name)
        monkeypatch.setattr(offload.manager.backend, name, trap.around(call, after=after))
    assert check_every_position(offload, trap) > 50


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_keyboard_interrupt_at_every_line(request):
    stride = request.config.getoption("--every-line")
    trap, before = LineTrap(), sys.gettrace()
    sys.settrace(trap)
    try:
        num_lines = check_every_position(
            make_offload("random"), trap, lambda count: range(5 % stride, count, stride)
        )
    finally:
        sys.settrace(before)
    assert num_lines > 1000
