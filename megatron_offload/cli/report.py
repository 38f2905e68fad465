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

from pathlib import Path

from pydantic_core import from_json
from pydantic_settings import CliPositionalArg

from megatron_offload.cli.options import Options, OutputFile, writing
from megatron_offload.config import OffloadConfig, load_yaml
from megatron_offload.errors import ConfigError, require
from megatron_offload.files.strict_model import read_model, validate
from megatron_offload.files.text import read_text, replace_text, replacing
from megatron_offload.observe import run_report
from megatron_offload.planning.found import NAME, read_frontier
from megatron_offload.report.console import console
from megatron_offload.report.report import Report, render_report
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import COMPARISON_NAME, FOLDERS, Comparison
from megatron_offload.train.run_folder import main_folder

_PICTURES = (".svg", ".png", ".pdf")


class Given(Options):
    """The options of ``report``."""

    folder: CliPositionalArg[Path]
    """Of a run; or a file of plans."""

    output: OutputFile | None = None
    """The page; FOLDER/report.html unless given, of a file beside it."""


def run(given: Given) -> int:
    """Write the report of a folder and say where it is; returns 0."""
    console().print(f"report: {write_page(given.folder, given.output)}")
    return 0


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a folder or a file; return its path. Raises what `read_report` does."""
    path = output or (folder.with_suffix(".html") if folder.is_file() else folder / "report.html")
    write_report(path, read_report(folder))
    return path


def check_picture(path: Path) -> None:
    """Raise `ConfigError` where ``plan`` can't draw into a file, before it plans."""
    if path.suffix not in (".html", *_PICTURES):
        raise ConfigError(f"--picture {path}: name a picture, .svg, .png or .pdf, or a page, .html")
    require("a picture", "jinja2", "altair", "vl_convert")


def write_report(path: Path, report: Report) -> None:
    """Write a page or, of a described job, its first picture alone, as the suffix says."""
    if path.suffix not in _PICTURES:
        page = render_report(report)
        with writing(path):
            replace_text(path, page)
        return
    if report.alternatives is None:
        raise ConfigError(f"{path}: only plans of a described job have one picture; write .html")
    check_picture(path)
    from megatron_offload.report import plots

    with writing(path), replacing(path) as aside:
        chart = plots.alternatives_chart(report.alternatives, has_names=True)
        chart.save(aside, format=path.suffix[1:])


def read_report(folder: Path) -> Report:
    """Read what a run of any program, or ``plan``, has left; a damaged file: `ConfigError`."""
    if folder.is_file():
        plans = read_frontier(folder)
        shown = plans.alternatives
        return Report(shown.title if shown else folder.stem, found=plans, alternatives=shown)
    main = main_folder(folder)
    found = read_frontier(main) if (main / NAME).exists() else None
    facts, plain, findings = _facts_in(main), None, None
    if facts is None and (found is None or main != folder):
        raise ConfigError(f"{main} holds no run that has ended, and no plans; give another folder")
    if main != folder:
        findings = read_model(Comparison, folder / COMPARISON_NAME).findings
        plain = _facts_in(folder / FOLDERS[0])
        if not plain or not facts or len(plain.by_rank) != len(facts.by_rank):
            raise ConfigError(f"{folder / FOLDERS[0]} has other ranks than {main}, or none")
    path = folder / run_report.CONFIG_NAME
    kind = TrainConfig if facts and facts.num_steps else OffloadConfig
    has_config = path.exists() and validate(kind, load_yaml(path), str(path))
    config = read_text(path).rstrip() if has_config else None
    traces = run_report.read_timelines(main)
    return Report(folder.resolve().name, facts, plain, config, findings, traces, found)


def _facts_in(folder: Path) -> run_report.RunFacts | None:
    path, log = folder / run_report.FACTS_NAME, folder / run_report.LOG_NAME
    facts = read_model(run_report.RunFacts, path) if path.exists() else None
    if facts is not None and log.is_file():
        try:
            with log.open("rb") as file:
                steps = [from_json(line)["step"] for line in file]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{log} is damaged: {error}") from error
        if steps != [*range(1, facts.num_steps + 1)]:
            raise ConfigError(f"{log} holds other steps than the {facts.num_steps} of {path.name}")
    return facts
