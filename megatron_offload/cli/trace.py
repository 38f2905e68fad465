"""Put the timelines of a run's ranks into one file for https://ui.perfetto.dev.

reads    trace_<rank>.json in FOLDER, of a comparison in that of its run with offload; a run leaves
         them with run.trace_step, a Megatron job with --offload-report FOLDER, any other program
         with trace_step() (docs/report.md)
prints   where the file is, and which ranks' timelines are missing
writes   FOLDER/trace.json; 'megatron-offload report' draws the timelines of the trainer's runs

exit status: 0 written, 2 bad input

example: megatron-offload trace runs/quickstart
"""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import CliPositionalArg

from megatron_offload.cli.options import Options, writing
from megatron_offload.core.trace import write_traces
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import read_model
from megatron_offload.observe.run_report import FACTS_NAME, RunFacts, read_timelines
from megatron_offload.report.console import console
from megatron_offload.train.run_folder import main_folder


class Given(Options):
    """The options of ``trace``."""

    folder: CliPositionalArg[Path]
    """Where the timelines are."""


def run(given: Given) -> int:
    """Write ``trace.json``; return 0."""
    folder = main_folder(given.folder)
    traces, facts = read_timelines(folder), folder / FACTS_NAME
    if not traces:
        raise ConfigError(
            f"{given.folder} holds no timelines; train anew with run.trace_step: 4, a Megatron job "
            "with --offload-report FOLDER, or any other program with trace_step() (docs/report.md)"
        )
    num_ranks = read_model(RunFacts, facts).ranks if facts.exists() else 0
    with writing(path := given.folder / "trace.json"):
        write_traces(path, traces)
    console().print(f"trace: {path}, for https://ui.perfetto.dev")
    ranks = [one.rank for one in traces]
    lacking = (rank for rank in range(max(num_ranks, ranks[-1] + 1)) if rank not in ranks)
    if missing := [f"trace_{rank}.json" for rank in lacking]:
        console().print(f"missing in {folder}: {', '.join(missing)}", style="yellow")
    return 0
