"""One self-contained HTML file about one run.

Owns the rendering with jinja2, which is optional (extra ``report``), and the words of the page's
template. Must not know where the numbers come from.

Invariants: the file loads nothing, runs nothing, and says so to the browser (a content security
policy without any source); all text of a run is escaped, as group names are what users call their
modules. Read next: `megatron_offload.report.report`, and ``templates/report.html``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_offload.core.units import format_bytes
from megatron_offload.errors import require
from megatron_offload.files.text import replace_text
from megatron_offload.report import charts
from megatron_offload.report.plots import MOST_TIMELINES
from megatron_offload.report.report import Report, format_percent

__all__ = ["render_report", "write_report"]


def write_report(report: Report, path: str | Path) -> None:
    """Write a report to a file, whole or not at all.

    Raises:
        ConfigError: jinja2 is not installed.
        OSError: the file can't be written.
    """
    text = render_report(report)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def render_report(report: Report) -> str:
    """Return a report as HTML.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    require("jinja2")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, percent=format_percent, ms=_format_ms)
    return environment.get_template("report.html").render(_context(report)) + "\n"


def _context(report: Report) -> dict[str, Any]:
    traces = report.traces[:MOST_TIMELINES]
    times = charts.time_axis(traces)
    return {
        "report": report,
        "headline": report.memory[0] if report.memory else None,
        "moved": sum(rank.offloaded_bytes for rank in report.ranks),
        "bars": _bars(report),
        "times": times,
        "timelines": [charts.rank_chart(trace, times) for trace in traces],
        "num_hidden_timelines": len(report.traces) - len(traces),
        "scatter": charts.scatter(report.tradeoff) if report.tradeoff else None,
        "width": charts.WIDTH,
        "height": charts.HEIGHT,
        "status": _status(report),
    }


def _status(report: Report) -> tuple[str, str]:
    """Return the kind of verdict and its word."""
    if report.comparison is None:
        return "neutral", "not compared"
    return ("good", "identical") if report.comparison.identical else ("bad", "different")


def _bars(report: Report) -> list[dict[str, Any]]:
    """Return each rank's peaks with their length in percent of the longest."""
    if not report.memory:
        return []
    pairs = report.memory[0].by_rank
    longest = max((value for pair in pairs for value in pair if value is not None), default=0) or 1
    return [
        {
            "rank": rank.rank,
            "change": pair.change,
            "bars": [
                (kind, value, 100 * value / longest)
                for kind, value in (("without", pair.without), ("offloaded", pair.offloaded))
                if value is not None
            ],
        }
        for rank, pair in zip(report.ranks, pairs, strict=True)
    ]


def _format_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"
