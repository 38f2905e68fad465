"""Write one HTML page about a run: bits, memory, time, groups, timelines, the rows that it found.

reads    run.output of a train or a compare run: steps.jsonl, and of config.yaml, run.json,
         timelines, compare.json and frontier.json what is there; one that is missing is a gap that
         the page names, a damaged one is an error
prints   where the page is
writes   report.html; needs the extra 'report'

exit status: 0 written, 2 bad input (the last page remains)

example: megatron-offload report runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_settings import CliPositionalArg

from megatron_offload.cli.options import Options, writing
from megatron_offload.config import load_yaml
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import read_model, validate
from megatron_offload.files.text import read_text, replace_text
from megatron_offload.planning.found import NAME, read_frontier
from megatron_offload.report.console import console
from megatron_offload.report.report import MemoryKind, Pair, Report, render_report
from megatron_offload.train import run_folder
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import (
    COMPARISON_NAME,
    FOLDERS,
    Comparison,
    RunReport,
    read_steps,
)

_MEMORY = {
    "reserved memory": "peak_reserved_bytes",
    "allocated memory": "peak_allocated_bytes",
    "saved activations": "peak_live_activation_bytes",
}
"""What the device really takes counts most, where there is a device."""


class Given(Options):
    """The options of ``report``."""

    folder: CliPositionalArg[Path]
    """run.output of a train or compare run."""

    output: Path | None = None
    """The page; FOLDER/report.html unless given."""


def run(given: Given) -> int:
    """Write the report of a folder and say where it is; returns 0."""
    console().print(f"report: {write_page(given.folder, given.output)}")
    return 0


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a folder; return its path. Raises what `read_report` does."""
    path = output or folder / "report.html"
    page = render_report(read_report(folder))
    with writing(path):
        replace_text(path, page)
    return path


def read_report(folder: Path) -> Report:
    """Read what ``run.output`` of a train or a compare run holds; a damaged file: `ConfigError`."""
    main = run_folder.main_folder(folder)
    offloaded, plain, comparison = RunReport(read_steps(main)), RunReport(), None
    if not offloaded.steps:
        raise ConfigError(f"{main} holds no whole step of a run; give run.output of one")
    if main != folder:
        comparison = read_model(Comparison, folder / COMPARISON_NAME)
        num_steps, before = len(offloaded.steps), read_steps(folder / FOLDERS[0])
        if len(before) < num_steps:
            raise ConfigError(f"{folder / FOLDERS[0]} ends at step {len(before)} of {num_steps}")
        if len(before[0].ranks) != len(offloaded.steps[0].ranks):
            raise ConfigError(f"{folder / FOLDERS[0]} has other ranks than {main}")
        plain = RunReport(before[:num_steps])
    path, facts_path = folder / run_folder.CONFIG_NAME, main / run_folder.FACTS_NAME
    config = validate(TrainConfig, load_yaml(path), str(path)) if path.exists() else None
    facts = read_model(run_folder.RunFacts, facts_path) if facts_path.exists() else None
    ranks = offloaded.peaks()
    # Only a GPU has memory to reserve.
    is_simulated = facts.is_simulated if facts else ranks[0]["peak_reserved_bytes"] is None
    traced_step = config.traced_step if config else 0
    times = Pair(*(run.median_step_time_s(without=traced_step) for run in (plain, offloaded)))
    return Report(
        title=folder.resolve().name,
        num_steps=len(offloaded.steps),
        device=facts.device if facts else "device not known",
        is_simulated=is_simulated,
        date=f"{facts.date:%Y-%m-%d %H:%M} UTC" if facts else "date not known",
        memory=memory_kinds(plain.peaks(), ranks),
        ranks=ranks,
        step_time_s=times,
        config=read_text(path).rstrip() if config else None,
        versions=facts.versions if facts else {},
        findings=comparison.findings if comparison else None,
        traces=run_folder.read_timelines(main),
        found=read_frontier(main) if (main / NAME).exists() else None,
    )


def memory_kinds(
    without: Sequence[dict[str, Any]], offloaded: Sequence[dict[str, Any]]
) -> list[MemoryKind]:
    """Return each rank's peaks, of each kind of memory that was measured."""
    found = []
    for name, key in _MEMORY.items():
        after = [rank[key] for rank in offloaded]
        before = [rank[key] for rank in without] if without else [None] * len(after)
        if any(value is not None for value in after):
            found.append(MemoryKind(name, tuple(map(Pair, before, after))))
    return found
