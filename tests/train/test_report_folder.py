"""What a report makes of a run's folder: what is missing, what was measured, what is a plan."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from megatron_offload.cli import report
from megatron_offload.cli.main import main
from megatron_offload.cli.train import found_in
from megatron_offload.core.trace import Span, StepTrace, read_traces, write_traces
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import write_model
from megatron_offload.planning.found import RunFrontier
from megatron_offload.train.records import RankStep, StepRecord
from megatron_offload.train.run_folder import RunFacts

pytest.importorskip("jinja2")

MIB = 2**20


def step(number, peak_bytes, **more):
    ranks = [
        RankStep(rank, rank, 0, 1.0, 1.0, 0.5, peak_live_activation_bytes=peak_bytes, **more)
        for rank in range(2)
    ]
    return StepRecord(number, 1.0, 1.0, 0.5, 64, tuple(ranks))


def write_run(folder, config="", *, facts=True):
    """Write what a run of four steps on a CPU leaves whose third looked for rows."""
    folder.mkdir(parents=True)
    steps = [
        step(1, 8 * MIB),
        step(2, 9 * MIB),
        step(3, 38 * MIB, is_planned_by=True),
        step(4, 9 * MIB),
    ]
    (folder / "steps.jsonl").write_text("".join(one.to_json() + "\n" for one in steps))
    if config:
        (folder / "config.yaml").write_text(config)
    if facts:
        found = RunFacts(
            device="simulated on 2 CPU cores",
            is_simulated=True,
            ranks=2,
            date=datetime(2026, 11, 22, tzinfo=UTC),
            versions={"torch": "2.13"},
        )
        (folder / "run.json").write_text(found.model_dump_json())
    return folder


def test_configuration_and_facts_that_are_missing_are_gaps_that_the_page_names(tmp_path):
    folder = write_run(tmp_path / "run", facts=False)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "The folder holds no <code>config.yaml</code>" in page
    assert "The folder holds no <code>run.json</code>" in page
    assert "device not known" in page
    assert "not judged" in page, "nothing was reserved, so there was no GPU"
    assert "megatron-offload train" not in page


def test_damaged_ones_are_errors(tmp_path, capsys, refused):
    folder = write_run(tmp_path / "run", "modell: {}")
    assert "did you mean 'model'" in refused("report", folder)
    (folder / "config.yaml").unlink()
    (folder / "run.json").write_text("[]")
    refused("report", folder)
    (folder / "run.json").unlink()
    for number in ("1e999", "1e99"):  # which no chart can show
        plan = f'{{"rows": [], "freed_bytes": 0, "predicted_percent": {number}}}'
        stage = f'{{"name": "0", "bare_bytes": 1, "plans": [{plan}], "followed": 0}}'
        (folder / "frontier.json").write_text(f'{{"said": "", "stages": [{stage}]}}')
        assert main(["report", str(folder)]) == 2
        assert "_percent" in capsys.readouterr().err


def test_the_page_s_folder_is_made(tmp_path):
    folder = write_run(tmp_path / "run")
    page = tmp_path / "pages" / "of" / "mine" / "run.html"
    assert main(["report", str(folder), "--output", str(page)]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ConfigError, match="can't write"):
        report.write_page(folder, Path("/proc/none/page.html"))
    assert main(["report", str(folder), "--output", str(tmp_path)]) == 2


def test_steps_that_look_for_rows_are_said_to_be_left_out_of_peaks(tmp_path):
    folder = write_run(tmp_path / "run")
    found = report.read_report(folder)
    assert found.memory[0].highest.offloaded == 9 * MIB
    page = report.write_page(folder).read_text()
    assert "over its usual steps. Steps in which rows" in page


def test_rows_that_the_run_has_found_are_on_the_page_and_said(tmp_path):
    run, plan = write_run(tmp_path / "run"), {"freed_bytes": 0, "predicted_percent": 0}
    row = {"layers": "0-1", "site": "mlp", "recompute": True}
    plans = ({"rows": ()} | plan, {"rows": (row,)} | plan)
    stage = {"name": "0", "bare_bytes": 0, "plans": plans}
    for followed, text in ((1, "rows: [{layers: 0-1, site: mlp, recompute: true}]"), (0, "why")):
        found = RunFrontier(said="why", stages=({**stage, "followed": followed},))
        write_model(run / "frontier.json", found)
        assert f">{text}</pre>" in report.write_page(run).read_text()
        rows, plans = found_in(run)
        assert rows == text
    assert f"plan --from {run}'" in plans
    assert not [*found_in(tmp_path)]


def traced(folder, *ranks):
    folder.mkdir()
    for rank in ranks:
        spans = [Span("compute", "forward", "a", 0, 900), Span("d2h", "d2h", "a", 200, 500, 1000)]
        write_traces(folder / f"trace_{rank}.json", [StepTrace(rank, spans)])
    return folder


def test_timelines_of_all_ranks_are_put_into_one_file(tmp_path, prints):
    folder = traced(tmp_path / "run", 0, 1)
    assert f"trace: {folder / 'trace.json'}" in prints("trace", folder)
    own = [one for rank in (0, 1) for one in read_traces(folder / f"trace_{rank}.json")]
    assert read_traces(folder / "trace.json") == own


def test_a_folder_without_timelines_says_how_to_get_some(tmp_path, refused):
    error = refused("trace", traced(tmp_path / "run"))
    assert "holds no timelines; set run.trace_step" in error


def test_timelines_of_ranks_that_left_none_are_named(tmp_path, prints):
    folder = write_run(tmp_path / "run")
    for rank, others in ((0, "trace_1.json"), (1, "trace_0.json")):
        write_traces(folder / f"trace_{rank}.json", [StepTrace(rank, [])])
        assert f"missing in {folder}: {others}\n" in prints("trace", folder)
        (folder / f"trace_{rank}.json").unlink()
    assert "job: trace_1.json\n" in prints("trace", traced(tmp_path / "job", 0, 2))
    assert "missing" not in prints("trace", traced(tmp_path / "whole", 0, 1))
