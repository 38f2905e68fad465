"""The command ``simulate``: it prints what simulating says, and draws the step with offload."""

from __future__ import annotations

import json
import re

import pytest
from jobs import ROOT, SMALL, described, ran, run_without

from megatron_offload.commands.source import load_model, load_run
from megatron_offload.planning.description import load_description
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.simulate import simulate
from megatron_offload.reporting.trace import read_traces
from megatron_offload.train.cli import main
from megatron_offload.units import format_bytes

pytest.importorskip("simpy")

pytestmark = pytest.mark.usefixtures("wide")


def run(*words):
    return main(["simulate", *map(str, words)])


def rows(printed):
    """Return the cells of all rows, tables one after the other."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0].isdigit()]


def test_what_is_printed_is_what_was_simulated(model, capsys):
    assert run("--model", model, "--set", "offload.max_inflight_bytes=8MiB") == 0
    printed = capsys.readouterr().out
    job = load_model(model).job
    without = simulate(job)
    offloaded = simulate(job, RankSettings(max_inflight_bytes=8 * 2**20))
    assert offloaded.step_us > without.step_us
    assert f"{without.step_us / 1e3:.1f} ms without offload" in printed
    assert f"{offloaded.step_us / 1e3:.1f} ms with it" in printed
    times, memory = rows(printed)[:2], rows(printed)[2:]
    for index, (plain, rank) in enumerate(zip(without.ranks, offloaded.ranks, strict=True)):
        stalls_us = [rank.stall_us[cause] for cause in ("pipeline", "W2", "W4")]
        numbers = [plain.end_us, rank.end_us, rank.compute_us, *stalls_us]
        assert times[index] == [str(index), *(f"{us / 1e3:.1f}" for us in numbers)]
        sizes = [plain.peak_reserved_bytes, rank.peak_reserved_bytes, rank.peak_host_bytes]
        sizes += [rank.offloaded_bytes, rank.reloaded_bytes]
        assert memory[index] == [str(index), *map(format_bytes, sizes), str(rank.num_late)]
    assert "predicted by simulation, not measured" in printed


def test_a_plan_is_followed(model, tmp_path, capsys):
    pytest.importorskip("highspy")
    plan = tmp_path / "plan.json"
    words = ["--ratio", "0", "--curve", "0", "--output", str(plan)]
    assert main(["plan", "--model", str(model), *words]) == 0
    capsys.readouterr()
    assert run("--model", model, "--plan", plan) == 0
    printed = capsys.readouterr().out
    assert "(+0.00 %)" in printed
    assert all(row[4] == "0 B" for row in rows(printed)[2:])
    assert run("--model", model, "--plan", plan, "--set", "model.num_microbatches=8") == 2
    assert "it is for 4 microbatches, and there are 8" in capsys.readouterr().err


def test_budgets_win_over_a_plan_s(model, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    words = ["--ratio", "1", "--curve", "0", "--output", str(plan)]
    assert main(["plan", "--model", str(model), *words]) == 0
    capsys.readouterr()
    peaks = []
    for words in ((), ("--set", "offload.max_inflight_bytes=8MiB", "offload.prefetch_bytes=16MiB")):
        assert run("--model", model, "--plan", plan, *words) == 0
        peaks.append(rows(capsys.readouterr().out)[2][2])
    assert peaks[0] != peaks[1]


def test_the_timeline_is_that_of_the_step_with_offload(model, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "trace.json", tmp_path / "step.png"
    assert run("--model", model, "--trace", trace, "--png", picture) == 0
    printed = capsys.readouterr().out
    assert f"picture: {picture}, 2 of 2 ranks" in printed
    expected = simulate(load_model(model).job, RankSettings(), record=True)
    for found, rank in zip(read_traces(trace), expected.ranks, strict=True):
        assert found.summary().num_bytes["d2h"] == rank.offloaded_bytes > 0
        assert found.summary() == rank.trace.summary()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_is_simulated_from_its_profiles(tmp_path, capsys):
    folder = ran(tmp_path / "run")
    before = sorted(folder.iterdir())
    assert run(folder) == 0
    step_us = simulate(load_run(folder).job).step_us
    assert f"{step_us / 1e3:.1f} ms without offload" in capsys.readouterr().out
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "give either a run's folder or --model"),
        (("--model", "MODEL", "--plan", "/nowhere.json"), "can't read /nowhere.json"),
        (("--model", "MODEL", "--plan", "BROKEN"), "not plain JSON"),
        (("--model", "MODEL", "--plan", "KEYS"), "did you mean 'policy'"),
        (("--model", "MODEL", "--trace", "/nowhere/x.json"), "--trace /nowhere/x.json"),
        (("--model", "MODEL", "--png", "/nowhere/x.png"), "--png /nowhere/x.png"),
        (("--model", "MODEL", "--trace", "/proc/x.json"), "can't write /proc/x.json"),
        (("--model", "MODEL", "--set", "model.pipeline_parallel=3"), "divide into 3 stages"),
        (("--model", "MODEL", "--set", "machine.node_gbps=0"), "machine.node_gbps"),
        (("--model", "MODEL", "--set", "offload.host_slab_bytes=0"), "offload.host_slab_bytes"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, model, capsys, words, expected):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "keys.json").write_text('{"policyy": 1}')
    places = {
        "MODEL": model,
        "BROKEN": tmp_path / "broken.json",
        "KEYS": tmp_path / "keys.json",
    }
    assert run(*(places.get(word, word) for word in words)) == 2
    assert re.search(expected, capsys.readouterr().err)


def test_simulating_needs_no_torch(model, tmp_path):
    words = ["simulate", "--model", model, "--trace", tmp_path / "t.json"]
    status, printed, _ = run_without(words, "torch", "highspy")
    assert status == 0
    assert printed.endswith("imported:\n")


@pytest.mark.parametrize(("absent", "extra"), [("simpy", "plan"), ("matplotlib.figure", "plots")])
def test_a_missing_extra_is_named(model, tmp_path, absent, extra):
    words = ["simulate", "--model", model, "--png", tmp_path / "x.png"]
    status, _, error = run_without(words, absent)
    assert status == 2
    assert f"install megatron-offload[{extra}]" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "models").glob("*.yaml")), ids=str)
def test_the_descriptions_that_come_along_are_jobs(path, capsys):
    described_job = load_description(path)
    assert described_job.job().schedule.num_ranks == described_job.model.pipeline_parallel


def test_the_benchmark_job_takes_the_step_that_was_measured():
    raw = json.loads((ROOT / "docs/benchmarks/simulation.json").read_text())
    measured_ms = raw["rows"][0]["step_ms"]["measured"][0]
    source = load_model(ROOT / "configs/models/gpt_16x8192_pp4_vpp2.yaml")
    assert simulate(source.job).step_us / 1e3 == pytest.approx(measured_ms, rel=1e-3)


def test_a_text_of_the_user_is_no_markup(tmp_path, capsys):
    path = described(tmp_path, SMALL).rename(tmp_path / "[bold]x.yaml")
    assert run("--model", path) == 0
    assert "[bold]x" in capsys.readouterr().out
