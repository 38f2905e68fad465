"""Say what is wrong with this machine for offload, and measure how fast its GPUs copy.

reads    this machine: GPUs, their copies, host memory, environment, versions; needs no root
prints   what was looked at, what was found, and what to do
writes   --output: all of it as JSON, which 'megatron-offload plan --machine FILE' reads

exit status: 0 offload can work here, 1 an error was found, 2 bad input

example: megatron-offload doctor --output doctor.json
"""

from __future__ import annotations

from pydantic_settings import CliToggleFlag
from rich.text import Text

from megatron_offload.cli.options import Options, OutputFile, writing
from megatron_offload.files.strict_model import write_model
from megatron_offload.machine.examine import examine
from megatron_offload.report.console import console, plain_table


class Given(Options):
    """The options of ``doctor``."""

    no_bandwidth: CliToggleFlag[bool] = False
    """Don't measure."""

    output: OutputFile | None = None
    """Write JSON here."""


def run(given: Given) -> int:
    """Look at the machine and print what was found; return the exit status."""
    examination = examine(bandwidth=not given.no_bandwidth)
    styles = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
    rows = (
        [Text(one.level, styles[one.level]), one.title, one.found, one.advice]
        for one in examination.findings
    )
    table = plain_table("This machine", ["", "looked at", "found", "what to do"], 4, rows)
    out = console()
    if not out.file.isatty():  # to whose width sentences fold
        table.width = 100
    out.print(table)
    if given.output is not None:
        with writing(given.output):
            write_model(given.output, examination)
    return int(any(finding.level == "error" for finding in examination.findings))
