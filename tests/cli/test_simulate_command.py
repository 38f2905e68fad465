"""The command ``simulate``: it prints what simulating says, and draws the step with offload."""

from __future__ import annotations

import json
import re

import pytest
from jobs import load_model

from megatron_offload.cli.main import main
from megatron_offload.core.trace import read_traces
from megatron_offload.core.units import format_bytes
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.job_rows import units_of, with_units
from megatron_offload.planning.simulate import simulate

pytest.importorskip("simpy")


def rows(printed):
    """Return the cells of all rows, tables one after the other."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0].isdigit()]


def test_what_is_printed_is_what_was_simulated(model, prints):
    keys = ("model.host_us_per_launch=200", "model.host_us_per_group=200")
    printed = prints("simulate", model, "--set", "offload.max_inflight_bytes=8MiB", *keys)
    job = load_model(model, set=keys).job
    without = simulate(job)
    settings = RankSettings(max_inflight_bytes=8 * 2**20)
    rerun = with_units(job, units_of(job))
    offloaded = simulate(rerun, settings)
    assert offloaded.step_us > without.step_us
    assert f"{without.step_us / 1e3:.1f} ms without offload" in printed
    assert f"{offloaded.step_us / 1e3:.1f} ms with offload" in printed
    times, memory = rows(printed)[:2], rows(printed)[2:]
    for index, (plain, rank) in enumerate(zip(without.ranks, offloaded.ranks, strict=True)):
        stalls_us = [rank.stall_us[cause] for cause in ("pipeline", "W2", "W4")]
        slowness = rerun.stages[index].slowness(has_engine=True)
        work_us = rank.compute_us / slowness
        host_us = rank.compute_us - work_us
        numbers = [plain.end_us, rank.end_us, work_us, rank.recompute_us, host_us, *stalls_us]
        assert host_us > 0
        assert times[index] == [str(index), *(f"{us / 1e3:.1f}" for us in numbers)]
        sizes = [plain.peak_reserved_bytes, rank.peak_reserved_bytes, rank.peak_host_bytes]
        sizes += [rank.offloaded_bytes, rank.recomputed_bytes]
        assert memory[index] == [str(index), *map(format_bytes, sizes), str(rank.num_late)]
    assert "predicted by simulation, not measured" in printed
    model = model.rename(model.with_name("[bold]x.yaml"))
    assert "[bold]x" in prints("simulate", model), "no markup"


def test_what_is_recomputed_and_where_is_said_by_keys(model):
    known = ("norm", "mlp_act")
    assert load_model(model).described.offload.recomputable(known) == known, "all that can be"
    settings = load_model(model, set=["offload.recompute=[norm, loss]"]).described.offload
    assert settings.recomputable(known) == ("norm", "loss")
    # Likewise a GPU and a host, which else are those of an H200.
    machine = load_model(model).job.machine
    assert (machine.device_bytes, machine.host_bytes) == (139 << 30, 2 << 40)
    given = load_model(model, set=["machine.device_bytes=80GiB"]).job.machine
    assert (given.device_bytes, given.host_bytes) == (80 << 30, 2 << 40)


def test_the_timeline_is_that_of_the_step_with_offload(model, tmp_path, prints):
    trace = tmp_path / "trace.json"
    assert f"trace: {trace}" in prints("simulate", model, "--trace", trace)
    job = load_model(model).job
    expected = simulate(with_units(job, units_of(job)), RankSettings(), record=True)
    for found, rank in zip(read_traces(trace), expected.ranks, strict=True):
        assert found.num_bytes["d2h"] == rank.offloaded_bytes > 0
        assert found.facts() == rank.trace.facts()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "give one described job, NAME, a FILE"),
        (("/",), "what a run has found is shown by: megatron-offload plan --from RUN"),
        (("MODEL", "--set", "offload.recompute=[nrm]"), "no kind 'nrm'; did you mean"),
        (("MODEL", "--trace", "/"), "--trace: '/' is a folder; name a file"),
        (("MODEL", "--machine", "TRAINER"), "trainer.yaml"),
        (("MODEL", "--trace", "/proc/x.json"), "can't write /proc/x.json"),
        (("MODEL", "--set", "model.pipeline_parallel=3"), "divide into 3 stages"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, model, refused, words, expected):
    (tmp_path / "trainer.yaml").write_text("model: {}\nparallel: {}\nrun: {}\noffload: {}")
    places = {"MODEL": model, "TRAINER": tmp_path / "trainer.yaml"}
    assert re.search(expected, refused("simulate", *(places.get(word, word) for word in words)))


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_what_fits_neither_gpu_nor_host_is_said_first_and_is_status_1(model, capsys, command):
    words = ["--most-slowdown-percent", "1000"] if command == "plan" else []
    given = [command, str(model), *words, "--set"]
    assert main([*given, "machine.device_bytes=8MiB", "machine.host_bytes=4MiB"]) == 1
    lines = capsys.readouterr().out.splitlines()
    what = "offload" if command == "simulate" else "the rows"
    device, host, *_ = (line.removeprefix(f"does not fit with {what}: ") for line in lines)
    assert re.fullmatch(
        r"\d+\.\d MiB of a GPU, which has 8\.0 MiB \(machine.device_bytes\)", device
    )
    said = re.fullmatch(r"\S+ MiB of a node of 2 GPUs, which has 4\.0 MiB \(machine.host.*", host)
    assert bool(said) == (command == "simulate"), "plans keep to what the host has"
    assert main([*given, "machine.device_bytes=1GiB"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"fits without offload: \S+ MiB reserved of 1.0 GiB \(machine.device_bytes\), "
        rf"\S+ MiB with {what} at \S+ % of the step's time",
        first,
    )


@pytest.mark.parametrize("keys", [(), ("offload.recompute=[]",)])
def test_what_is_simulated_is_called_as_in_the_table_of_plan(keys, model, prints):
    words = (model, "--json", *(("--set", *keys) if keys else ()))
    found = json.loads(prints("simulate", *words))
    printed = prints("simulate", model, *words[2:])
    what = re.search(r"with offload: (.*?)(;|$)", printed.splitlines()[-1])[1]
    others = {one["what"]: one for one in json.loads(prints("plan", *words))["alternatives"]}
    for key in ("reserved_bytes", "node_host_bytes", "takes_longer_percent"):
        assert found[key] == others[what][key]
