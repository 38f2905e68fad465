"""What the command prints, writes and returns."""

from __future__ import annotations

import errno
import io
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from megatron_offload.cli import doctor
from megatron_offload.cli.main import read_command
from megatron_offload.machine.examine import Examination, Finding
from megatron_offload.machine.profile import CopyRates, MachineProfile

FINE = Finding("ok", "swap", "0.0 GiB in use")
MARKUP = Finding("warning", "[red]title[/red]", "found [bold]'\\x1b'", "[/nonsense] do it")
RATES = CopyRates(
    **dict(zip(CopyRates.model_fields, (55.12, 54.0, 51.0, 50.0, 25.6, 25.5), strict=True))
)
PROFILE = MachineProfile(measured_at=datetime(2026, 11, 21, 12, 30, tzinfo=UTC), gpus=(RATES,))


def options_of(*words):
    return read_command(["doctor", *words])[1]


@pytest.fixture
def machine(monkeypatch):
    machine = SimpleNamespace(
        examination=Examination(findings=(FINE, MARKUP), profile=PROFILE), asked=[]
    )

    def examine(*, bandwidth):
        machine.asked.append(bandwidth)
        return machine.examination

    monkeypatch.setattr(doctor, "examine", examine)
    return machine


def test_a_table_shows_every_finding(machine, capsys):
    assert doctor.run(options_of()) == 0
    shown = capsys.readouterr().out
    for finding in (FINE, MARKUP):
        assert all(text in shown for text in (finding.title, finding.found, finding.advice))
    long = (Finding("note", "title", "words " * 90),)
    machine.examination = Examination(findings=long, profile=None)
    assert doctor.run(options_of("--no-bandwidth")) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) == 100
    assert machine.asked == [True, False]


@pytest.mark.parametrize(
    ("levels", "status"), [(["ok", "note", "warning"], 0), (["ok", "error"], 1), ([], 0)]
)
def test_the_status_is_1_for_an_error_alone(machine, levels, status):
    findings = tuple(Finding(level, "title", "found") for level in levels)
    machine.examination = Examination(findings=findings, profile=None)
    assert doctor.run(options_of()) == status


def test_a_full_disk_behind_what_is_printed_is_one_line(machine, monkeypatch, refused):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert refused("doctor").endswith("No space left on device\n")


def test_json_holds_all_that_was_found(machine, tmp_path):
    output = tmp_path / "new" / "doctor.json"
    assert doctor.run(options_of("--output", str(output))) == 0
    data = json.loads(output.read_text())
    assert data["format"] == 1
    assert data["findings"] == [asdict(FINE), asdict(MARKUP)]
    assert MachineProfile.model_validate(data["profile"]) == PROFILE
    machine.examination = Examination(findings=(FINE,), profile=None)
    doctor.run(options_of("--output", str(output)))
    assert json.loads(output.read_text())["profile"] is None
