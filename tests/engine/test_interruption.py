"""An exception at every position of a step: nothing leaks, nothing hangs, the next step is right.

Positions are every call of a boundary, every call of the backend, and every line of the engine and
its pools, where a keyboard interrupt can come.
"""

from __future__ import annotations

import contextlib
import gc
import sys

import pytest
import torch
import traps
import zoo
from programs import (
    KIB,
    assert_nothing_left,
    assert_same,
    check_steps,
    forward,
    make_manager,
    make_model,
    num_pending,
    one_forward_one_backward,
    open_group,
    run_step,
)
from traps import InjectedError, LineTrap, Trap

from megatron_offload.engine.observer import Observer
from megatron_offload.errors import StateError
from megatron_offload.frontends.whole_model import OffloadActivations
from megatron_offload.memory.storage_ref import count_together

ORDER = one_forward_one_backward(3, depth=2)
SETTINGS = {"max_inflight_bytes": 12 * KIB, "prefetch_bytes": 12 * KIB, "min_tensor_bytes": 1024}

STEP_NAMES = ("manager", "step", "transfers", "copies", "group", "hooks", "recipe")
STEP_FILES = {f"{name}.py" for name in STEP_NAMES}
BACKEND_CALLS = ("wait_compute", *traps.BACKEND_CALLS)
BOUNDARY_CALLS = ("commit", "enter_chunk", "enter_backward", "leave_backward", "begin_chunk")


def run_interrupted(model, manager, *, aborts):
    """Run a step that is to fail, as a loop with `step()` does, or as one that knows nothing."""
    try:
        if aborts:
            with manager.step():
                run_forwards_and_backwards(model, manager)
        else:
            run_forwards_and_backwards(model, manager)
            manager.reset()
    except (InjectedError, KeyboardInterrupt, torch.OutOfMemoryError):
        return True
    return False


def run_forwards_and_backwards(model, manager):
    graphs = {}
    for action, microbatch in ORDER:
        if action == "B":
            graphs.pop(microbatch).backward()
        else:
            graphs[microbatch] = forward(model, manager, seed=microbatch)


def check_every_position(model, manager, trap, *, aborts, **which):
    """Let one step after the other fail, each at the next position; see the two after it."""
    expected = run_step(model, None, ORDER)

    def check():
        if manager.guard.has_failed:
            # Else a copy could write to what an unwound frame gave back.
            assert num_pending(manager.backend) == 0
        if aborts:
            gc.collect()  # the exception's traceback held the graphs
            assert_nothing_left(manager)
        for _ in range(2):
            assert_same(expected, run_step(model, manager, ORDER))
            gc.collect()
            assert_nothing_left(manager)
            check_tiling(manager.host_pool)

    def step():
        return run_interrupted(model, manager, aborts=aborts)

    return traps.check_every_position(trap, step, check, share=0.7, **which)


def check_tiling(pool):
    for slab in pool._slabs:
        at = 0
        for piece in slab:
            assert piece.offset == at
            at += piece.num_bytes
        assert at == slab.base.nbytes
    free = [piece for same_size in pool._free.values() for piece in same_size]
    stats = pool.stats
    assert sum(piece.num_bytes for piece in free) == stats.slab_bytes_total - stats.in_use_bytes
    assert len({id(piece) for piece in free}) == len(free), "nothing is allocated twice"


@pytest.mark.parametrize(
    ("after", "aborts"),
    [
        pytest.param(False, True, id="before-step"),
        pytest.param(True, False, id="after-no step"),
        pytest.param(False, False, id="before-no step", marks=pytest.mark.slow),
        pytest.param(True, True, id="after-step", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", BOUNDARY_CALLS)
def test_an_error_at_every_boundary(monkeypatch, name, after, aborts):
    model, manager, trap = make_model(layers=2), make_manager("late", **SETTINGS), Trap()
    monkeypatch.setattr(manager, name, trap.around(getattr(manager, name), after=after))
    expected_calls = 3 if name in ("enter_chunk", "begin_chunk") else 12
    assert check_every_position(model, manager, trap, aborts=aborts) == expected_calls


@pytest.mark.sampled
@pytest.mark.parametrize("aborts", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("timing", ["late", "random"])
def test_an_error_at_every_call_of_the_backend(request, monkeypatch, timing, after, aborts):
    model, trap = make_model(layers=2, recomputes=True), Trap()
    manager = make_manager(timing, **SETTINGS)
    for name in BACKEND_CALLS:
        call = getattr(manager.backend, name)
        monkeypatch.setattr(manager.backend, name, trap.around(call, after=after))
    stride = 3 if request.config.getoption("--quick") else 1
    assert check_every_position(model, manager, trap, aborts=aborts, stride=stride) > 60


@pytest.fixture
def line_trap():
    """Autograd runs backwards on the CPU in the caller's thread, so one trace sees both ways."""
    trap, before = LineTrap(), sys.gettrace()
    sys.settrace(trap)
    yield trap
    sys.settrace(before)


@pytest.mark.parametrize("aborts", [True, False], ids=["step", "no step"])
@pytest.mark.timeout(1200)
def test_a_keyboard_interrupt_at_every_line(request, line_trap, aborts):
    stride = request.config.getoption("--every-line")
    model, manager = make_model(layers=2, recomputes=True), make_manager("random", **SETTINGS)
    which = {"first": 7 % stride, "stride": stride}
    assert check_every_position(model, manager, line_trap, aborts=aborts, **which) > 1000
    assert line_trap.files >= STEP_FILES


def refuse_memory(monkeypatch, manager, refuses):
    """Let the device have no memory for reloads while ``refuses()``; return how often it hadn't."""
    allocate, refused = manager.backend.empty_device_like, []

    def empty_device_like(host):
        if refuses():
            refused.append(host)
            raise torch.OutOfMemoryError
        return allocate(host)

    monkeypatch.setattr(manager.backend, "empty_device_like", empty_device_like)
    return refused


@pytest.mark.parametrize("shortage", ["ahead of time", "in flight"])
def test_memory_that_can_not_be_had_comes_later_or_from_what_is_in_flight(monkeypatch, shortage):
    model = make_model()
    if shortage == "ahead of time":
        manager = make_manager(max_inflight_bytes=0, prefetch_bytes=64 * KIB)
        run_step(model, manager, ORDER)
        refused = refuse_memory(monkeypatch, manager, lambda: manager.budget.held_bytes > 16 * KIB)
    else:
        manager = make_manager(max_inflight_bytes=24 * KIB, prefetch_bytes=0)
        refused = refuse_memory(monkeypatch, manager, lambda: manager.window.num_inflight)
    check_steps(model, manager, ORDER)
    assert refused
    assert manager.last_step.num_memory_shortages > 0


def test_memory_that_can_not_be_had_at_all_is_an_error_and_the_next_step_works(monkeypatch):
    model, manager = make_model(), make_manager()
    with monkeypatch.context() as context:
        refuse_memory(context, manager, lambda: True)
        assert run_interrupted(model, manager, aborts=False)
    check_steps(model, manager, ORDER)


def test_a_step_that_ends_after_a_failed_call_teaches_nothing(monkeypatch):
    model, manager, trap = make_model(layers=2), make_manager(**SETTINGS), Trap()
    check_steps(model, manager, ORDER)
    monkeypatch.setattr(manager.backend, "copy", trap.around(manager.backend.copy, after=False))
    trap.arm(5)
    with contextlib.suppress(InjectedError):
        run_forwards_and_backwards(model, manager)
    trap.disarm()
    manager.reset()
    assert manager.learner.profile is None
    assert not manager.guard.has_failed
    gc.collect()
    assert_nothing_left(manager)
    check_steps(model, manager, ORDER)


def test_hooks_that_nobody_took_off_are_gone_with_the_next_chunk():
    manager, *_ = open_group()
    manager.__enter__()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    manager.begin_chunk()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    manager.__exit__()


def test_no_hooks_are_in_force_that_the_manager_does_not_know():
    class Interrupting(list):
        def append(self, item):
            raise KeyboardInterrupt

    manager, *_ = open_group()
    manager._packs = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        manager.__enter__()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_call_from_inside_a_call_is_an_error_and_no_deadlock():
    class Trimming(Observer):
        def copy_starts(self, direction):
            manager.trim()

    model, manager = make_model(), make_manager()
    loss = forward(model, manager)
    with manager.observed_by(Trimming()):
        with pytest.raises(StateError, match="trim was called from inside a call"):
            loss.backward()
    manager.abort()
    check_steps(model, manager, ORDER)


# A program without marks


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_keyboard_interrupt_at_every_line_without_marks(request, line_trap):
    """See the two steps after each that has failed."""
    manager = make_manager("random", max_inflight_bytes=8192, prefetch_bytes=8192)
    offload = OffloadActivations(max_fwd_stash_size=3, min_offload_size=0, manager=manager)
    expected = zoo.train("views", None, steps=1, order="FFBB")

    def check():
        for _ in range(2):
            gc.collect()  # the exception's traceback held the graphs
            assert_same(expected, zoo.train("views", offload, steps=1, order="FFBB"))
        offload.end_step()
        gc.collect()
        assert_nothing_left(manager)
        assert not offload._groups._forwards

    def step():
        try:
            zoo.train("views", offload, steps=1, order="FFBB")
        except (InjectedError, KeyboardInterrupt):
            return True
        return False

    stride = request.config.getoption("--every-line")
    which = {"share": 0.8, "first": 5 % stride, "stride": stride}
    assert traps.check_every_position(line_trap, step, check, **which) > 1000


class Interrupts:
    @property
    def _version(self):
        raise KeyboardInterrupt


def test_an_interrupt_leaves_a_version_as_it_was():
    tensor = torch.ones(2)
    with pytest.raises(KeyboardInterrupt):
        count_together(tensor, Interrupts())
    assert tensor._version == 0
