"""A comparison ends with a plan where its runs have left profiles, and never without a page."""

from __future__ import annotations

import pytest
from commands.jobs import SMALL, ran

from megatron_offload.planning.plan import load_plan
from megatron_offload.reporting.tradeoff import read_tradeoff
from megatron_offload.train.compare import _plan

pytest.importorskip("scipy")


def test_without_profiles_there_is_no_plan(tmp_path):
    (tmp_path / "with_offload").mkdir()
    assert _plan(tmp_path) == []


def test_profiles_of_the_run_make_a_plan_and_a_curve(tmp_path):
    ran(tmp_path / "with_offload")
    path = tmp_path / "plan.json"
    assert _plan(tmp_path) == [f"plan, predicted: {path}"]
    assert load_plan(path).policy == "auto"
    assert sum(point.is_plan for point in read_tradeoff(tmp_path / "tradeoff.json").points) == 1


def test_a_plan_that_the_runs_may_have_followed_stays_and_one_of_others_does_not(tmp_path):
    path = tmp_path / "plan.json"
    ran(tmp_path / "with_offload")
    _plan(tmp_path)
    before = path.read_text()
    assert _plan(tmp_path) == [f"plan: {path} was there, and stays"]
    ran(tmp_path / "with_offload", SMALL.replace("microbatches: 4", "microbatches: 6"))
    assert _plan(tmp_path) == [f"plan, predicted: {path}"]
    assert path.read_text() != before


def test_what_is_wrong_with_profiles_is_said_in_a_line(tmp_path):
    folder = ran(tmp_path / "with_offload")
    (folder / "profile_1.json").unlink()
    (line,) = _plan(tmp_path)
    assert line.startswith("plan: left out: ")
    assert "one profile of each of 2" in line
