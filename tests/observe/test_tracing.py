"""A trace changes nothing, and notes every copy and every wait of compute, on any backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from programs import (
    make_config,
    make_model,
    num_pending,
    one_forward_one_backward,
    run_step,
)

from megatron_offload.backends import cuda
from megatron_offload.backends.base import Backend
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import OffloadConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.trace_step import trace_step

ORDER = one_forward_one_backward(4, depth=2)


def test_reading_the_times_runs_nothing():
    config = make_config("late", max_inflight_bytes=None)
    manager = PipelineOffloadManager(config)
    run_step(make_model(), manager, ORDER)
    (chunk, *_), model = [manager.begin_chunk()], make_model()
    with trace_step(manager) as trace:
        y = model[0](torch.ones(16, 32, requires_grad=True), manager)
    assert chunk.groups
    assert trace.of("d2h")
    assert num_pending(manager.backend) > 0
    del y


class Untimed(SimulatedBackend):
    timestamp = Backend.timestamp
    sync_elapsed_us = Backend.sync_elapsed_us


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_recomputed_has_spans_of_its_own(recomputes):
    manager = PipelineOffloadManager(make_config(), backend=Untimed())
    with trace_step(manager) as trace:
        run_step(make_model(recomputes=recomputes), manager, ORDER)
    spans = [span for span in trace.of("compute") if span.kind == "recompute"]
    assert {span.label.split("[")[0] for span in spans} == ({"mlp"} if recomputes else set())


def test_a_backend_without_timing_gives_the_times_of_issue():
    manager = PipelineOffloadManager(make_config(), backend=Untimed())
    with trace_step(manager) as trace:
        run_step(make_model(), manager, ORDER)
    for stream in ("d2h", "h2d"):
        spans = trace.of(stream)
        assert 0 <= spans[0].start_us <= spans[-1].end_us <= trace.of("compute")[-1].end_us


def test_nvtx_ranges_carry_the_groups_name(monkeypatch):
    # Stands in for a device: what is looked at is which ranges are open around which copies.
    ranges = []

    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="GPU"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(cuda.CudaBackend, "compute_stream", lambda self: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    pairs = [(torch.zeros(100), torch.ones(100))]
    quiet = cuda.CudaBackend()
    quiet.copy(pairs, quiet.d2h_stream, "mlp")
    assert ranges == []
    backend = cuda.CudaBackend(OffloadConfig(nvtx=True))
    backend.copy(pairs, backend.d2h_stream, "mlp")
    backend.copy(pairs, backend.h2d_stream, "{mlp}")
    assert ranges == ["offload mlp", "reload {mlp}"]
    assert int(pairs[0][0].sum()) == 100
