"""Which spans of compute a traced step has, and how long each is on a virtual clock."""

from __future__ import annotations

import pytest
import torch
from programs import in_group, make_config
from virtual_clock import Tick

from megatron_offload.backends.base import Wait
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.core.trace import ByteCount, Span
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.trace_step import trace_step


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
