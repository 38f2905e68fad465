"""The tracing backend changes nothing, and notes every copy and every wait of compute."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import pytest
import torch
from programs import (
    assert_nothing_left,
    assert_same,
    make_config,
    make_model,
    one_forward_one_backward,
    run_step,
)

from megatron_offload.backends import cuda
from megatron_offload.backends.base import Backend, DeviceInfo, Wait
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.backends.tracing import TracingBackend
from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.core.trace import INFLIGHT_BYTES, Counter, Span
from megatron_offload.engine.manager import PipelineOffloadManager

ORDER = one_forward_one_backward(4, depth=2)


def make_tracing(**settings):
    # A microsecond a byte.
    config = SimulatedConfig(d2h_gbps=0.001, h2d_gbps=0.001, **settings)
    return TracingBackend(SimulatedBackend(config))


def region(num_bytes=100):
    return torch.zeros(num_bytes, dtype=torch.uint8)


def offload(backend, num_bytes=100, label="x"):
    backend.wait(backend.d2h_stream, backend.record(backend.compute_stream()), Wait.W1)
    pairs = [(backend.empty_host(num_bytes), region(num_bytes))]
    backend.copy(pairs, backend.d2h_stream, label)
    return backend.record(backend.d2h_stream), pairs


def test_the_device_is_the_inner_one(monkeypatch):
    inner = SimulatedBackend(SimulatedConfig())
    assert TracingBackend(inner).describe() is None
    gpu = DeviceInfo("some GPU", None, 1 << 30, 2)
    monkeypatch.setattr(inner, "describe", lambda: gpu)
    assert TracingBackend(inner).describe() == gpu


def test_every_name_of_the_contract_is_handed_on():
    contract = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction)}
    assert contract <= vars(TracingBackend).keys() | {"__init__"}


def test_copies_and_waits_have_their_virtual_times():
    backend = make_tracing()
    backend.inner.advance_compute(30)
    done, pairs = offload(backend)
    backend.mark("forward", "y")
    backend.inner.advance_compute(40)
    backend.wait(backend.compute_stream(), done, Wait.W2)
    backend.inner.advance_compute(5)
    backend.mark("other", "")
    back = backend.empty_device(50)
    backend.wait(backend.h2d_stream, backend.record(backend.compute_stream()), Wait.W6)
    backend.copy([(back, pairs[0][0][:50])], backend.h2d_stream, "x")
    trace = backend.finish(rank=2)
    assert trace.rank == 2
    assert trace.spans == [
        Span("compute", "other", "", 0, 30),
        Span("compute", "forward", "y", 30, 40),
        Span("compute", "stall", "y", 70, 60, wait="W2"),
        Span("compute", "forward", "y", 130, 5),
        Span("d2h", "d2h", "x", 30, 100, 100),
        Span("h2d", "h2d", "x", 135, 50, 50),
    ]
    assert trace.counters == [
        Counter(INFLIGHT_BYTES, 0, 0),
        Counter(INFLIGHT_BYTES, 70, 100),
        Counter(INFLIGHT_BYTES, 130, 0),
    ]


def test_finish_begins_a_new_record():
    backend = make_tracing()
    backend.inner.advance_compute(10)
    assert len(backend.finish().spans) == 1
    backend.inner.advance_compute(7)
    assert backend.finish().spans == [Span("compute", "other", "", 0, 7)]


def test_further_counters_are_sampled_where_they_change():
    backend = make_tracing()
    numbers = {"n": 1.0}
    backend.counters = lambda: numbers
    backend.sample()
    backend.inner.advance_compute(10)
    backend.sample()
    numbers["n"] = 2.0
    offload(backend)
    assert [c for c in backend.finish().counters if c.name == "n"] == [
        Counter("n", 0, 1.0),
        Counter("n", 10, 2.0),
    ]


def test_a_removed_wait_costs_compute_nothing():
    inner = SimulatedBackend(
        SimulatedConfig(d2h_gbps=0.001), on_hazard="collect", removed_waits=frozenset({Wait.W2})
    )
    backend = TracingBackend(inner)
    done, _ = offload(backend)
    backend.wait(backend.compute_stream(), done, Wait.W2)
    assert backend.finish().summary().stall_us == {"W2": 0}


def test_reading_the_times_runs_nothing():
    backend = make_tracing(copy_timing="late")
    offload(backend)
    backend.finish()
    assert backend.inner.num_pending > 0
    assert backend.inner.compute_stream().time_us == 0


@pytest.mark.sampled
@pytest.mark.parametrize("timing", ["eager", "late", "random"])
@pytest.mark.parametrize("checks", [True, False])
def test_results_and_counts_are_the_same(timing, checks):
    config = make_config(prefetch_bytes=16 * 1024)
    simulated = SimulatedConfig(copy_timing=timing, poison=checks, check_hazards=checks)
    plain = PipelineOffloadManager(config, backend=SimulatedBackend(simulated))
    backend = TracingBackend(SimulatedBackend(simulated))
    traced = PipelineOffloadManager(config, backend=backend)
    expected = run_step(make_model(), None, ORDER)
    models = [make_model(), make_model()]
    for _ in range(4):
        for model, manager in zip(models, (plain, traced), strict=True):
            assert_same(expected, run_step(model, manager, ORDER))
            assert_nothing_left(manager)
        assert plain.last_step == traced.last_step
        assert backend.inflight_bytes == 0
        trace = backend.finish()
        assert trace.summary().num_bytes == {
            "d2h": traced.last_step.offloaded_bytes,
            "h2d": traced.last_step.reloaded_bytes,
        }
    assert plain.backend.stall_us == backend.inner.stall_us


def test_a_backend_without_timing_gives_the_times_of_issue():
    class Untimed(SimulatedBackend):
        timestamp = Backend.timestamp
        sync_elapsed_us = Backend.sync_elapsed_us

    backend = TracingBackend(Untimed())
    offload(backend)
    trace = backend.finish()
    (copy,) = trace.of("d2h")
    assert 0 <= copy.start_us <= copy.end_us <= trace.of("compute")[-1].end_us


def test_nvtx_ranges_carry_the_groups_name(monkeypatch):
    # Stands in for a device: what is looked at is which ranges are open around which copies.
    ranges = []

    @contextmanager
    def nvtx_range(message, *args):
        ranges.append(message.format(*args))
        yield

    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(cuda.CudaBackend, "compute_stream_key", lambda self: (0, 0, 1))
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    pairs = [(region(), region() + 1)]
    quiet = cuda.CudaBackend()
    quiet.copy(pairs, quiet.d2h_stream, "mlp")
    assert ranges == []
    backend = cuda.CudaBackend(nvtx=OffloadConfig(nvtx=True).nvtx)
    backend.copy(pairs, backend.d2h_stream, "mlp")
    backend.copy(pairs, backend.h2d_stream, "{mlp}")
    assert ranges == ["offload mlp", "reload {mlp}"]
    assert int(pairs[0][0].sum()) == 100


@pytest.mark.gpu
def test_times_of_a_real_device():
    backend = TracingBackend(cuda.CudaBackend())
    num_bytes = 64 << 20
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    host, back = backend.empty_host(num_bytes), backend.empty_device(num_bytes)
    backend.wait(backend.d2h_stream, backend.record(backend.compute_stream()), Wait.W1)
    backend.copy([(host, source)], backend.d2h_stream, "x")
    done = backend.record(backend.d2h_stream)
    backend.wait(backend.compute_stream(), done, Wait.W2)
    backend.wait(backend.h2d_stream, done, Wait.W3)
    backend.copy([(back, host)], backend.h2d_stream, "x")
    backend.wait(backend.compute_stream(), backend.record(backend.h2d_stream), Wait.W4)
    trace = backend.finish()
    assert torch.equal(back, source)
    (d2h,), (h2d,) = trace.of("d2h"), trace.of("h2d")
    assert 0 <= d2h.start_us < d2h.end_us <= h2d.start_us < h2d.end_us
    summary = trace.summary()
    assert summary.num_bytes == {"d2h": num_bytes, "h2d": num_bytes}
    assert summary.total_stall_us == pytest.approx(h2d.end_us - d2h.start_us, rel=0.5)
