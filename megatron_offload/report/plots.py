"""Plots of two runs, timelines of one step on several ranks, and the trade-off curve.

Owns the drawing, with matplotlib, which is optional (extra ``plots``). Must not know torch or the
trainer.

Invariant: without matplotlib a plot is left out, never an error. Read next:
`megatron_offload.cli.compare_runs`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_offload.core.trace import (
    HELD_BYTES,
    HOST_BYTES,
    INFLIGHT_BYTES,
    LIVE_BYTES,
    PIPELINE_WAIT,
    PREFETCHED_BYTES,
    STREAMS,
    Span,
    StepTrace,
)
from megatron_offload.report.tradeoff import TradeOff, TradeOffPoint, frontier

__all__ = ["MOST_TIMELINES", "plot_comparison", "plot_timeline", "plot_tradeoff"]

_MIB = 1024 * 1024
_GIB = 1024 * _MIB

_KINDS = {
    "forward": ("#4c8bc9", "forward"),
    "backward": ("#5aa868", "backward"),
    "other": ("#d5d8dc", "compute outside groups"),
    "stall": ("#d1333b", "compute waits for a copy"),
    PIPELINE_WAIT: ("#f4dede", "compute waits for another stage"),
    "d2h": ("#e39b3b", "offload (D2H)"),
    "h2d": ("#8e6bb5", "reload (H2D)"),
}

_COUNTERS = {
    LIVE_BYTES: ("#9aa0a6", "--"),
    HELD_BYTES: ("#222222", "-"),
    HOST_BYTES: ("#2a9d9d", "-"),
    INFLIGHT_BYTES: (_KINDS["d2h"][0], "-"),
    PREFETCHED_BYTES: (_KINDS["h2d"][0], "-"),
}

_MOST_LABELS = 20
"""Points that are named in a trade-off plot, those of the least memory first."""

MOST_TIMELINES = 16
"""Ranks in one picture; hundreds would help nobody."""

_CHUNK = re.compile(r"\[chunk (\d+),")


def plot_comparison(
    path: Path,
    losses: tuple[Sequence[float], Sequence[float]],
    memory_bytes: tuple[Sequence[int], Sequence[int]],
    memory_title: str,
) -> bool:
    """Draw two runs into a PNG file.

    Args:
        path: file to write.
        losses: loss of every step, without and with offload.
        memory_bytes: peak memory of every rank, without and with offload.
        memory_title: which memory that is.

    Returns:
        Whether the plot was drawn: False where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    # No pyplot: it keeps global state and may look for a display.
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = range(1, len(losses[0]) + 1)
    left.plot(steps, losses[0], linewidth=4, alpha=0.4, label="without offload")
    left.plot(steps, losses[1], linewidth=1.5, linestyle="--", label="with offload")
    left.set(xlabel="step", ylabel="loss", title="Loss")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend()
    ranks = range(len(memory_bytes[0]))
    for offset, values, label in zip((-0.2, 0.2), memory_bytes, ("without", "with"), strict=True):
        places = [rank + offset for rank in ranks]
        bars = right.bar(places, [value / _MIB for value in values], 0.4, label=f"{label} offload")
        right.bar_label(bars, fmt="%.1f", fontsize=8)
    right.set(xlabel="rank", ylabel="MiB", title=memory_title)
    right.set_xticks(list(ranks))
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def plot_timeline(traces: Sequence[StepTrace], path: Path, title: str = "One step") -> bool:
    """Draw what each stream did when, and how many bytes that held, into a PNG file.

    Args:
        traces: the step on each rank; every rank's time starts at zero.
        path: file to write.
        title: stands above the picture, beside the step's numbers.

    Returns:
        Whether the timeline was drawn: False where matplotlib is not installed.

    Raises:
        ValueError: there is no trace, or more than `MOST_TIMELINES`.
    """
    if not 1 <= len(traces) <= MOST_TIMELINES:
        raise ValueError(f"a timeline shows 1 to {MOST_TIMELINES} ranks, got {len(traces)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 7 * len(traces)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * len(traces), 1, sharex=True, height_ratios=(2, 3) * len(traces))
    end_us = max((span.end_us for trace in traces for span in trace.spans), default=0.0)
    scale, unit = (1e-3, "ms") if end_us >= 2000 else (1.0, "µs")
    for index, trace in enumerate(traces):
        lanes, memory = axes[2 * index : 2 * index + 2]
        rank = f", rank {trace.rank}" if len(traces) > 1 else ""
        _draw_lanes(lanes, trace, scale)
        facts = _facts(trace, scale, unit)
        lanes.set_title(f"{title}{rank}: {facts}", loc="left", parse_math=False)
        _draw_memory(memory, trace, scale)
        memory.set_xlim(0, max(end_us * scale, 1e-9))
    axes[-1].set(xlabel=f"time ({unit})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def plot_tradeoff(tradeoff: TradeOff, path: Path, title: str = "Memory against time") -> bool:
    """Draw what settings cost in memory and in time into a PNG file.

    Args:
        tradeoff: the settings; what no other beats in both is joined by a line.
        path: file to write.
        title: stands above the picture.

    Returns:
        Whether the plot was drawn: False where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    timed = [point for point in tradeoff.points if point.step_time_percent is not None]
    kinds = (("measured", False, "-", "#0b7f86"), ("predicted", True, "--", "none"))
    for name, is_predicted, style, face in kinds:
        points = [point for point in timed if point.is_predicted is is_predicted]
        if not points:
            continue
        x, y = _places(points)
        axes.scatter(x, y, s=45, facecolors=face, edgecolors="#0b7f86", label=name, zorder=3)
        axes.plot(*_places(frontier(points)), style, color="#0b7f86", linewidth=1.2, alpha=0.6)
    plans = [point for point in timed if point.is_plan]
    if plans:
        x, y = _places(plans)
        axes.scatter(
            *(x, y), s=180, facecolors="none", edgecolors="#c2255c", linewidths=2, label="the plan"
        )
    for point in tradeoff.points:
        if point.step_time_percent is None:
            axes.axvline(point.peak_bytes / _GIB, color="#0b7f86", linewidth=1.2, linestyle=":")
    # Labels beside their points would lie on one another: numbers there, a list at the side.
    named = sorted(tradeoff.points, key=lambda point: point.peak_bytes)[:_MOST_LABELS]
    for number, point in enumerate(named, start=1):
        place = (point.peak_bytes / _GIB, point.step_time_percent or 0.0)
        axes.annotate(str(number), place, (0, 8), textcoords="offset points", ha="center")
    lines = [
        f"{number}  {textwrap.shorten(point.label, 60, placeholder=' ...')}"
        for number, point in enumerate(named, start=1)
    ]
    # As a user wrote it: a dollar sign starts no formula.
    axes.text(*(1.03, 1.0, "\n".join(lines)), transform=axes.transAxes, va="top", parse_math=False)
    memory = f"peak {tradeoff.memory} of the rank that needs most (GiB)"
    axes.set_xlabel(memory, parse_math=False)
    axes.set_ylabel("step time against no offload (%)")
    axes.set_title(title, loc="left", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _places(points: Sequence[TradeOffPoint]) -> tuple[list[float], list[float]]:
    """Return where points are whose time is known."""
    return [p.peak_bytes / _GIB for p in points], [p.step_time_percent or 0.0 for p in points]


def _facts(trace: StepTrace, scale: float, unit: str) -> str:
    """Return the step's numbers, for the line above its lanes."""
    summary = trace.summary()
    hidden = [
        f"{name} {summary.overlap_us[stream] / summary.busy_us[stream]:.0%} beside compute"
        for stream, name in (("d2h", "D2H"), ("h2d", "H2D"))
        if summary.busy_us[stream]
    ]
    facts = [
        f"{summary.duration_us * scale:.4g} {unit}",
        f"compute waits {summary.copy_stall_us * scale:.3g} {unit} for copies",
        *hidden,
    ]
    return ", ".join(facts)


def _draw_memory(axes: Any, trace: StepTrace, scale: float) -> None:
    """Draw how many bytes were where."""
    end_us = max((span.end_us for span in trace.spans), default=0.0)
    values: dict[str, list[tuple[float, float]]] = {}
    for counter in trace.counters:
        point = (counter.time_us * scale, counter.value / _MIB)
        values.setdefault(counter.name, []).append(point)
    for name, (color, style) in _COUNTERS.items():
        if name in values:
            times, sizes = zip(*values[name], (end_us * scale, values[name][-1][1]), strict=True)
            axes.step(times, sizes, style, where="post", color=color, label=name, linewidth=1.6)
    axes.set(ylabel="MiB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if values:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_lanes(axes: Any, trace: StepTrace, scale: float) -> None:
    """Draw a lane for each stream, and above the first which microbatch it works on."""
    from matplotlib.patches import Patch

    for lane, stream in enumerate(STREAMS):
        spans = [span for span in trace.of(stream) if span.duration_us > 0]
        axes.broken_barh(
            [(span.start_us * scale, span.duration_us * scale) for span in spans],
            (-lane - 0.4, 0.8),
            facecolors=[_KINDS[_kind(span)][0] for span in spans],
            edgecolors="white",
            linewidth=0.4 if len(spans) < 200 else 0.0,  # edges would hide what is thin
        )
    compute = [span for span in trace.of("compute") if span.duration_us > 0]
    total_us = compute[-1].end_us if compute else 0.0
    for name, start_us, end_us in _chunks(compute):
        ends = ((start_us + 0.001 * total_us) * scale, (end_us - 0.001 * total_us) * scale)
        axes.plot(ends, (0.5, 0.5), color="#555555", linewidth=1.2)
        if end_us - start_us > 0.015 * total_us:
            place = ((start_us + end_us) / 2 * scale, 0.55)
            axes.text(*place, name, ha="center", va="bottom", fontsize=8)
    axes.set_yticks([0, -1, -2], ["compute", "D2H", "H2D"])
    axes.set_ylim(-2.5, 0.95)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    kinds = {_kind(span) for span in trace.spans if span.duration_us > 0}
    handles = [Patch(color=c, label=name) for kind, (c, name) in _KINDS.items() if kind in kinds]
    if handles:
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _kind(span: Span) -> str:
    """Return what a stretch is drawn as."""
    return span.wait if span.wait == PIPELINE_WAIT else span.kind


def _chunks(compute: Sequence[Span]) -> Iterator[tuple[str, float, float]]:
    """Yield the passes over chunks, such as ``F3`` and ``B0``, with their start and end."""
    current: tuple[str, float, float] | None = None
    for span in compute:
        match = _CHUNK.search(span.label)
        if match is None or span.kind not in ("forward", "backward"):
            continue
        name = f"{'F' if span.kind == 'forward' else 'B'}{match[1]}"
        if current is not None and current[0] == name:
            current = (name, current[1], span.end_us)
            continue
        if current is not None:
            yield current
        current = (name, span.start_us, span.end_us)
    if current is not None:
        yield current
