"""What is equal is called equal, and a lost bit is not."""

import json
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from training_runs import be_the_rank, numbers, run, steps_of, words
from traps import lose_a_bit

from megatron_offload.cli import compare as compare_command
from megatron_offload.cli import main as cli
from megatron_offload.planning.found import read_frontier

ONE_RANK = ("parallel.pipeline=1", "parallel.virtual=1", "run.steps=3")


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """Compare a tiny run of one rank in this process; gives the status and what the file says."""
    be_the_rank(monkeypatch)

    def compare(*settings):
        status = cli.main(["compare", *words(tmp_path, *ONE_RANK, *settings)[1:]])
        return status, json.loads((tmp_path / "compare.json").read_text())["findings"]

    return compare


@pytest.mark.parametrize(
    ("num_bytes", "ends"),
    [
        (1, "steps without offload and with it."),
        (0, ", but nothing was offloaded or recomputed in the last step."),
    ],
)
def test_what_a_comparison_shows_is_nothing_where_nothing_was_offloaded(num_bytes, ends):
    rank = SimpleNamespace(offloaded_bytes=num_bytes, recomputed_bytes=0)
    facts = [SimpleNamespace(by_rank=(rank,), is_simulated=True, step_time_s=1.0)] * 2
    config = SimpleNamespace(run=SimpleNamespace(steps=2))
    with mock.patch.object(compare_command, "Report", return_value=SimpleNamespace(memory=[])):
        shown, *_ = compare_command._summary(config, facts, SimpleNamespace(is_identical=True))
    assert shown.startswith("Shown: the same bits come out")
    assert shown.endswith(ends)


def test_compare_finds_every_step_equal_and_memory_lower(compared):
    folder, out = compared
    *_, identical, _, _, shown, memory, following = out.splitlines()
    assert identical == "bitwise identical: yes"
    assert shown == "Shown: the same bits come out of 4 training steps without offload and with it."
    assert memory.startswith("Memory: ")
    assert memory.endswith("The device is simulated, so speed is not judged.")
    assert following.startswith("Next: ")
    assert not re.search(r"\d ms|tokens/s|%", out)
    without, offloaded = (steps_of(folder / f"{x}_offload") for x in ("without", "with"))
    for a, b in zip(without, offloaded, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
        assert [x["gradients"] for x in a["ranks"]] == [x["gradients"] for x in b["ranks"]]
        for plain, moved in zip(a["ranks"], b["ranks"], strict=True):
            assert plain["offloaded_bytes"] == 0 < moved["offloaded_bytes"]
            assert moved["peak_live_activation_bytes"] < plain["peak_live_activation_bytes"]
    assert without[-1]["ranks"][0]["gradients"]
    assert all(json.loads((folder / "compare.json").read_text())["findings"].values())


def test_a_lost_bit_in_a_reload_makes_compare_say_no(compare, monkeypatch, tmp_path, capfd):
    lose_a_bit(monkeypatch)
    status, findings = compare("offload.simulated.copy_timing=eager")
    assert status == 1
    assert not any(findings.values())
    numbers = [steps_of(tmp_path / f"{x}_offload")[0]["loss"] for x in ("without", "with")]
    assert numbers[0] == numbers[1], "the first forward had nothing to reload"
    said = capfd.readouterr().err
    assert said.count("step 2/3 ") == 1, "each step once"
    assert f"DIFFERENT: without, loss {steps_of(tmp_path / 'without_offload')[1]['loss']!r}" in said
    assert not re.search(r"\d ms|tokens/s|%", said), "its speed means nothing"


def test_measuring_and_the_page_can_be_left_out(compare, monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    status, findings = compare("run.measure_live_bytes=false")
    out, err = capfd.readouterr()
    assert err.count("  the same bits as without") == 3
    assert re.search(r"^report: left out: .* pip install jinja2$", out, re.MULTILINE)
    assert status == 0
    assert all(findings.values())
    (rank,) = steps_of(tmp_path / "with_offload")[-1]["ranks"]
    assert rank["peak_live_activation_bytes"] is None


LONG = "run.steps=100"
"""Enough for one plan."""


@pytest.mark.slow
def test_all_ranks_follow_the_rows_that_were_found_and_bits_are_identical(tmp_path):
    plain, output = tmp_path / "plain", tmp_path / "planned"
    assert run(words(plain, LONG))[0] == 0
    assert not (plain / "frontier.json").exists()
    policy = "offload.policy={kind: auto, most_slowdown_percent: 1000, measured_plans: 1}"
    status, errors = run(words(output, LONG, "offload.enabled=true", policy))
    assert status == 0, errors
    assert numbers(output) == numbers(plain)
    found = read_frontier(output)
    assert len(found.stages) == 2
    assert all(stage.followed for stage in found.stages)
    assert errors.count(found.followed) == 1, "it is said once"
    steps = steps_of(output)
    planned = [step["ranks"][0]["is_planned_by"] for step in steps]
    assert planned == sorted(planned, reverse=True)
    assert 11 < sum(planned) < 99
    usual = [rank for step in steps[sum(planned) :] for rank in step["ranks"]]
    assert min(rank["offloaded_bytes"] + rank["recomputed_bytes"] for rank in usual) > 0
