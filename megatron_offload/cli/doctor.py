"""The command ``megatron-offload doctor``: what is wrong with this machine for offload.

Owns its flags, tables and JSON. Must not know how anything is found out.

Invariants: the exit status is 1 exactly where a finding is an error; text from outside stays a
string. Read next: `megatron_offload.machine.examine`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from megatron_offload.cli.output import check_place, writing
from megatron_offload.files.text import replace_text
from megatron_offload.machine.examine import Examination, examine
from megatron_offload.machine.finding import Finding
from megatron_offload.machine.host_syncs import HostSyncs
from megatron_offload.machine.profile import MachineProfile
from megatron_offload.report.console import console, plain_table

__all__ = [
    "ABOUT",
    "add_arguments",
    "as_json",
    "findings_table",
    "rates_table",
    "run",
    "sync_table",
]

ABOUT = """\
Say what is wrong with this machine for offload, and measure how fast its GPUs copy.

reads    this machine: GPUs, links, memory nodes, limits, environment, versions; needs no root
prints   what was looked at, what was found, and what to do
writes   what was measured to the user's cache folder; --output: all of it as JSON, which
         'megatron-offload plan --machine FILE' reads

exit status: 0 offload can work here, 1 an error was found, 2 bad input

example: megatron-offload doctor --output doctor.json
"""

_FORMAT = 1
_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument(
        "--no-bandwidth",
        action="store_true",
        help="don't measure; show what was measured here before",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the JSON here as well")


def run(options: argparse.Namespace) -> int:
    """Look at the machine and print what was found; return the exit status.

    Raises:
        ConfigError: ``--output`` can't be written; nothing was measured.
    """
    output: Path | None = options.output
    check_place("--output", output)
    examination = examine(bandwidth=not options.no_bandwidth)
    text = json.dumps(as_json(examination), indent=1) + "\n"
    if options.json:
        sys.stdout.write(text)
    else:
        _print(examination)
    if output is not None:
        with writing(output):
            replace_text(output, text)
    return int(any(finding.level == "error" for finding in examination.findings))


def as_json(examination: Examination) -> dict[str, Any]:
    """Return all that was found as plain data; bandwidths in 10^9 bytes a second."""
    profile = examination.profile
    return {
        "format": _FORMAT,
        "findings": [dataclasses.asdict(finding) for finding in examination.findings],
        "profile": profile.model_dump(mode="json") if profile is not None else None,
    }


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return one line for each finding, in their order."""
    table = plain_table("This machine", ["", "looked at", "found", "what to do"], 4)
    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, finding.title, finding.found, finding.advice)
    return table


def rates_table(profile: MachineProfile) -> Table:
    """Return one line for each GPU: what its copies reach alone, both ways, and among all."""
    when = f"{profile.measured_at:%Y-%m-%d %H:%M} UTC"
    columns = ["GPU", "D2H alone", "H2D alone", "D2H, both", "H2D, both", "D2H, all", "H2D, all"]
    table = plain_table(f"Copies, GB/s (10^9 bytes), measured {when}", columns)
    for index, gpu in enumerate(profile.gpus):
        rates = gpu.rates.model_dump().values()
        table.add_row(str(index), *(f"{rate:.1f}" for rate in rates))
    return table


def sync_table(syncs: HostSyncs) -> Table:
    """Return one line for each place where the host waits, most often first."""
    columns = ["place", "call", "kind", "times a step"]
    table = plain_table("Where the host waits for the device", columns, 3)
    for sync, per_step in syncs.per_step():
        place = f"{sync.file}:{sync.line}" if sync.file else "no Python code"
        table.add_row(place, sync.call, sync.kind, f"{per_step:g}")
    return table


def _print(examination: Examination) -> None:
    out = console()
    if examination.profile is not None:
        out.print(rates_table(examination.profile))
    out.print(findings_table(examination.findings))
