"""Write one HTML page about a run or plans: bits, memory, time, groups, timelines, found rows.

reads    run.output of a train or a compare run, what save_report() or --offload-report has left
         of any other program, or plans, such as frontier.json; a file that is missing is
         a gap that the page names, a damaged one is an error
prints   where the page is
writes   report.html in the folder, or beside a file of plans; needs the extra 'report'

exit status: 0 written, 2 bad input (the last page remains)

example: megatron-offload report runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic_settings import CliPositionalArg

from megatron_offload.cli.options import Options, writing
from megatron_offload.config import OffloadConfig, load_yaml
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import read_model, validate
from megatron_offload.files.text import read_text, replace_text
from megatron_offload.observe import run_report
from megatron_offload.planning.found import NAME, read_frontier
from megatron_offload.report.console import console
from megatron_offload.report.report import MemoryKind, Pair, Report, render_report
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import (
    COMPARISON_NAME,
    FOLDERS,
    Comparison,
    RankStep,
    RunReport,
    counters_of,
    read_steps,
)
from megatron_offload.train.run_folder import main_folder

_MEMORY = {
    "reserved memory": "peak_reserved_bytes",
    "allocated memory": "peak_allocated_bytes",
    "saved activations": "peak_live_activation_bytes",
}
"""What the device really takes counts most, where there is a device."""


class Given(Options):
    """The options of ``report``."""

    folder: CliPositionalArg[Path]
    """Of a run; or a file of plans."""

    output: Path | None = None
    """The page; FOLDER/report.html unless given, of a file beside it."""


def run(given: Given) -> int:
    """Write the report of a folder and say where it is; returns 0."""
    console().print(f"report: {write_page(given.folder, given.output)}")
    return 0


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a folder or a file; return its path. Raises what `read_report` does."""
    path = output or (folder.with_suffix(".html") if folder.is_file() else folder / "report.html")
    page = render_report(read_report(folder))
    with writing(path):
        replace_text(path, page)
    return path


def read_report(folder: Path) -> Report:
    """Read what a run of any program, or ``plan``, has left; a damaged file: `ConfigError`."""
    if folder.is_file():
        return Report(folder.stem, found=read_frontier(folder))
    main = main_folder(folder)
    found = read_frontier(main) if (main / NAME).exists() else None
    path, facts_path = folder / run_report.CONFIG_NAME, main / run_report.FACTS_NAME
    facts = read_model(run_report.RunFacts, facts_path) if facts_path.exists() else None
    offloaded, plain, comparison = RunReport(read_steps(main)), RunReport(), None
    ranks = offloaded.peaks()
    if facts and facts.step and not ranks:
        held = facts.model_dump(include={"pinned_host_bytes", "peak_reserved_bytes"})
        step = RankStep(0, 0, 0, None, 0.0, 0.0, **held, **counters_of(facts.step))
        ranks = [asdict(step)]
    if not (offloaded.steps if main != folder else ranks or found):
        raise ConfigError(f"{main} holds no whole step of a run, and no plans; give another folder")
    if main != folder:
        comparison = read_model(Comparison, folder / COMPARISON_NAME)
        num_steps, before = len(offloaded.steps), read_steps(folder / FOLDERS[0])
        if len(before) < num_steps:
            raise ConfigError(f"{folder / FOLDERS[0]} ends at step {len(before)} of {num_steps}")
        if len(before[0].ranks) != len(ranks):
            raise ConfigError(f"{folder / FOLDERS[0]} has other ranks than {main}")
        plain = RunReport(before[:num_steps])
    kind = TrainConfig if offloaded.steps else OffloadConfig
    config = validate(kind, load_yaml(path), str(path)) if path.exists() else None
    traced_step = config.traced_step if isinstance(config, TrainConfig) else 0
    times = Pair(*(run.median_step_time_s(without=traced_step) for run in (plain, offloaded)))
    return Report(
        title=folder.resolve().name,
        facts=facts,
        num_steps=len(offloaded.steps),
        memory=memory_kinds(plain.peaks(), ranks),
        ranks=ranks,
        step_time_s=times,
        config=read_text(path).rstrip() if config else None,
        findings=comparison.findings if comparison else None,
        traces=run_report.read_timelines(main),
        found=found,
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
