"""Marks stand where their numbers say, and a long trace makes no long picture."""

from __future__ import annotations

import re

import pytest

from megatron_offload.core.trace import HELD_BYTES, LIVE_BYTES, Counter, Span, StepTrace
from megatron_offload.report import charts
from megatron_offload.report.tradeoff import TradeOff, TradeOffPoint

MIB = 1024**2


def chart_of(trace):
    return charts.rank_chart(trace, charts.time_axis([trace]))


def boxes(path):
    """Return the left and right ends of a lane's boxes."""
    found = re.findall(r"M([\d.]+) 0H([\d.]+)V100H([\d.]+)Z", path)
    assert "".join(f"M{a} 0H{b}V100H{c}Z" for a, b, c in found) == path
    assert all(a == c for a, _, c in found)
    return [(float(a), float(b)) for a, b, _ in found]


def test_spans_stand_where_their_times_say():
    trace = StepTrace(
        spans=[
            Span("compute", "forward", "a", 0, 500),
            Span("compute", "backward", "a", 750, 250),
            Span("d2h", "d2h", "a", 100, 300, 7),
        ]
    )
    lanes = {lane.stream: dict(lane.paths) for lane in chart_of(trace).lanes}
    assert boxes(lanes["compute"]["forward"]) == [(0, 1000)]
    assert boxes(lanes["compute"]["backward"]) == [(1500, 2000)]
    assert boxes(lanes["d2h"]["d2h"]) == [(200, 800)]
    assert lanes["h2d"] == {}


def test_ranks_share_one_axis():
    short = StepTrace(0, [Span("compute", "forward", "", 0, 500)])
    long = StepTrace(1, [Span("compute", "forward", "", 0, 1000)])
    times = charts.time_axis([short, long])
    lane = charts.rank_chart(short, times).lanes[0]
    assert boxes(lane.paths[0][1]) == [(0, 1000)]


def test_a_long_trace_makes_no_long_path():
    spans = [Span("compute", "forward", "x", i, 0.4) for i in range(100_000)]
    counters = [Counter(LIVE_BYTES, i, (i % 7) * MIB) for i in range(100_000)]
    chart = chart_of(StepTrace(0, spans, counters))
    assert len(chart.lanes[0].paths[0][1]) < 100_000
    assert len(chart.memory[0].line) < 200_000


def test_a_peak_between_two_pixels_is_still_drawn():
    values = [0.0] * 1000 + [10.0 * MIB] + [0.0] * 1000
    counters = [Counter(LIVE_BYTES, 5000 + i * 1e-3, v) for i, v in enumerate(values)]
    spans = [Span("compute", "forward", "", 0, 10_000)]
    chart = chart_of(StepTrace(0, spans, counters))
    top = 100 - chart.memory_axis.share(10 * MIB)
    assert f"V{top:.2f}" in chart.memory[0].line


def test_a_curve_holds_its_last_value_to_the_end():
    counters = [Counter(LIVE_BYTES, 0, 0), Counter(LIVE_BYTES, 500, 10), Counter(HELD_BYTES, 0, 3)]
    trace = StepTrace(0, [Span("compute", "forward", "", 0, 1000)], counters)
    live, held = chart_of(trace).memory
    assert (live.kind, held.kind) == ("without", "offloaded")
    assert live.line == "M0 100.00H1000V7.41H2000"
    assert live.area == live.line + "V100H0Z"


def test_unknown_kinds_and_empty_traces_can_be_drawn():
    lane = chart_of(StepTrace(0, [Span("compute", '"><script>', "", 0, 5)])).lanes[0]
    assert [kind for kind, _ in lane.paths] == ["other"]
    assert chart_of(StepTrace()).memory == ()


@pytest.mark.parametrize(
    ("end_us", "labels"),
    [
        (1000, ["0 µs", "200 µs", "400 µs", "600 µs", "800 µs", "1000 µs"]),
        (2500, ["0 ms", "0.5 ms", "1 ms", "1.5 ms", "2 ms", "2.5 ms"]),
        (853_500, ["0 ms", "200 ms", "400 ms", "600 ms", "800 ms"]),
    ],
)
def test_time_has_round_ticks(end_us, labels):
    axis = charts.time_axis([StepTrace(0, [Span("compute", "other", "", 0, end_us)])])
    assert [tick.label for tick in axis.ticks] == labels
    assert axis.ticks[0].share == 0


@pytest.mark.parametrize(
    ("most", "labels"),
    [
        (0, ["0", "0.5 B", "1 B"]),
        (38.2 * MIB, ["0", "20 MiB", "40 MiB"]),
        (36.2 * 1024 * MIB, ["0", "20 GiB"]),
        (1000, ["0", "500 B", "1000 B"]),
    ],
)
def test_sizes_have_round_ticks_in_one_unit(most, labels):
    axis = charts.byte_axis(most)
    assert [tick.label for tick in axis.ticks] == labels
    assert all(0 <= tick.share <= 100 for tick in axis.ticks)
    assert axis.share(most) < 100


def test_a_point_without_a_time_is_an_upright_line():
    points = (
        TradeOffPoint(label="this run", peak_bytes=50, step_time_percent=None),
        TradeOffPoint(label="all", peak_bytes=100, step_time_percent=2.0),
    )
    found = charts.scatter(TradeOff(memory="m", points=points))
    assert found.frontiers == ()
    marker = found.markers[0]
    assert marker.bottom == 0
    assert found.untimed == f"M{charts.WIDTH * marker.left / 100:.1f} 0V{charts.HEIGHT}"


def test_the_scatter_joins_the_best_of_each_kind():
    def point(peak, percent, **more):
        return TradeOffPoint(label="x", peak_bytes=peak, step_time_percent=percent, **more)

    points = (
        point(100, 0.0),
        point(50, 3.0),
        point(60, 9.0),
        point(50, -1.0, is_predicted=True, is_plan=True),
    )
    found = charts.scatter(TradeOff(memory="m", points=points))
    assert [kind for kind, _ in found.frontiers] == ["measured"]
    assert found.frontiers[0][1].count("L") == 1, "the third is beaten by the second"
    assert [(m.number, m.point.peak_bytes) for m in found.markers] == [
        *((1, 50), (2, 50), (3, 60), (4, 100))
    ]
    assert all(0 < m.left < 100 and 0 < m.bottom < 100 for m in found.markers)
    zero = next(tick for tick in found.y_axis.ticks if tick.label == "+0 %")
    at_zero = next(m for m in found.markers if m.point.step_time_percent == 0)
    assert zero.share == pytest.approx(at_zero.bottom)
