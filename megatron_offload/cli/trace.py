"""Put the timelines of a run's ranks into one file for https://ui.perfetto.dev.

reads    trace_<rank>.json in run.output, of a comparison in that of its run with offload; a run
         leaves them with run.trace_step
prints   where the file is
writes   FOLDER/trace.json; 'megatron-offload report' draws the timelines

exit status: 0 written, 2 bad input

example: megatron-offload trace runs/quickstart
"""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import CliPositionalArg

from megatron_offload.cli.options import Options
from megatron_offload.cli.output import write_timelines
from megatron_offload.core.trace import StepTrace, read_traces
from megatron_offload.errors import ConfigError
from megatron_offload.train.run_folder import main_folder, rank_files


class Given(Options):
    """The options of ``trace``."""

    folder: CliPositionalArg[Path]
    """run.output of a run with run.trace_step."""


def run(given: Given) -> int:
    """Write ``trace.json`` for https://ui.perfetto.dev; returns 0."""
    traces = read_run_traces(given.folder)
    if not traces:
        raise ConfigError(
            f"{given.folder} holds no timelines; set run.trace_step: 4, with offload on, and run "
            "again"
        )
    write_timelines(traces, given.folder / "trace.json")
    return 0


def read_run_traces(folder: Path) -> list[StepTrace]:
    """Return the timelines of a run, or of the run with offload in a comparison, by rank."""
    traces: list[StepTrace] = []
    for path in rank_files(main_folder(folder), "trace"):
        found = read_traces(path)
        if [path.name] != [f"trace_{trace.rank}.json" for trace in found]:
            ranks = ", ".join(str(trace.rank) for trace in found) or "none"
            raise ConfigError(f"{path} is of rank {ranks}; put the file back or run again")
        traces += found
    return traces
