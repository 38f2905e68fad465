"""Errors, shortages and checking on a real device: exact afterwards, and all memory is reloaded."""

from __future__ import annotations

import gc

import pytest
import torch
from programs import assert_nothing_left, assert_same
from test_cuda import MIB, Layer, Remade, make_inputs, make_manager, make_model, run_step
from traps import BACKEND_CALLS, InjectedError, Trap

from megatron_offload.errors import CorruptionError

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


def test_less_host_memory_is_more_device_memory_and_exact():
    model = make_model(layers=6)
    inputs = make_inputs(model, num_microbatches=2, rows=4096)
    order = [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    expected = run_step(model, None, inputs, order)
    wanted_bytes, peaks, refused = None, [], []
    for share in (1.0, 0.5, "one block", 0.0):
        cap_bytes = 8192 * MIB
        if share == "one block":
            cap_bytes = 64 * MIB
        elif share != 1.0:
            cap_bytes = int(share * wanted_bytes)
        manager = make_manager(host_memory_bytes=cap_bytes, prefetch_bytes=0)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            assert_same(expected, run_step(model, manager, inputs, order))
        peaks.append(torch.cuda.max_memory_allocated())
        refused.append(manager.last_step.refused_bytes)
        wanted_bytes = wanted_bytes or manager.last_step.peak_host_bytes
        assert manager.host_pool.stats.slab_bytes_total <= cap_bytes
        manager.close()
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[1] < peaks[-1]
    assert refused[0] == 0 < refused[1] < refused[-1]


def test_checking_passes_what_is_right_and_stops_at_a_flipped_bit(monkeypatch):
    model = make_model(layers=3)
    inputs = make_inputs(model)
    expected = run_step(model, None, inputs)
    manager = make_manager(checking=True)
    for _ in range(2):
        assert_same(expected, run_step(model, manager, inputs))
        assert manager.last_step.leaks == ()
    copy, num_copies = manager.backend.copy, 0

    def copy_badly(pairs, stream, label):
        nonlocal num_copies
        copy(pairs, stream, label)
        if stream is manager.backend.h2d_stream:
            num_copies += 1
            if num_copies == 7:
                with torch.cuda.stream(stream):
                    pairs[-1][0].view(-1).view(torch.uint8)[-1:] ^= 1
        return manager.backend.record(stream)

    monkeypatch.setattr(manager.backend, "copy", copy_badly)
    with pytest.raises(
        CorruptionError, match=r"group mlp\[chunk \d, group \d\]: a tensor of shape"
    ):
        with manager.step():
            run_step(model, manager, inputs)
    monkeypatch.undo()
    assert_same(expected, run_step(model, manager, inputs))
    manager.close()
