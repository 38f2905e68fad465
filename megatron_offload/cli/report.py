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
from megatron_offload.train.records import COMPARISON_NAME, FOLDERS, Comparison
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
    offloaded, plain, comparison = _summary_in(main), None, None
    if offloaded is None and (found is None or main != folder):
        raise ConfigError(f"{main} holds no run that has ended, and no plans; give another folder")
    if main != folder:
        comparison = read_model(Comparison, folder / COMPARISON_NAME)
        plain = _summary_in(folder / FOLDERS[0])
        if plain is None or offloaded is None or len(plain.ranks) != len(offloaded.ranks):
            raise ConfigError(f"{folder / FOLDERS[0]} has other ranks than {main}, or none")
    ranks, num_steps = (offloaded.ranks, offloaded.num_steps) if offloaded else ((), 0)
    config = TrainConfig if num_steps else OffloadConfig
    has_config = path.exists() and validate(config, load_yaml(path), str(path))
    return Report(
        title=folder.resolve().name,
        facts=facts,
        num_steps=num_steps,
        memory=memory_kinds(plain.ranks if plain else (), ranks),
        ranks=[asdict(rank) for rank in ranks],
        step_time_s=Pair(*(run.step_time_s if run else None for run in (plain, offloaded))),
        config=read_text(path).rstrip() if has_config else None,
        findings=comparison.findings if comparison else None,
        traces=run_report.read_timelines(main),
        found=found,
    )


def _summary_in(folder: Path) -> run_report.RunSummary | None:
    path = folder / run_report.SUMMARY_NAME
    return read_model(run_report.RunSummary, path) if path.exists() else None


def memory_kinds(
    without: Sequence[run_report.RankSummary], offloaded: Sequence[run_report.RankSummary]
) -> list[MemoryKind]:
    """Return each rank's peaks, of each kind of memory that was measured."""
    found = []
    for name, key in _MEMORY.items():
        after = [getattr(rank, key) for rank in offloaded]
        before = [getattr(rank, key) for rank in without] or [None] * len(after)
        if any(value is not None for value in after):
            found.append(MemoryKind(name, tuple(map(Pair, before, after))))
    return found
