"""Where the marks of a chart go: lanes, curves and ticks, as numbers and SVG path data.

Owns the geometry of a report's charts. Must not know colours, HTML or where the numbers come from.

Invariants: what is returned grows with the width of the chart and not with the length of the trace;
path data are numbers and path letters alone, so nothing of a run's text gets into them. Read next:
`megatron_offload.report.html`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_offload.core.trace import (
    HELD_BYTES,
    INFLIGHT_BYTES,
    LIVE_BYTES,
    PREFETCHED_BYTES,
    STREAMS,
    Span,
    StepTrace,
)
from megatron_offload.core.units import format_bytes
from megatron_offload.report.tradeoff import TradeOff, TradeOffPoint, frontier

__all__ = [
    "WIDTH",
    "Axis",
    "Curve",
    "Lane",
    "Marker",
    "RankChart",
    "Scatter",
    "Tick",
    "byte_axis",
    "rank_chart",
    "scatter",
    "time_axis",
]

WIDTH = 2000
"""Units of a chart's width; more than the pixels that it will have."""

HEIGHT = 100
"""Units of a chart's height."""

SPAN_KINDS = ("other", "forward", "backward", "stall", "d2h", "h2d")
"""Kinds of spans, the ones that may be painted over first."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis."""

    share: float
    """Of the axis, from its start, in percent."""
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from one value to another."""

    start: float
    end: float
    ticks: tuple[Tick, ...]

    def share(self, value: float) -> float:
        """Return where a value is, in percent from the axis's start."""
        return 100 * (value - self.start) / (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream of one rank: path data by kind of span."""

    stream: str
    paths: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A step function: path data, open for a line, and closed down to zero for an area."""

    kind: str
    line: str
    area: str


@dataclass(frozen=True, slots=True)
class RankChart:
    """The timeline of one rank's step."""

    rank: int
    lanes: tuple[Lane, ...]
    memory: tuple[Curve, ...]
    memory_axis: Axis
    moving: tuple[Curve, ...]
    moving_axis: Axis
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Marker:
    """A point of a scatter chart; places in percent from the lower left corner.

    One whose time was not measured stands on the axis.
    """

    left: float
    bottom: float
    number: int
    """Counts from 1 by memory, the least first."""
    point: TradeOffPoint


@dataclass(frozen=True, slots=True)
class Scatter:
    """Memory against step time."""

    x_axis: Axis
    y_axis: Axis
    markers: tuple[Marker, ...]
    frontiers: tuple[tuple[str, str], ...]
    """Path data of the best of what was measured, and of what was predicted, by kind."""
    untimed: str
    """Path data of an upright line for each point whose time was not measured; "" without such."""


def time_axis(traces: Iterable[StepTrace]) -> Axis:
    """Return the axis that all ranks' timelines share; each rank's time begins at zero."""
    end_us = max((span.end_us for trace in traces for span in trace.spans), default=0.0) or 1.0
    scale, unit = (1e3, "ms") if end_us >= 2000 else (1.0, "µs")
    ticks = tuple(
        Tick(100 * value * scale / end_us, f"{value:g} {unit}")
        for value in _nice_values(0.0, end_us / scale, 5)
    )
    return Axis(0.0, end_us, ticks)


def byte_axis(most_bytes: float) -> Axis:
    """Return an axis from zero to a little more than ``most_bytes``, with ticks in one unit."""
    most_bytes = max(most_bytes, 1.0)
    unit = 1024.0 ** min(4, int(math.log(most_bytes, 1024))) if most_bytes >= 1024 else 1.0
    name = format_bytes(unit).split()[1]
    end_bytes = 1.08 * most_bytes
    values = _nice_values(0.0, end_bytes / unit, 3)
    ticks = tuple(Tick(100 * v * unit / end_bytes, f"{v:g} {name}" if v else "0") for v in values)
    return Axis(0.0, end_bytes, ticks)


def rank_chart(trace: StepTrace, times: Axis) -> RankChart:
    """Return the timeline of one rank.

    Args:
        trace: the rank's step.
        times: the axis that all ranks share.
    """
    by_name: dict[str, list[tuple[float, float]]] = {}
    for counter in sorted(trace.counters, key=lambda counter: counter.time_us):
        by_name.setdefault(counter.name, []).append((counter.time_us, counter.value))
    ends_us = max((span.end_us for span in trace.spans), default=0.0)

    def curves(kinds: dict[str, str]) -> tuple[tuple[Curve, ...], Axis]:
        most = max((v for name in kinds for _, v in by_name.get(name, ())), default=0.0)
        axis = byte_axis(most)
        found = (
            _curve(kind, by_name[name], times, axis, ends_us)
            for name, kind in kinds.items()
            if name in by_name
        )
        return tuple(found), axis

    memory, memory_axis = curves({LIVE_BYTES: "without", HELD_BYTES: "offloaded"})
    moving, moving_axis = curves({INFLIGHT_BYTES: "d2h", PREFETCHED_BYTES: "h2d"})
    lanes = tuple(Lane(stream, _lane(trace.of(stream), times)) for stream in STREAMS)
    return RankChart(trace.rank, lanes, memory, memory_axis, moving, moving_axis, _facts(trace))


def scatter(tradeoff: TradeOff) -> Scatter:
    """Return the trade-off chart."""
    points = tradeoff.points
    times = [0.0, *(p.step_time_percent for p in points if p.step_time_percent is not None)]
    low, high = min(times), max(times)
    margin = max(0.5, 0.08 * (high - low))
    low, high = low - margin, high + margin
    y_ticks = (
        Tick(100 * (v - low) / (high - low), f"{v:+g} %".replace("-", "\N{MINUS SIGN}"))
        for v in _nice_values(low, high, 5)
    )
    y_axis = Axis(low, high, tuple(y_ticks))
    x_axis = byte_axis(max((point.peak_bytes for point in points), default=0))

    def place(point: TradeOffPoint) -> tuple[float, float]:
        percent = low if point.step_time_percent is None else point.step_time_percent
        return x_axis.share(point.peak_bytes), y_axis.share(percent)

    markers = tuple(
        Marker(*place(point), number, point)
        for number, point in enumerate(sorted(points, key=lambda point: point.peak_bytes), start=1)
    )
    frontiers = []
    for kind, is_predicted in (("measured", False), ("predicted", True)):
        best = frontier(point for point in points if point.is_predicted is is_predicted)
        places = [(WIDTH * x / 100, HEIGHT - HEIGHT * y / 100) for x, y in map(place, best)]
        if len(places) > 1:
            frontiers.append((kind, "M" + "L".join(f"{x:.1f} {y:.2f}" for x, y in places)))
    untimed = "".join(
        f"M{WIDTH * place(point)[0] / 100:.1f} 0V{HEIGHT}"
        for point in points
        if point.step_time_percent is None
    )
    return Scatter(x_axis, y_axis, markers, tuple(frontiers), untimed)


def _lane(spans: Sequence[Span], times: Axis) -> tuple[tuple[str, str], ...]:
    """Return path data by kind; spans of one kind that no pixel parts become one."""
    joined: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        if span.duration_us <= 0:
            continue
        kind = span.kind if span.kind in SPAN_KINDS else "other"
        start, end = (WIDTH * times.share(at_us) / 100 for at_us in (span.start_us, span.end_us))
        boxes = joined.setdefault(kind, [])
        if boxes and start - boxes[-1][1] < 0.5:
            boxes[-1] = (boxes[-1][0], end)
        else:
            boxes.append((start, end))
    return tuple(
        (
            kind,
            "".join(
                f"M{start:.1f} 0H{max(end, start + 0.5):.1f}V{HEIGHT}H{start:.1f}Z"
                for start, end in joined[kind]
            ),
        )
        for kind in SPAN_KINDS
        if kind in joined
    )


def _curve(
    kind: str, samples: Sequence[tuple[float, float]], times: Axis, sizes: Axis, ends_us: float
) -> Curve:
    """Return a step function that keeps each column's lowest, highest and last value."""
    columns: dict[int, list[float]] = {}
    for at_us, value in samples:
        column = round(WIDTH * times.share(at_us) / 100)
        low, high, _ = columns.get(column, (value, value, value))
        columns[column] = [min(low, value), max(high, value), value]
    parts: list[str] = []
    for column in sorted(columns):
        low, high, last = (HEIGHT * (1 - sizes.share(v) / 100) for v in columns[column])
        parts.append(f"H{column}" if parts else f"M{column} {last:.2f}")
        if low != high:
            parts.append(f"V{low:.2f}V{high:.2f}")
        if low != high or len(parts) > 1:
            parts.append(f"V{last:.2f}")
    if not parts:
        return Curve(kind, "", "")
    end = round(WIDTH * times.share(ends_us) / 100)
    line = "".join(parts) + f"H{end}"
    return Curve(kind, line, f"{line}V{HEIGHT}H{min(columns)}Z")


def _facts(trace: StepTrace) -> tuple[str, ...]:
    """Return the numbers that stand beside a rank's timeline."""
    summary = trace.summary()
    share = summary.copy_stall_us / summary.duration_us if summary.duration_us else 0.0
    facts = [
        f"step {summary.duration_us / 1e3:.4g} ms",
        f"compute waits for copies {summary.copy_stall_us / 1e3:.3g} ms ({100 * share:.1f} %)",
    ]
    for stream, name in (("d2h", "D2H"), ("h2d", "H2D")):
        gbps, busy_us = summary.gbps(stream), summary.busy_us[stream]
        if gbps is not None:
            hidden = summary.overlap_us[stream] / busy_us
            facts.append(
                f"{name} {format_bytes(summary.num_bytes[stream])} at {gbps:.3g} GB/s, "
                f"{100 * hidden:.0f} % beside compute"
            )
    return tuple(facts)


def _nice_values(low: float, high: float, number: int) -> list[float]:
    """Return about ``number`` round values between two."""
    raw = (high - low) / number
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) + 0.0 for index in range(first, last + 1)]
