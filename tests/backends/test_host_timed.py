"""Compute takes the time between two calls, copies that of their bytes, and calls take none."""

from __future__ import annotations

import pytest
import torch
from programs import assert_same, make_config, make_model, one_forward_one_backward, run_step

from megatron_offload.backends import create_backend, simulated
from megatron_offload.backends.base import Backend, Wait
from megatron_offload.backends.simulated import HostTimedBackend, SimulatedBackend
from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.trace_step import trace_step


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(simulated, "perf_counter", clock)
    return clock


@pytest.fixture
def backend(clock):
    # A microsecond a byte.
    return HostTimedBackend(SimulatedConfig(d2h_gbps=0.001, h2d_gbps=0.001))


def now_us(backend):
    return backend.timestamp(backend.compute_stream())


def test_compute_takes_the_time_between_calls(backend, clock):
    assert now_us(backend) == 0
    clock.now_s += 3e-3
    assert now_us(backend) == pytest.approx(3000)
    assert now_us(backend) == pytest.approx(3000)


def test_what_a_call_takes_is_no_compute(backend, clock, monkeypatch):
    empty = torch.empty

    def slow(*args, **kw):
        clock.now_s += 5.0
        return empty(*args, **kw)

    monkeypatch.setattr(torch, "empty", slow)
    clock.now_s += 1e-6
    backend.empty_device(8)
    assert now_us(backend) == pytest.approx(1)


def test_what_does_not_count_is_no_compute_and_a_failed_call_does_not_stop_the_clock(
    backend, clock
):
    with backend.uncounted():
        clock.now_s += 5.0
        assert now_us(backend) == 0
    clock.now_s += 1e-6
    assert now_us(backend) == pytest.approx(1)
    with pytest.raises(ValueError):
        backend.copy([], backend.d2h_stream, "x")
    clock.now_s += 2e-6
    assert now_us(backend) == pytest.approx(3)


def test_a_stall_is_the_virtual_time_that_is_left_of_a_copy(backend, clock):
    backend.wait(backend.d2h_stream, backend.record(backend.compute_stream()), Wait.W1)
    pair = (backend.empty_host(100), torch.zeros(100, dtype=torch.uint8))
    backend.copy([pair], backend.d2h_stream, "x")
    done = backend.record(backend.d2h_stream)
    clock.now_s += 40e-6
    backend.wait(backend.compute_stream(), done, Wait.W2)
    assert backend.stall_us[Wait.W2] == pytest.approx(60)
    assert now_us(backend) == pytest.approx(100)


def test_every_call_of_the_contract_is_timed():
    names = {name for name in vars(Backend) if not name.startswith("_")}
    own = {name for name, part in vars(SimulatedBackend).items() if callable(part)} & names
    assert {"copy", "record", "wait", "empty_device", "timestamp", "note_freed"} <= own
    for name in own:
        assert vars(HostTimedBackend)[name].__wrapped__ is vars(SimulatedBackend)[name]


def test_the_configuration_asks_for_it():
    for host_time, kind in ((False, SimulatedBackend), (True, HostTimedBackend)):
        config = OffloadConfig(backend="simulated", simulated=SimulatedConfig(host_time=host_time))
        assert type(create_backend(config)) is kind


def test_the_bits_and_the_copies_of_a_program_are_the_same():
    order = one_forward_one_backward(4, depth=2)
    model = make_model()
    expected = run_step(model, None, order)
    config = make_config()
    manager = PipelineOffloadManager(config, backend=HostTimedBackend(config.simulated))
    for _ in range(2):
        assert_same(expected, run_step(model, manager, order))
    with trace_step(manager) as trace:
        assert_same(expected, run_step(model, manager, order))
    manager.close()
    kinds = {span.kind for span in trace.of("compute") if span.duration_us > 0}
    assert {"forward", "backward", "other"} <= kinds
