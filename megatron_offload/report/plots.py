"""Charts of a run: the timeline of one step, and the trade-off curve.

The page of a report draws them, and their own ``save`` into a file. Needs Altair and vl-convert
(extra ``report``). Text of a run is text in a chart: no markup, no formulas.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_offload.core.trace import PIPELINE_WAIT, STREAMS, ByteCount, Counter, Span, StepTrace
from megatron_offload.core.units import byte_unit, format_bytes, format_us
from megatron_offload.errors import require
from megatron_offload.report.console import printable
from megatron_offload.report.tables import TradeOff

NEEDED = ("altair", "vl_convert")

# Okabe and Ito's colours, which people of any colour vision tell apart.
_KINDS = {
    "forward": ("#0072b2", "forward"),
    "backward": ("#009e73", "backward"),
    "remake": ("#56b4e9", "saved tensors made again"),
    "other": ("#b9bec4", "compute outside groups"),
    "stall": ("#d55e00", "compute waits for a copy"),
    PIPELINE_WAIT: ("#f0e442", "compute waits for another stage"),
    "d2h": ("#e69f00", "offload (D2H)"),
    "h2d": ("#cc79a7", "reload (H2D)"),
}

_COUNTERS: dict[str, str] = {
    ByteCount.LIVE: "#8a9199",
    ByteCount.HELD: "#0072b2",
    ByteCount.HOST: "#009e73",
    ByteCount.INFLIGHT: _KINDS["d2h"][0],
    ByteCount.PREFETCHED: _KINDS["h2d"][0],
}

_POINTS = {"measured": "#0072b2", "predicted": "#e69f00", "plan": "#d55e00"}

MOST_TIMELINES = 16
"""Ranks in one page; hundreds would help nobody."""

_COLUMNS = 2000
"""Parts of a step; what is shorter than one is drawn together, for no screen shows more."""

_CHUNK = re.compile(r"\[chunk (\d+),")


def timeline_chart(trace: StepTrace, end_us: float) -> Any:
    """Return a chart of one rank's step: a lane for each stream, and how many bytes were where.

    Its axis ends at ``end_us``, such as `last_us` of all ranks.
    """
    alt, rank = _altair(), trace.rank
    end_us = end_us or 1.0
    column_us = end_us / _COLUMNS
    scale, unit = (1e3, "ms") if end_us >= 2000 else (1.0, "µs")
    domain = alt.Scale(domain=[0, end_us / scale], nice=False)
    spans = [
        {
            "start": span.start_us / scale,
            "end": span.end_us / scale,
            "stream": span.stream,
            "what": _KINDS[_kind(span)][1],
            "group": span.label,
            "time": format_us(span.duration_us),
            "bytes": format_bytes(span.num_bytes or None),
        }
        for stream in STREAMS
        for span in _joined(trace.of(stream), column_us)
    ]
    # Lanes have a name: of two that Altair calls alike, one is drawn with the other's spans.
    lanes = _chart(spans, name=f"spans{rank}").mark_bar()
    lanes = lanes.encode(
        x=alt.X("start:Q", scale=domain, axis=alt.Axis(labels=False, title=None)),
        x2="end:Q",
        y=alt.Y("stream:N", title=None, scale=alt.Scale(domain=["pass", *STREAMS])),
        color=_colors({name: color for color, name in _KINDS.values()}, "what", spans),
        tooltip=["group:N", "what:N", "time:N", "bytes:N"],
    )
    passes = [
        {"at": (start_us + stop_us) / 2 / scale, "name": name}
        for name, start_us, stop_us in _passes(trace.of("compute"))
        if stop_us - start_us > 0.015 * end_us
    ]
    names = _chart(passes).mark_text(fontSize=10, color="#777777")
    names = names.encode(x=alt.X("at:Q", scale=domain), y=alt.datum("pass"), text="name:N")
    counters = list(_thinned(trace.counters, last_us([trace]), column_us))
    size, size_unit = byte_unit(max((counter.value for counter in counters), default=0.0))
    values = [
        {
            "time": counter.time_us / scale,
            "size": counter.value / size,
            "what": counter.name,
            "bytes": format_bytes(counter.value),
        }
        for counter in counters
    ]
    memory = _chart(values, name=f"memory{rank}", width=900, height=180)
    memory = memory.mark_line(interpolate="step-after", strokeWidth=1.6).encode(
        x=alt.X("time:Q", scale=domain, title=f"time ({unit})"),
        y=alt.Y("size:Q", title=size_unit),
        color=_colors(_COUNTERS, "what", values),
        tooltip=["what:N", "bytes:N"],
    )
    above = alt.layer(lanes, names, name=f"lanes{rank}", width=900, height=110)
    zoom = alt.selection_interval(name=f"zoom{rank}", bind="scales", encodings=["x"])
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that both zoom as one
        both = alt.vconcat(above, memory).add_params(zoom)
    return both.resolve_scale(x="shared", color="independent")


def tradeoff_chart(tradeoff: TradeOff) -> Any:
    """Return a chart of memory against step time; a line joins what nothing beats in both.

    Numbers count from 1 by memory, the least first; where points lie close, their tooltips tell.
    """
    alt = _altair()
    scale, unit = byte_unit(max(point.peak_bytes for point in tradeoff.points))
    rows, least = [], dict.fromkeys(_POINTS, math.inf)
    for number, point in enumerate(tradeoff.by_memory, start=1):
        percent, kind = point.step_time_percent, point.kind
        row = {"number": number, "setting": point.label, "how": kind, "percent": percent}
        row |= {"memory": point.peak_bytes / scale, "bytes": format_bytes(point.peak_bytes)}
        rows.append(row | {"is_best": percent < least[kind]})
        least[kind] = min(percent, least[kind])
    room = alt.Scale(zero=False, padding=20)
    # A title of the channel would become part of an expression, with its quotes and backslashes.
    axis = alt.Axis(title=_safe(f"peak {tradeoff.memory} of the rank that needs most ({unit})"))
    points = _chart(rows).encode(
        x=alt.X("memory:Q", axis=axis, scale=room),
        y=alt.Y("percent:Q", title="step time against no offload (%)", scale=room),
    )
    tips = ["number:Q", "setting:N", "bytes:N", "percent:Q", "how:N"]
    colored = points.encode(color=_colors(_POINTS, "how", rows), tooltip=tips)
    chart = alt.layer(
        colored.transform_filter("datum.is_best").mark_line(opacity=0.6),
        colored.mark_point(size=60, filled=True, opacity=1),
        points.mark_text(dx=9, dy=-9).encode(text="number:Q"),
        width=760,
        height=380,
    )
    return chart.interactive()


def last_us(traces: Iterable[StepTrace]) -> float:
    """Return when the last span of any rank ends; every rank's time starts at zero."""
    return max((span.end_us for trace in traces for span in trace.spans), default=0.0)


def _altair() -> Any:
    """Return the module, which takes a while to import."""
    require(*NEEDED)
    import altair

    return altair


def _chart(rows: Sequence[Mapping[str, Any]], **properties: Any) -> Any:
    # A tuple, which Altair doesn't copy at every step, in a mapping, which it doesn't check by row.
    safe = tuple({key: _safe(value) for key, value in row.items()} for row in rows)
    return _altair().Chart({"values": safe}, **properties)


def _safe(value: Any) -> Any:
    """Return a text without what no XML may hold, for pictures come from SVG; a number in short."""
    if isinstance(value, float):
        return round(value, 4)
    return printable(value) if isinstance(value, str) else value


def _colors(colors: Mapping[str, str], name: str, rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return the colour of each value that rows have in a field, with a legend of them below."""
    used = {row[name] for row in rows}
    found = {key: color for key, color in colors.items() if not used or key in used}
    scale = _altair().Scale(domain=list(found), range=list(found.values()))
    legend = _altair().Legend(orient="bottom", title=None, columns=3, labelLimit=400)
    return _altair().Color(f"{name}:N", scale=scale, legend=legend)


def _kind(span: Span) -> str:
    """Return what a stretch is drawn as."""
    kind = PIPELINE_WAIT if span.wait == PIPELINE_WAIT else span.kind
    return kind if kind in _KINDS else "other"


def _joined(spans: Iterable[Span], column_us: float) -> Iterator[Span]:
    """Yield spans; of one kind, those that begin in one column of the screen are one."""
    lasting = (span for span in spans if span.duration_us > 0)
    for _, same in itertools.groupby(lasting, lambda x: (_kind(x), x.start_us // column_us)):
        found = list(same)
        size, first = sum(span.num_bytes for span in found), found[0]
        yield replace(first, duration_us=found[-1].end_us - first.start_us, num_bytes=size)


def _thinned(counters: Iterable[Counter], end_us: float, column_us: float) -> Iterator[Counter]:
    """Yield the lowest, highest and last value of each column; the last holds to the end."""
    in_time = sorted(counters, key=lambda counter: counter.time_us)
    for name in _COUNTERS:
        mine = [counter for counter in in_time if counter.name == name]
        for _, column in itertools.groupby(mine, lambda counter: counter.time_us // column_us):
            found = list(column)
            by_value = sorted(found, key=lambda counter: counter.value)
            kept = {by_value[0], by_value[-1], found[-1]}
            yield from sorted(kept, key=lambda counter: counter.time_us)
        if mine:
            yield replace(mine[-1], time_us=end_us)


def _passes(compute: Iterable[Span]) -> Iterator[tuple[str, float, float]]:
    """Yield the passes over chunks, such as ``F3`` and ``B0``, with their start and end."""

    def name(span: Span) -> str:
        match = _CHUNK.search(span.label) if span.kind in ("forward", "backward") else None
        return f"{span.kind[0].upper()}{match[1]}" if match else ""

    for key, spans in itertools.groupby(filter(name, compute), name):
        found = list(spans)
        yield key, found[0].start_us, found[-1].end_us
