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
    make_config,
    make_manager,
    make_model,
    num_pending,
    one_forward_one_backward,
    run_step,
)
from virtual_clock import Tick

from megatron_offload.backends import cuda
from megatron_offload.backends.base import Backend, Wait
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
from megatron_offload.engine.manager import PipelineOffloadManager
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
        "W2 wait 4.0 µs",
        "D2H 11.7 KiB at 2 GB/s",
        "H2D 7.8 KiB at 4 GB/s",
    ]


def test_an_empty_trace_has_sums():
    trace = StepTrace()
    assert trace.duration_us == 0
    assert trace.facts()[0] == "step 0.0 µs"


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


def test_the_manager_is_left_as_it_was():
    manager = make_manager()
    with pytest.raises(ZeroDivisionError), trace_step(manager) as trace, manager.step():
        raise ZeroDivisionError
    assert trace == StepTrace()
    results, _ = traced_step(manager)
    assert_same(run_step(make_model(), None, ORDER), results)
    assert manager.observers == []


def two_groups(manager, backend):
    """One microbatch through two groups that save 256 bytes each, of 100 us forward each."""
    weight = torch.nn.Parameter(torch.ones(64))

    def work(x):
        return Tick.apply(x, backend.advance_compute, 100) * weight

    with manager.step():
        manager.begin_chunk()
        x = torch.ones(64, requires_grad=True) * 1
        for name in ("a", "b"):
            x = in_group(manager, work, x, name)
        x.sum().backward()


def test_virtual_times_are_exact():
    # A copy takes a microsecond a byte to the host, and half of one back.
    config = make_config(prefetch_bytes=0, max_inflight_bytes=0)
    rates = {"d2h_gbps": 0.001, "h2d_gbps": 0.002}
    backend = SimulatedBackend(config.simulated.model_copy(update=rates))
    manager = PipelineOffloadManager(config, backend=backend)
    with trace_step(manager) as trace:
        two_groups(manager, backend)
    a, b = "a[chunk 0, group 0]", "b[chunk 0, group 1]"
    assert trace.of("compute") == [
        Span("compute", "forward", a, 0, 100),
        Span("compute", "stall", "", 100, 256, wait="W2"),
        Span("compute", "forward", b, 356, 100),
        Span("compute", "stall", "", 456, 256, wait="W2"),
        # b is reloaded late, a at the same moment: the budget always lets one group in.
        Span("compute", "stall", b, 712, 128, wait="W4"),
        Span("compute", "backward", b, 840, 200),
        Span("compute", "stall", a, 1040, 128, wait="W4"),
        Span("compute", "backward", a, 1168, 200),
    ]
    assert trace.of("d2h") == [
        Span("d2h", "d2h", a, 100, 256, 256),
        Span("d2h", "d2h", b, 456, 256, 256),
    ]
    assert trace.of("h2d") == [
        Span("h2d", "h2d", b, 712, 128, 256),
        Span("h2d", "h2d", a, 1040, 128, 256),
    ]
    inflight = [(c.time_us, c.value) for c in trace.counters if c.name == ByteCount.INFLIGHT]
    assert inflight == [(0, 0), (100, 256), (356, 0), (456, 256), (712, 0)]
    live = [(c.time_us, c.value) for c in trace.counters if c.name == ByteCount.LIVE]
    assert live == [(0, 0), (100, 256), (456, 512), (1040, 256), (1368, 0)]
    assert trace.duration_us == 1368
    assert trace.stall_us == {"W2": 512, "W4": 256}
    assert trace.stall_us["W2"] == backend.stall_us[Wait.W2]


def test_a_group_without_a_backward_of_its_start_is_left_by_the_next():
    manager = make_manager(prefetch_bytes=0)
    model = make_model(layers=2)
    with trace_step(manager) as trace, manager.step():
        losses = []
        for _ in range(2):
            manager.begin_chunk()
            x = torch.ones(16, 32)  # needs no gradient: the first group's start has no backward
            for block in model:
                x = block(x, manager)
            losses.append(x.square().mean())
        for loss in losses:
            loss.backward()
    assert values_of(trace, ByteCount.LIVE)[-1] < max(values_of(trace, ByteCount.LIVE)) / 2


class Timed:
    """A chunk whose groups save nothing and take virtual time, backward twice as much."""

    def __init__(self):
        config = make_config()
        self.backend = SimulatedBackend(config.simulated)
        self.manager = PipelineOffloadManager(config, backend=self.backend)

    def work(self, x, us):
        return Tick.apply(x, self.backend.advance_compute, us)

    def group(self, x, name, us, **more):
        return in_group(self.manager, lambda x: self.work(x, us), x, name, **more)

    def spans(self, program):
        """Trace a step; return kind, group's name and times of the spans of compute."""
        with trace_step(self.manager) as trace, self.manager.step():
            self.manager.begin_chunk()
            program(torch.ones(1, requires_grad=True) * 1)
        return [
            (span.kind, span.label.partition("[")[0], span.start_us, span.duration_us)
            for span in trace.of("compute")
        ]


@pytest.fixture
def timed():
    return Timed()


def test_a_start_without_a_gradient_is_left_where_the_next_boundary_is(timed):
    def without_gradient(name):
        run = lambda x: timed.work(x.requires_grad_(), 10)  # noqa: E731
        return in_group(timed.manager, run, torch.ones(1), name)

    def program(x):
        advance = timed.backend.advance_compute
        without_gradient("a").backward()
        advance(1)
        timed.manager.begin_chunk()
        first = without_gradient("b")
        advance(1)
        timed.manager.begin_chunk()
        second = timed.group(timed.work(timed.group(x, "c", 10), 1), "d", 10)
        second = second + without_gradient("e")
        first.backward()
        advance(1)
        second.backward()
        advance(1)

    assert timed.spans(program) == [
        ("forward", "a", 0, 10),
        ("backward", "a", 10, 21),
        ("forward", "b", 31, 10),
        ("other", "", 41, 1),
        ("forward", "c", 42, 10),
        ("other", "", 52, 1),
        ("forward", "d", 53, 10),
        ("forward", "e", 63, 10),
        ("backward", "b", 73, 21),
        ("backward", "e", 94, 20),
        ("backward", "d", 114, 20),
        ("other", "", 134, 2),
        ("backward", "c", 136, 20),
        ("other", "", 156, 1),
    ]


def test_a_backward_from_inside_a_group_leaves_what_it_never_entered(timed):
    inside = []

    def program(x):
        def run(x):
            inside.append(timed.work(x, 10))
            return timed.work(inside[0], 5)

        in_group(timed.manager, run, x, "a")
        inside.pop().backward()

    assert timed.spans(program) == [("forward", "a", 0, 15), ("other", "", 15, 20)]


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


def test_what_lies_around_a_group_is_not_left_with_it(timed):
    def program(x):
        around = lambda x: timed.work(timed.group(timed.work(x, 1), "inner", 10), 2)  # noqa: E731
        in_group(timed.manager, around, x, "outer").backward()

    assert timed.spans(program) == [
        ("forward", "outer", 0, 1),
        ("forward", "inner", 1, 10),
        ("forward", "outer", 11, 2),
        ("backward", "outer", 13, 4),
        ("backward", "inner", 17, 20),
        ("backward", "outer", 37, 2),
    ]


def test_a_commit_that_is_put_off_ends_the_forward_where_it_is_called(timed):
    def program(x):
        y = timed.work(timed.group(x, "a", 10, delay=True), 7)
        timed.manager.flush_delayed_groups()
        y.backward()

    assert timed.spans(program) == [
        ("forward", "a", 0, 10),
        ("other", "", 10, 7 + 14),
        ("backward", "a", 31, 20),
    ]


def test_a_graph_that_is_gone_through_twice_has_its_spans_twice(timed):
    def program(x):
        y = timed.group(timed.group(x, "a", 10), "b", 10)
        y.backward(retain_graph=True)
        y.backward()

    backwards = [("backward", name) for name in "baba"]
    assert [span[:2] for span in timed.spans(program)[2:]] == backwards


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


def test_a_backend_without_timing_gives_the_times_of_issue():
    _, trace = traced_step(make_manager(backend_type=Untimed), 0)
    for stream in ("d2h", "h2d"):
        spans = trace.of(stream)
        assert 0 <= spans[0].start_us <= spans[-1].end_us <= trace.of("compute")[-1].end_us


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
