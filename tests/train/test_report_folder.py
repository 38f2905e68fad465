"""What a report makes of a run's folder: what is missing, what was measured, what is a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_offload.cli import report
from megatron_offload.cli.main import main
from megatron_offload.cli.train import found_in
from megatron_offload.core.trace import Span, StepTrace, read_traces, write_traces
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import write_model
from megatron_offload.observe.run_report import RankSummary, RunFacts
from megatron_offload.planning.found import RunFrontier

pytest.importorskip("jinja2")

MIB = 2**20


def facts(num_ranks=2, **changes):
    """Return what a run of four steps on a CPU comes to, as JSON."""
    ranks = [
        RankSummary(rank=rank, pp_rank=rank, peak_live_activation_bytes=9 * MIB)
        for rank in range(num_ranks)
    ]
    found = {"device": "simulated on 2 CPU cores", "is_simulated": True, "ranks": 2, "num_steps": 4}
    found |= {"date": "2026-11-22T00:00:00Z", "versions": {"torch": "2.13"}, "by_rank": ranks}
    return RunFacts(**found).model_copy(update=changes).model_dump_json()


def write_run(folder):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(facts())
    return folder


def test_a_configuration_that_is_missing_is_a_gap_that_the_page_names(tmp_path):
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "The folder holds no <code>config.yaml</code>" in page
    assert "not judged" in page, "there was no GPU"
    assert "over its usual steps. Steps in which rows" in page
    found = report.read_report(folder)
    assert (found.findings, found.memory[0].highest.offloaded) == (None, 9 * MIB)
    assert "megatron-offload train" not in page


def frontier(percent):
    plan = f'{{"rows": [], "freed_bytes": 0, "predicted_percent": {percent}}}'
    stage = f'{{"name": "0", "bare_bytes": 1, "plans": [{plan}], "followed": 0}}'
    return f'{{"said": "", "stages": [{stage}]}}'


SPAN = '"pid": 0, "ph": "X", "tid": 0, "cat": "other", "args": {"bytes": 1%s}, "ts": %s, "dur": 1'
OFF, ON, TRACE, LOG = (
    "without_offload/run.json",
    "with_offload/run.json",
    "with_offload/trace_0.json",
    "without_offload/steps.jsonl",
)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("compare.json", "{}", "'findings' is required"),
        ("compare.json", "[]", "must hold a mapping"),
        (LOG, '{"step": 1}\n{"st', "is damaged: "),
        (LOG, '{"step": 1}\n', "holds other steps than the 4 of run.json"),
        ("config.yaml", "modell: {}", "did you mean 'model'"),
        (ON, '{"devicee": "x"}', "did you mean 'device'"),
        (TRACE, "{", "not plain JSON"),
        (TRACE, '{"traceEvents": [{"pid": 0}]}', "not a trace"),
        (TRACE, '{"traceEvents": []}', "the timeline of rank 0 alone"),
        (TRACE, '{"traceEvents": [{"pid": 1, "ph": "M", "args": {}}]}', "of rank 0 alone"),
        (TRACE, f'{{"traceEvents": [{{{SPAN % ("", 1e308)}}}]}}', "not a trace"),
        (TRACE, f'{{"traceEvents": [{{{SPAN % (400 * "0", 1)}}}]}}', "too large"),
        (ON, '{"by_rank": [{}]}', "'by_rank.0.rank' is required"),
        (ON, '{"by_rank": [{"rank": 0, "ran": 1}]}', "'by_rank.0.ran'; did you mean 'rank'"),
        (ON, '{"by_rank": [{"rank": 0, "groups": [{"name": 1}]}]}', "'by_rank.0.groups.0.name'"),
        (ON, '{"by_rank": []}', "'by_rank'"),
        (ON, facts(step_time_s=-1.0), "'step_time_s'"),
        (ON, None, "holds no run that has ended"),
        (OFF, None, "has other ranks than"),
        (OFF, facts(1), "has other ranks than"),
        ("with_offload/frontier.json", '{"stages": []}', "'said' is required"),
        ("with_offload/frontier.json", frontier("1e999"), "frontier.json"),
        ("with_offload/frontier.json", frontier("1e99"), "_percent': input should be less"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name_and_the_last_page_remains(
    tmp_path, capsys, name, content, expected
):
    for folder in ("without_offload", "with_offload"):
        write_run(tmp_path / folder)
    (tmp_path / "with_offload/frontier.json").write_text(frontier(0))
    (tmp_path / "compare.json").write_text('{"findings": {}}')
    (tmp_path / "report.html").write_text("last")
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert all(str(tmp_path / name.split("/")[0]) in one for one in error.splitlines())
    assert (tmp_path / "report.html").read_text() == "last"


def test_the_page_s_folder_is_made(tmp_path):
    folder = write_run(tmp_path / "run")
    page = tmp_path / "pages" / "of" / "mine" / "run.html"
    assert main(["report", str(folder), "--output", str(page)]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ConfigError, match="can't write"):
        report.write_page(folder, Path("/proc/none/page.html"))
    assert main(["report", str(folder), "--output", str(tmp_path)]) == 2


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


def test_timelines_of_ranks_that_left_none_are_named(tmp_path, prints, refused):
    folder = write_run(tmp_path / "run")
    assert "holds no timelines; train anew with run.trace_step" in refused("trace", folder)
    for rank, others in ((0, "trace_1.json"), (1, "trace_0.json")):
        write_traces(folder / f"trace_{rank}.json", [StepTrace(rank, [])])
        assert f"missing in {folder}: {others}\n" in prints("trace", folder)
        (folder / f"trace_{rank}.json").unlink()
    assert "job: trace_1.json\n" in prints("trace", traced(tmp_path / "job", 0, 2))
    assert "missing" not in prints("trace", traced(tmp_path / "whole", 0, 1))
