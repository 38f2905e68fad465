"""All that a report of one run shows, as plain data, and the HTML page made of it.

Nothing is guessed: what was not measured is None, and the page says so. The page loads nothing and
runs its own charts alone, and says so to the browser: its content security policy names that one
script by its hash. All text of a run is escaped.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_offload.core.trace import StepTrace
from megatron_offload.core.units import format_bytes, format_us
from megatron_offload.errors import require
from megatron_offload.files.text import read_text, replace_text
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.report import plots
from megatron_offload.report.tables import plan_rows
from megatron_offload.report.tradeoff import TradeOff

NEEDED = ("jinja2", *plots.NEEDED)
"""Packages that a page needs."""

_TEMPLATES = Path(__file__).parent / "templates"


class Pair(NamedTuple):
    """One quantity without and with offload; None where it was not measured."""

    without: float | None
    offloaded: float | None

    @property
    def change(self) -> float | None:
        """Return how much more there is with offload, as a share of what is there without."""
        if not self.without or self.offloaded is None:
            return None
        return self.offloaded / self.without - 1


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """A way to measure device memory, and the peaks on every rank. Sizes in bytes."""

    name: str
    """Such as "reserved memory"."""
    by_rank: tuple[Pair, ...]

    @property
    def highest(self) -> Pair:
        """Return the peak of the rank that needs most, in each of the runs."""
        without = [pair.without for pair in self.by_rank if pair.without is not None]
        offloaded = [pair.offloaded for pair in self.by_rank if pair.offloaded is not None]
        return Pair(max(without, default=None), max(offloaded, default=None))


@dataclass(frozen=True, slots=True)
class GroupRow:
    """All groups of one name, over all ranks of the last step. Sizes in bytes."""

    name: str
    num_groups: int
    offloaded_bytes: int
    reloaded_bytes: int
    kept_bytes: int
    num_late_reloads: int
    kept_bytes_by_reason: Mapping[str, int] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Return why the bytes moved, and why they stayed, in sentences."""
        found = []
        if self.offloaded_bytes:
            found.append(f"{format_bytes(self.offloaded_bytes)} moved: named in offload.modules")
        found += [
            f"{format_bytes(num_bytes)} kept: {reason}"
            for reason, num_bytes in sorted(
                self.kept_bytes_by_reason.items(), key=lambda item: -item[1]
            )
        ]
        unexplained = self.kept_bytes - sum(self.kept_bytes_by_reason.values())
        if unexplained > 0:
            found.append(f"{format_bytes(unexplained)} kept: the run did not note why")
        return found or ["nothing in it to move: too small, or kept alive by something else"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether a run with offload is the same bits as one without."""

    identical: bool
    findings: tuple[tuple[str, bool], ...]
    """What was compared, and whether it was equal."""


@dataclass(frozen=True, slots=True)
class Report:
    """One run, or the two runs of a comparison."""

    title: str
    num_steps: int
    device: str
    is_simulated: bool
    """Whether there was no GPU: times then say nothing about one."""
    date: str
    memory: Sequence[MemoryKind]
    """What was measured, the one that counts most first."""
    ranks: Sequence[Mapping[str, Any]]
    """What each rank moved in the last step: its ``rank``, ``pp_rank``, ``dp_rank``, ``kept_bytes``
    and what `megatron_offload.report.tables.rank_table` takes."""
    groups: Sequence[GroupRow]
    step_time_s: Pair
    """Median over the steps."""
    config: str | None
    """As YAML, what was given of it; None where the run has left none."""
    versions: Mapping[str, str]
    """Empty where the run has left none."""
    commands: Sequence[str]
    """What does the same again."""
    comparison: Comparison | None = None
    """None where there was one run only."""
    traces: Sequence[StepTrace] = ()
    tradeoff: TradeOff | None = None
    plan: OffloadPlan | None = None
    plan_is_followed: bool = False
    """Whether the run did what the plan says."""
    left_out: str = ""
    """A sentence on the steps whose peaks count in no number here; "" without such."""

    @property
    def verdict(self) -> str:
        """Return the one line at the top: the same bits? how much memory saved? at what cost?"""
        return "; ".join([self._bits(), *self._memory(), self._time()]) + "."

    def _bits(self) -> str:
        where = f"over {_count(self.num_steps, 'step')} on {_count(len(self.ranks), 'rank')}"
        if self.comparison is None:
            return f"Not compared with a run without offload, {where}"
        if self.comparison.identical:
            return f"Bitwise identical {where}"
        wrong = [name for name, is_equal in self.comparison.findings if not is_equal]
        return f"NOT the same bits {where}: {', '.join(wrong) or 'see below'} differ"

    def _memory(self) -> list[str]:
        if not self.memory:
            return ["memory was not measured"]
        kind = self.memory[0]
        without, offloaded = kind.highest
        change = kind.highest.change
        if change is None:
            return [f"peak {kind.name} {format_bytes(offloaded)}"]
        way = "up" if change > 0 else "down"
        return [
            f"peak {kind.name} {way} from {format_bytes(without)} to {format_bytes(offloaded)} "
            f"({_format_percent(change)})"
        ]

    def _time(self) -> str:
        if self.is_simulated:
            return "speed is not judged, as the device is simulated"
        change = self.step_time_s.change
        if change is not None:
            return f"step time {_format_percent(change)}"
        return "step time has nothing to be held against"


def write_report(report: Report, path: str | Path) -> None:
    """Write a report's page to a file, whole or not at all.

    Raises:
        ConfigError: jinja2 or Altair is not installed.
        OSError: the file can't be written.
    """
    text = render_report(report)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def render_report(report: Report) -> str:
    """Return a report as HTML.

    Raises:
        ConfigError: jinja2 or Altair is not installed.
    """
    require(*NEEDED)
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, percent=_format_percent, us=format_us)
    environment.filters["seconds"] = lambda time_s: format_us(time_s and 1e6 * time_s)
    headline = report.memory[0] if report.memory else None
    traces = report.traces[: plots.MOST_TIMELINES]
    end_us = plots.last_us(traces)
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    ranks = [rank["rank"] for rank in report.ranks]
    page = environment.get_template("report.html").render(
        report=report,
        headline=headline,
        moved=sum(rank["offloaded_bytes"] for rank in report.ranks),
        memory=headline and plots.memory_chart(headline.by_rank, f"peak {headline.name}", ranks),
        plan_rows=plan_rows(report.plan) if report.plan else [],
        timelines=[(trace, plots.timeline_chart(trace, end_us)) for trace in traces],
        tradeoff=report.tradeoff and plots.tradeoff_chart(report.tradeoff),
        status=_status(report),
        script=script,
        digest=digest,
    )
    return page + "\n"


@functools.cache
def _script() -> str:
    """Return Vega, and what draws each chart of the page by it."""
    import vl_convert

    return vl_convert.javascript_bundle(read_text(_TEMPLATES / "report.js"))


def _status(report: Report) -> tuple[str, str]:
    """Return the kind of verdict and its word."""
    if report.comparison is None:
        return "neutral", "not compared"
    return ("good", "identical") if report.comparison.identical else ("bad", "different")


def _format_percent(share: float | None) -> str:
    """Return a change in percent with its sign; ``-`` for None."""
    if share is None:
        return "-"
    percent = 100 * share
    return f"{percent:+.1f} %".replace("-", "\N{MINUS SIGN}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
