"""Charts of a run: the timeline of one step, and memory against step time.

The page of a report draws them. Needs Altair and vl-convert (extra ``report``).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from megatron_offload.core.trace import PIPELINE_WAIT, STREAMS, ByteCount, Counter, Span, StepTrace
from megatron_offload.core.units import byte_unit, format_bytes, format_us
from megatron_offload.planning.found import Alternatives, FoundStage

# Okabe and Ito's colours, and greys that no colour vision takes for one of them.
_KINDS = {
    "forward": ("#0072b2", "forward"),
    "backward": ("#009e73", "backward"),
    "recompute": ("#56b4e9", "recomputed"),
    "stall": ("#d55e00", "waits for a copy"),
    PIPELINE_WAIT: ("#626c78", "waits for a stage"),
    "other": ("#c4c9cf", "outside groups"),
    "d2h": ("#e69f00", "offload (D2H)"),
    "h2d": ("#cc79a7", "reload (H2D)"),
}

# Colour and dashes.
_COUNTERS: dict[str, tuple[str, list[int]]] = {
    ByteCount.LIVE: ("#56b4e9", [1, 0]),
    ByteCount.HELD: ("#0072b2", [8, 3]),
    ByteCount.HOST: ("#009e73", [2, 2]),
    ByteCount.INFLIGHT: ("#e69f00", [1, 0]),
    ByteCount.PREFETCHED: ("#cc79a7", [5, 2, 1, 2]),
}

_POINTS = {
    "measured": ("#0072b2", "square"),
    "predicted": ("#e69f00", "circle"),
    "plan": ("#d55e00", "diamond"),
}

_DONE = {
    "nothing": ("#626c78", "triangle-up"),
    "recompute": ("#56b4e9", "square"),
    "offload": ("#e69f00", "circle"),
    "recompute and offload": ("#009e73", "cross"),
    "chosen": ("#d55e00", "diamond"),
}

MOST_TIMELINES = 64  # ranks in one page; hundreds would be of no help
_NEAR = 0.03  # of a picture's width and height: numbers of points so near are one text
_COLUMNS = 2000  # of a step, fewer of more ranks than 16; what is shorter is drawn together


def timeline_chart(trace: StepTrace, end_us: float, num_ranks: int = 1) -> Any:
    """Return a chart of one rank's step: a lane for each stream, and how many bytes were where.

    Its axis ends at ``end_us``, such as `last_us` of all ranks; the more there are, the coarser.
    """
    rank, end_us = trace.rank, end_us or 1.0
    scale, unit = (1e3, "ms") if end_us >= 2000 else (1.0, "µs")
    domain = alt.Scale(domain=[0, end_us / scale], nice=False)
    column_us = end_us / (_COLUMNS // max(1, num_ranks // 16))
    spans = _rows(trace, end_us, column_us)
    found = {row["what"] for row in spans}
    kinds = {name: color for color, name in _KINDS.values() if name in found}
    # Lanes have a name: of two that Altair calls alike, one is drawn with the other's spans.
    lanes = _chart(spans, name=f"spans{rank}", width=900, height=18 * len(kinds))
    lanes = lanes.mark_bar(height={"band": 0.8}).encode(
        x=alt.X("at:Q", scale=domain, axis=alt.Axis(labels=False, title=None)),
        x2="end:Q",
        y=alt.Y("what:N", title=None, scale=alt.Scale(domain=list(kinds))),
        color=_by("Color", "what", kinds, legend=None),
        tooltip=["group:N", "what:N", "time:N", "bytes:N"],
    )
    counters = list(_thinned(trace.counters, last_us([trace]), column_us))
    size, size_unit = byte_unit(max((counter.value for counter in counters), default=0.0))
    values = [
        {"at": one.time_us / scale, "size": one.value / size, "what": one.name} for one in counters
    ]
    used = {one.name for one in counters}
    lines = {name: style for name, style in _COUNTERS.items() if name in used}
    memory = _chart(values, name=f"memory{rank}", width=900, height=180)
    memory = memory.mark_line(interpolate="step-after", strokeWidth=1.6).encode(
        x=alt.X("at:Q", scale=domain, title=f"time ({unit})"),
        y=alt.Y("size:Q", title=size_unit),
        color=_by("Color", "what", {name: color for name, (color, _) in lines.items()}),
        strokeDash=_by("StrokeDash", "what", {name: dash for name, (_, dash) in lines.items()}),
        tooltip=["what:N", alt.Tooltip("size:Q", title=size_unit, format=".2f")],
    )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that both zoom as one
        zoom = alt.selection_interval(name=f"zoom{rank}", bind="scales", encodings=["x"])
        both = alt.vconcat(lanes, memory, spacing=6).add_params(zoom)
    return both.resolve_scale(x="shared", color="independent", strokeDash="independent")


def overview_chart(traces: Sequence[StepTrace], end_us: float) -> Any:
    """Return a chart of what every rank's compute stream did, a lane each."""
    end_us = end_us or 1.0
    height = max(6.0, min(24.0, 640 / len(traces)))
    kinds = {
        name: color for kind, (color, name) in _KINDS.items() if kind not in ("other", *STREAMS)
    }
    thickness = {name: height * (0.9 - 0.18 * index) for index, name in enumerate(kinds)}
    rows = [
        {**row, "rank": trace.rank, "thickness": thickness[row["what"]]}
        for trace in traces
        for row in _rows(trace, end_us, end_us / (_COLUMNS // max(1, len(traces) // 16)))
        if row["what"] in kinds
    ]
    scale, unit = (1e3, "ms") if end_us >= 2000 else (1.0, "µs")
    chart = _chart(rows, name="overview", width=900, height=height * len(traces)).mark_bar()
    chart = chart.encode(
        x=alt.X("at:Q", title=f"time ({unit})").scale(domain=[0, end_us / scale], nice=False),
        x2="end:Q",
        y=alt.Y("rank:O", axis=alt.Axis(labelOverlap=True)),
        color=_by("Color", "what", kinds, title="from thick to thin"),
        size=alt.Size("thickness:Q", scale=None),
        tooltip=["rank:O", "group:N", "what:N", "time:N"],
    )
    return chart.interactive(name="zoom", bind_y=False)


def tradeoff_chart(stage: FoundStage) -> Any:
    """Return a chart of what the plans of a stage need against the time that they take.

    A line joins what nothing beats in both. None where what they need isn't known.
    """
    if not stage.bare_bytes:
        return None
    sizes = [max(0, size) for size in stage.needed_bytes()]
    scale, unit = byte_unit(max(sizes))
    rows: list[dict[str, Any]] = []
    for place, (plan, size) in enumerate(zip(stage.plans, sizes, strict=True)):
        known = {"predicted": plan.predicted_percent}
        if plan.measured_percent:
            known["measured"] = plan.measured_percent[0]
        if place == stage.followed:
            known["plan"] = known.pop("measured", plan.predicted_percent)
        row: dict[str, Any] = {"plan": f"plan {place}"}
        row |= {"memory": size / scale, "bytes": format_bytes(size)}
        rows += [{**row, "how": how, "percent": percent} for how, percent in known.items()]
    least = dict.fromkeys(_POINTS, math.inf)
    for row in sorted(rows, key=lambda row: (row["memory"], row["percent"])):
        row["is_best"] = row["percent"] < least[row["how"]]
        least[row["how"]] = min(row["percent"], least[row["how"]])
    used = {kind: style for kind, style in _POINTS.items() if least[kind] < math.inf}
    base, points = _memory_against_time(rows, unit, used)
    colors = points.encoding.color
    layers = [
        base.transform_filter("datum.is_best").mark_line(opacity=0.6).encode(color=colors),
        points.encode(tooltip=["plan:N", "bytes:N", "percent:Q", "how:N"]),
    ]
    # Below and left of what is followed there is nothing: it would be better.
    for how, dy, align in (("measured", -13, "center"), ("plan", 15, "right")):
        texts = base.transform_filter(f"datum.how == '{how}'").mark_text(dy=dy, align=align)
        layers.append(texts.encode(text="plan:N"))  # others are named by their tooltips
    return alt.layer(*layers, width=760, height=380).interactive()


def alternatives_chart(found: Alternatives, *, has_names: bool = False) -> Any:
    """Return a chart of what a described job may do: memory of the fullest rank against time.

    Points have numbers, one for those in one place; ``has_names`` puts a list of them below.
    """
    scale, unit = byte_unit(max(found.device_bytes, *(x.reserved_bytes for x in found.each)))
    rows: list[dict[str, Any]] = [
        {
            "number": str(number),
            "memory": one.reserved_bytes / scale,
            "percent": one.takes_longer_percent,
            "how": one.kind,
            "line": f"{number}  {one.what}: {format_bytes(one.reserved_bytes)}, "
            f"{one.takes_longer_percent:+z.1f} %{'' if one.fits else ', does not fit'}",
        }
        for number, one in enumerate(found.each, 1)
    ]
    spans = [max(x[key] for x in rows) - min(x[key] for x in rows) for key in ("memory", "percent")]
    labels = dict[tuple[int, ...], dict[str, Any]]()
    for row in rows:
        places = zip((row["memory"], row["percent"]), spans, strict=True)
        key = tuple(round(x / (span or 1.0) / _NEAR) for x, span in places)
        label = labels.setdefault(key, {**row, "number": ""})
        label["number"] += f"{', ' if label['number'] else ''}{row['number']}"
    used = {kind: style for kind, style in _DONE.items() if any(x["how"] == kind for x in rows)}
    _, points = _memory_against_time(rows, unit, used)
    texts, _ = _memory_against_time([*labels.values()], unit, used)
    there = [{"memory": found.device_bytes / scale, "is": "memory of a GPU"}]
    line = _chart(there).mark_rule(strokeDash=[6, 4], strokeWidth=2, color="#cc79a7")
    layers = [
        line.encode(x="memory:Q", tooltip=["is:N", "memory:Q"]),
        points.encode(tooltip=["line:N"]),
        texts.mark_text(dy=-14, fontSize=13).encode(text="number:N"),
    ]
    chart = alt.layer(*layers, width=760, height=380)
    if not has_names:
        return chart.interactive()
    names = _chart(rows, width=760, height=20 * len(rows), view=alt.ViewBackground(stroke=None))
    names = names.mark_text(align="left", fontSize=13).encode(
        x=alt.value(0), y=alt.Y("number:O", axis=None, sort=None), text="line:N"
    )
    subtitle = [*found.verdict.splitlines(), "predicted; dashed: the memory of a GPU"]
    title = alt.Title(found.title, subtitle=subtitle, anchor="start")
    return alt.vconcat(chart, names, title=title, background="white")


def _memory_against_time(
    rows: Sequence[Mapping[str, Any]], unit: str, styles: Mapping[str, tuple[str, str]]
) -> tuple[Any, Any]:
    """Return a chart of rows with ``memory``, ``percent`` and ``how``, and its points in styles."""
    room = alt.Scale(zero=False, padding=35)
    axis = alt.Axis(title=f"peak memory of the rank that needs most ({unit})")
    base = _chart(rows).encode(
        x=alt.X("memory:Q", axis=axis, scale=room),
        y=alt.Y("percent:Q", title="step time against no offload (%)", scale=room),
    )
    points = base.mark_point(size=90, filled=True, opacity=1).encode(
        color=_by("Color", "how", {kind: color for kind, (color, _) in styles.items()}),
        shape=_by("Shape", "how", {kind: shape for kind, (_, shape) in styles.items()}),
    )
    return base, points


def last_us(traces: Iterable[StepTrace]) -> float:
    """Return when the last span of any rank ends; every rank's time starts at zero."""
    return max((span.end_us for trace in traces for span in trace.spans), default=0.0)


def _chart(rows: Sequence[Mapping[str, Any]], **properties: Any) -> Any:
    # A tuple, which Altair doesn't copy at every step, in a mapping, which it doesn't check by row.
    short = tuple({key: _in_short(value) for key, value in row.items()} for row in rows)
    return alt.Chart({"values": short}, **properties)


def _in_short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _by(channel: str, name: str, values: Mapping[str, Any], **legend: Any) -> Any:
    """Return a channel that a field's values decide, with a legend of them below, or with none."""
    shown = {"orient": "bottom", "title": None, "symbolSize": 250, "symbolOpacity": 1}
    key = None if "legend" in legend else alt.Legend(**shown | legend)
    scale = alt.Scale(domain=list(values), range=list(values.values()))
    return getattr(alt, channel)(f"{name}:N", scale=scale, legend=key)


def _rows(trace: StepTrace, end_us: float, column_us: float) -> list[dict[str, Any]]:
    scale = 1e3 if end_us >= 2000 else 1.0
    return [
        {
            "at": span.start_us / scale,
            "end": span.end_us / scale,
            "what": _KINDS[_kind(span)][1],
            "group": span.label,
            "time": format_us(span.duration_us),
            "bytes": format_bytes(span.num_bytes or None),
        }
        for stream in STREAMS
        for span in _joined(trace.of(stream), column_us)
    ]


def _kind(span: Span) -> str:
    kind = PIPELINE_WAIT if span.wait == PIPELINE_WAIT else span.kind
    return kind if kind in _KINDS else "other"


def _joined(spans: Iterable[Span], column_us: float) -> Iterator[Span]:
    """Yield spans; of one kind, those that begin in one column of the screen are one."""
    lasting = sorted((x for x in spans if x.duration_us > 0), key=lambda x: (_kind(x), x.start_us))
    for _, same in itertools.groupby(lasting, lambda x: (_kind(x), x.start_us // column_us)):
        found = list(same)
        size, first = sum(span.num_bytes for span in found), found[0]
        label = f"{first.label} and {len(found) - 1} more" if len(found) > 1 else first.label
        duration_us = found[-1].end_us - first.start_us
        yield replace(first, label=label, duration_us=duration_us, num_bytes=size)


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
