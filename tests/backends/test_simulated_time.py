"""Virtual time of the simulated device, and the host's time where that counts."""

import pytest
import torch
from test_simulated import TIMINGS, empty_device, filled, make, offload

from megatron_offload.backends import create_backend, simulated
from megatron_offload.backends.base import Backend, Wait
from megatron_offload.backends.simulated import HostTimedBackend, SimulatedBackend
from megatron_offload.config import OffloadConfig, SimulatedConfig


def test_a_copy_takes_its_bytes_over_the_bandwidth():
    backend = make(d2h_gbps=2.0, h2d_gbps=1.0)
    host, target = backend.empty_host(4000), empty_device(backend, 4000)
    backend.copy([(host, filled(7, 4000))], backend.d2h_stream, "x")
    assert backend.timestamp(backend.d2h_stream) == pytest.approx(2.0)
    backend.wait(backend.h2d_stream, backend.record(backend.d2h_stream), Wait.W3)
    backend.wait_compute(backend.h2d_stream, Wait.W6)
    backend.copy([(target, host)], backend.h2d_stream, "x")
    assert backend.timestamp(backend.h2d_stream) == pytest.approx(6.0)
    assert backend.timestamp(backend.compute_stream()) == 0.0


@pytest.mark.parametrize("timing", TIMINGS)
def test_virtual_time_does_not_depend_on_the_timing(timing):
    backend = make(timing, d2h_gbps=1.0)
    source, host = filled(7, 1000), backend.empty_host(1000)
    backend.advance_compute(5.0)
    d2h_done = offload(backend, source, host)
    assert d2h_done.time_us == pytest.approx(6.0)
    backend.wait(backend.compute_stream(), d2h_done, Wait.W2)
    assert backend.timestamp(backend.compute_stream()) == pytest.approx(6.0)


@pytest.mark.parametrize(("compute_us", "lost_us"), [(1.0, 2.0), (3.5, 0.0)])
def test_the_time_lost_in_a_wait_is_booked_under_its_name(compute_us, lost_us):
    backend = make(d2h_gbps=1.0)
    d2h_done = offload(backend, filled(7, 3000), backend.empty_host(3000))
    backend.advance_compute(compute_us)
    backend.wait(backend.compute_stream(), d2h_done, Wait.W2)
    assert backend.stall_us == {wait: lost_us if wait is Wait.W2 else 0.0 for wait in Wait}
    assert backend.timestamp(backend.compute_stream()) == compute_us + lost_us


def test_a_host_sync_holds_the_program_up():
    backend = make(d2h_gbps=1.0)
    offload(backend, filled(7, 3000), backend.empty_host(3000))
    backend.sync_copies()
    assert backend.timestamp(backend.compute_stream()) == pytest.approx(3.0)
    assert sum(backend.stall_us.values()) == 0.0


# The time between two calls.


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
    backend.empty_host(8)
    assert now_us(backend) == pytest.approx(1)


def test_a_failed_call_does_not_stop_the_clock(backend, clock):
    clock.now_s += 1e-6
    with pytest.raises(ValueError):
        backend.copy([], backend.d2h_stream, "x")
    clock.now_s += 2e-6
    assert now_us(backend) == pytest.approx(3)


def test_every_call_of_the_contract_is_timed():
    names = {name for name in vars(Backend) if not name.startswith("_")}
    own = {name for name, part in vars(SimulatedBackend).items() if callable(part)} & names
    assert {"copy", "record", "wait", "empty_device_like", "timestamp", "note_freed"} <= own
    for name in own:
        assert vars(HostTimedBackend)[name].__wrapped__ is vars(SimulatedBackend)[name]


def test_the_configuration_asks_for_it():
    for host_time, kind in ((False, SimulatedBackend), (True, HostTimedBackend)):
        config = OffloadConfig(backend="simulated", simulated=SimulatedConfig(host_time=host_time))
        assert type(create_backend(config)) is kind
