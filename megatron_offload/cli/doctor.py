"""Say what is wrong with this machine for offload, and measure how fast its GPUs copy.

reads    this machine: GPUs, their copies, host memory, environment, versions; needs no root
prints   what was looked at, what was found, and what to do
writes   --output: all of it as JSON, which 'megatron-offload plan --machine FILE' reads

exit status: 0 offload can work here, 1 an error was found, 2 bad input

example: megatron-offload doctor --output doctor.json
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter
from pydantic_settings import CliToggleFlag
from rich.text import Text

from megatron_offload.cli.options import Options, writing
from megatron_offload.files.text import replace_text
from megatron_offload.machine.examine import Examination, examine
from megatron_offload.report.console import console, plain_table


class Given(Options):
    """The options of ``doctor``."""

    no_bandwidth: CliToggleFlag[bool] = False
    """Don't measure."""

    output: Path | None = None
    """Write JSON here."""


def run(given: Given) -> int:
    """Look at the machine and print what was found; return the exit status."""
    examination = examine(bandwidth=not given.no_bandwidth)
    styles = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
    rows = (
        [Text(one.level, styles[one.level]), one.title, one.found, one.advice]
        for one in examination.findings
    )
    console().print(plain_table("This machine", ["", "looked at", "found", "what to do"], 4, rows))
    if given.output is not None:
        data = TypeAdapter(Examination).dump_python(examination, mode="json")
        with writing(given.output):
            replace_text(given.output, json.dumps({"format": 1, **data}, indent=1) + "\n")
    return int(any(finding.level == "error" for finding in examination.findings))
