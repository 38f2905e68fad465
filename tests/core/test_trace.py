"""Trace files, sums of spans, and traced steps of real programs, which a trace leaves unchanged."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from programs import (
    assert_nothing_left,
    assert_same,
    in_group,
    make_manager,
    make_model,
    num_pending,
    one_forward_one_backward,
    run_step,
)

from megatron_offload.backends import cuda
from megatron_offload.backends.base import Backend
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import OffloadConfig
from megatron_offload.core.trace import (
    STREAMS,
    ByteCount,
    Counter,
    Span,
    StepTrace,
    read_traces,
    write_traces,
)
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.recompute.recipes import recomputable

ORDER = one_forward_one_backward(5, depth=3)


def small_trace(rank=0):
    return StepTrace(
        rank,
        spans=[
            Span("compute", "forward", "a", 0.0, 10.0),
            Span("compute", "stall", "a", 10.0, 4.0, wait="W2"),
            Span("compute", "backward", "a", 20.0, 10.0),
            Span("d2h", "d2h", "a", 8.0, 6.0, 12000),
            Span("h2d", "h2d", "a", 16.0, 2.0, 8000),
        ],
        counters=[Counter(ByteCount.INFLIGHT, 8.0, 12000), Counter(ByteCount.INFLIGHT, 14.0, 0)],
    )


def traced_step(manager, num_before=3, **settings):
    model = make_model(**settings)
    for _ in range(num_before):
        run_step(model, manager, ORDER)
    with trace_step(manager) as trace:
        results = run_step(model, manager, ORDER)
    return results, trace


def values_of(trace, name):
    return [counter.value for counter in trace.counters if counter.name == name]


def test_the_sums_are_those_of_the_spans():
    trace = small_trace()
    assert (trace.duration_us, trace.stall_us) == (30, {"W2": 4})
    assert trace.num_bytes == {"d2h": 12000, "h2d": 8000}
    assert trace.facts() == [
        "step 30.0 µs",
        "compute waits for copies 4.0 µs (13.3%)",
        "to the host 4.0 µs",
        "D2H 11.7 KiB at 2 GB/s",
        "H2D 7.8 KiB at 4 GB/s",
    ]
    assert StepTrace().duration_us == 0
    assert StepTrace().facts()[0] == "step 0.0 µs"


def test_a_file_holds_valid_chrome_events(tmp_path):
    path = tmp_path / "new" / "trace.json"
    write_traces(path, [small_trace(rank=3)])
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {3}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "compute", 1: "d2h", 2: "h2d"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 3"]
    place = {"pid": 3, "tid": 1, "ts": 8.0, "dur": 6.0}
    args = {"group": "a", "bytes": 12000, "GB/s": 2.0}
    assert {"ph": "X", "name": "d2h a", "cat": "d2h", **place, "args": args} in events
    counter = {"ph": "C", "name": ByteCount.INFLIGHT, "pid": 3, "ts": 8.0, "args": {"bytes": 12000}}
    assert counter in events
    assert read_traces(path)[0] == small_trace(rank=3)


def test_a_file_holds_one_trace_for_each_rank(tmp_path):
    write_traces(tmp_path / "all.json", [small_trace(1), small_trace(0)])
    assert read_traces(tmp_path / "all.json") == [small_trace(0), small_trace(1)]
    with pytest.raises(ValueError, match="one trace for each rank"):
        write_traces(tmp_path / "twice.json", [small_trace(), small_trace()])
    assert not (tmp_path / "twice.json").exists()


SPAN = {
    "ph": "X",
    "pid": 0,
    "tid": 1,
    "cat": "d2h",
    "ts": 0,
    "dur": 1,
    "args": {"group": "a", "bytes": 1},
}


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        {"traceEvents": 5},
        {"traceEvents": [1]},
        {"traceEvents": [{"ph": "X"}]},
        *({"traceEvents": [{**SPAN, key: []}]} for key in SPAN if key != "ph"),
        {"traceEvents": [{**SPAN, "pid": "a"}, SPAN]},
        {"traceEvents": [{**SPAN, "tid": -1}]},
        {"traceEvents": [{**SPAN, "ts": "soon"}]},
        {"traceEvents": [{**SPAN, "ts": -1}]},
        {"traceEvents": [{**SPAN, "dur": -0.5}]},
        {"traceEvents": [{**SPAN, "dur": "1e999"}]},
        {"traceEvents": [{**SPAN, "args": {"group": "a", "bytes": True}}]},
    ],
)
def test_a_foreign_file_is_refused(tmp_path, data):
    path = tmp_path / "foreign.json"
    path.write_text(json.dumps(data).replace('"1e999"', "1e999"))  # infinite, and no text
    with pytest.raises(ValueError, match="not a trace"):
        read_traces(path)


@pytest.mark.parametrize("timing", ["eager", "late", "random"])
@pytest.mark.parametrize("inflight_bytes", [0, 24 * 1024, None])
def test_a_traced_step_is_the_same_step(timing, inflight_bytes):
    settings = {"max_inflight_bytes": inflight_bytes, "prefetch_bytes": 16 * 1024}
    manager = make_manager(timing, **settings)
    expected = run_step(make_model(), None, ORDER)
    results, trace = traced_step(manager)
    assert_same(expected, results)
    assert_nothing_left(manager)
    untraced = make_manager(timing, **settings)
    model = make_model()
    for _ in range(4):
        run_step(model, untraced, ORDER)
    assert manager.last_step == untraced.last_step
    assert manager.learner.profile == untraced.learner.profile
    assert manager.backend.stall_us == untraced.backend.stall_us
    assert trace.num_bytes["d2h"] == manager.last_step.offloaded_bytes > 0
    assert trace.num_bytes["h2d"] == manager.last_step.reloaded_bytes > 0
    assert max(values_of(trace, ByteCount.HOST)) == manager.last_step.peak_host_bytes
    for stream in STREAMS:
        for earlier, later in itertools.pairwise(trace.of(stream)):
            assert earlier.end_us <= later.start_us
    for name in ByteCount:
        values = values_of(trace, name)
        assert values[0] == values[-1] == 0, name
        assert max(values) > 0, name
    assert max(values_of(trace, ByteCount.HELD)) <= max(values_of(trace, ByteCount.LIVE))


def test_a_recompute_that_fails_does_not_go_on_in_what_follows():
    manager, failing = make_manager(backend_type=Untimed), []

    def cos(x):
        for error in failing:
            raise error
        return x.cos()

    def program(*errors):
        with manager.step():
            manager.begin_chunk()
            x = torch.ones(64, requires_grad=True) * 1
            run = lambda x: recomputable(cos, x.exp(), manager=manager).sin()  # noqa: E731
            y = in_group(manager, run, x).sum()
            failing[:] = errors
            y.backward()

    with trace_step(manager) as trace:
        with pytest.raises(ZeroDivisionError):
            program(ZeroDivisionError())
        failing.clear()
        program()
    kinds = [span.kind for span in trace.of("compute")]
    assert kinds.count("recompute") == 4, "in each backward, before a wait and behind it"


def test_reading_the_times_runs_nothing():
    manager = make_manager(max_inflight_bytes=None)
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
    _, trace = traced_step(make_manager(backend_type=Untimed), 0, recomputes=recomputes)
    spans = [span for span in trace.of("compute") if span.kind == "recompute"]
    assert {span.label.split("[")[0] for span in spans} == ({"mlp"} if recomputes else set())


def test_nvtx_ranges_carry_the_groups_name(monkeypatch):
    # Stands in for a device: what is looked at is which ranges are open around which copies.
    ranges = []

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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
