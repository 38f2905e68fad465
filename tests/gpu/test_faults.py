"""Errors and shortages on a real device: exact afterwards, and all memory is reloaded."""

from __future__ import annotations

import gc

import pytest
import torch
from programs import assert_nothing_left, assert_same
from test_cuda import MIB, Layer, Remade, make_inputs, make_manager, make_model, run_step
from traps import BACKEND_CALLS, InjectedError, Trap

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.fixture(autouse=True)
def _whole_device():
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("tells", "kind"), [(True, Layer), (False, Layer), (True, Remade)])
def test_an_error_at_every_call_of_the_backend(monkeypatch, tells, kind):
    model = make_model(layers=2, width=512, kind=kind)
    inputs = make_inputs(model, rows=512)
    expected = run_step(model, None, inputs)
    manager = make_manager(max_inflight_bytes=2 * MIB, prefetch_bytes=4 * MIB)
    trap = Trap()
    for name in BACKEND_CALLS:
        call = getattr(manager.backend, name)
        monkeypatch.setattr(manager.backend, name, trap.around(call))
    for _ in range(2):
        assert_same(expected, run_step(model, manager, inputs))
    trap.arm(None)
    run_step(model, manager, inputs)
    num_calls = trap.num_calls
    del expected[:]
    expected += run_step(model, None, inputs)
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    gc.freeze()  # the libraries needn't be looked through each time
    for position in range(3, num_calls, 7):
        trap.arm(position)
        trap.after = position % 2 == 0
        try:
            if tells:
                with manager.step():
                    run_step(model, manager, inputs)
            else:
                run_step(model, manager, inputs)
        except InjectedError:
            pass
        else:  # what is learned decides how many calls a step makes: this one had fewer
            assert position >= trap.num_calls > 0.8 * num_calls
        trap.disarm()
        assert_same(expected, run_step(model, manager, inputs))
        gc.collect()
        assert_nothing_left(manager)
        assert torch.cuda.memory_allocated() <= allocated
    gc.unfreeze()
    manager.close()


def test_a_model_that_runs_out_of_memory_trains_with_offload_from_its_first_step():
    order = [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    model = make_model(layers=12)
    inputs = make_inputs(model, num_microbatches=2, rows=16384)
    run_step(model, None, inputs[:, :64], order)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    expected = [x.cpu() for x in run_step(model, None, inputs, order)]
    needed = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    room = needed * 6 // 10
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room / total)
    with pytest.raises(torch.OutOfMemoryError):
        run_step(model, None, inputs, order)
    gc.collect()
    torch.cuda.empty_cache()
    manager = make_manager(max_inflight_bytes=None, prefetch_bytes=None)
    for _ in range(3):
        assert_same(expected, [x.cpu() for x in run_step(model, manager, inputs, order)])
        assert_nothing_left(manager)
    assert torch.cuda.max_memory_reserved() <= needed
    manager.close()
