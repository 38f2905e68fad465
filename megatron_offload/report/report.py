"""All that a report of one run shows, and the HTML page made of it.

Nothing is guessed: what was not measured is None, and the page says so. The page loads nothing and
runs its own charts alone, and says so to the browser: its content security policy names that one
script by its hash. All text of a run is escaped.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_offload.core.trace import StepTrace
from megatron_offload.core.units import format_bytes, format_us
from megatron_offload.errors import require
from megatron_offload.files.text import read_text
from megatron_offload.observe.run_report import RunFacts
from megatron_offload.planning.found import Alternatives, RunFrontier
from megatron_offload.report.tables import alternative_rows, found_rows

_TEMPLATES = Path(__file__).parent / "templates"

_MEMORY = {
    "reserved memory": "peak_reserved_bytes",
    "allocated memory": "peak_allocated_bytes",
    "saved activations": "peak_live_activation_bytes",
}
"""What the device really takes counts most, where there is a device."""

_DONE = {"offloaded_bytes": "offloaded", "recomputed_bytes": "recomputed in backward"}


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


class MemoryKind(NamedTuple):
    """A way to measure device memory, such as "reserved memory", and each rank's peak in bytes."""

    name: str
    by_rank: tuple[Pair, ...]

    @property
    def highest(self) -> Pair:
        """Return the peak of the rank that needs most, in each of the runs."""
        runs = zip(*self.by_rank, strict=True)
        return Pair(*(max((x for x in run if x is not None), default=None) for run in runs))


@dataclass(frozen=True, slots=True)
class Report:
    """One run, the two runs of a comparison, or plans of rows alone."""

    title: str
    facts: RunFacts | None = None
    """Of the run, in a comparison of that with offload; None where there are plans alone."""
    plain: RunFacts | None = None
    """Of the run without offload, where two were compared."""
    config: str | None = None
    """As YAML, what was given of it; None where the run has left none."""
    findings: Mapping[str, bool] | None = None
    """What was compared, and whether it was equal; None where there was one run only."""
    traces: Sequence[StepTrace] = ()
    found: RunFrontier | None = None
    """The plans of rows among which was chosen."""
    alternatives: Alternatives | None = None
    """What a described job may do, where the report is about one."""

    @property
    def memory(self) -> list[MemoryKind]:
        """What was measured, the one that counts most first."""
        found, plain = [], self.plain
        for name, key in _MEMORY.items():
            after = [getattr(rank, key) for rank in self.facts.by_rank] if self.facts else []
            before = [getattr(x, key) for x in plain.by_rank] if plain else [None] * len(after)
            if any(value is not None for value in after):
                found.append(MemoryKind(name, tuple(map(Pair, before, after))))
        return found

    @property
    def step_time_s(self) -> Pair:
        """The median step's time."""
        return Pair(*(run.step_time_s if run else None for run in (self.plain, self.facts)))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Add up the groups of one name over all ranks; say what became of their bytes."""
        found: dict[str, tuple[Counter[str], Counter[str]]] = {}
        for rank in self.facts.by_rank if self.facts else ():
            for group in rank.groups:
                sums, kept = found.setdefault(group.name, (Counter(), Counter()))
                sums.update({key: x for key, x in asdict(group).items() if isinstance(x, int)})
                kept.update(group.kept_bytes_by_reason)
        rows = []
        for name, (sums, kept) in found.items():
            reasons = [
                f"{format_bytes(sums[key])} {why}" for key, why in _DONE.items() if sums[key]
            ]
            reasons += [f"{format_bytes(size)} kept: {why}" for why, size in kept.most_common()]
            nothing = "nothing in it to offload: too small, or kept alive by something else"
            rows.append({**sums, "name": name, "reasons": reasons or [nothing]})
        return rows


def render_report(report: Report) -> str:
    """Return a report as HTML. ConfigError: jinja2 or Altair is not installed."""
    require("the HTML report", "jinja2", "altair", "vl_convert")
    import jinja2

    from megatron_offload.report import plots

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, percent=_format_percent, us=format_us)
    environment.filters["zipped"] = _zipped
    environment.filters["seconds"] = lambda time_s: format_us(time_s and 1e6 * time_s)
    traces = report.traces[: plots.MOST_TIMELINES]
    end_us = plots.last_us(traces)
    script, alternatives = _script(), report.alternatives
    mark = "followed" if report.facts else "chosen"
    page = environment.get_template("report.html").render(
        report=report,
        timelines=[(trace, plots.timeline_chart(trace, end_us, len(traces))) for trace in traces],
        overview=plots.overview_chart(traces, end_us) if len(traces) > 1 else None,
        stages=[
            (stage, found_rows(stage, **{mark: stage.followed}), plots.tradeoff_chart(stage))
            for stage in (report.found.stages if report.found else ())
        ],
        fits=alternatives and alternative_rows(alternatives),
        picture=alternatives and plots.alternatives_chart(alternatives),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return page + "\n"


def _zipped(chart: Any) -> str:
    """Return a chart in a tenth of its size, as the page's script reads it."""
    text = json.dumps(chart.to_dict(), separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@functools.cache
def _script() -> str:
    """Return Vega, and what draws each chart of the page by it."""
    import vl_convert

    return vl_convert.javascript_bundle(read_text(_TEMPLATES / "report.js"))


def _format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+z.1f} %".replace("-", "\N{MINUS SIGN}")
