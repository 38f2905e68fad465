"""A comparison ends with a plan where its runs have left profiles, and never without a page."""

from __future__ import annotations

import pytest
from cli.jobs import load_run, ran

from megatron_offload.cli.compare import _plan
from megatron_offload.core.policy_config import RatioConfig
from megatron_offload.files.strict_model import read_model
from megatron_offload.planning.files import load_plan, save_plan
from megatron_offload.planning.policy import plan_by_rule
from megatron_offload.report.tables import TradeOff

pytestmark = pytest.mark.usefixtures("few_candidates")


def test_without_profiles_there_is_no_plan(tmp_path):
    (tmp_path / "with_offload").mkdir()
    assert _plan(tmp_path) == []


def test_profiles_of_the_run_make_a_plan(tmp_path):
    ran(tmp_path / "with_offload")
    path = tmp_path / "plan.json"
    assert _plan(tmp_path) == [f"plan: {path}"]
    points = read_model(TradeOff, tmp_path / "tradeoff.json").points
    assert sum(point.kind == "plan" for point in points) == 1
    assert load_plan(path).policy == "auto"


@pytest.mark.parametrize("kind", ["auto", pytest.param("plan_file", marks=pytest.mark.slow)])
def test_the_plan_that_the_run_followed_remains_and_another_does_not(tmp_path, kind):
    folder = ran(tmp_path / "with_offload")
    path = (folder if kind == "auto" else tmp_path) / "plan.json"
    plan = plan_by_rule(RatioConfig(kind="ratio", ratio=0.5), load_run(folder).profiles)
    save_plan(plan, path)
    given = f", path: {path}" if kind == "plan_file" else ""
    (folder / "config.yaml").write_text(f"offload: {{policy: {{kind: {kind}{given}}}}}")
    assert _plan(tmp_path)[0] == f"plan: {tmp_path / 'plan.json'}"
    found = load_plan(tmp_path / "plan.json")
    assert [rank.choices for rank in found.ranks] == [rank.choices for rank in plan.ranks]
    assert found.ranks[0].predicted_step_us > 0
    (folder / "config.yaml").unlink()
    _plan(tmp_path)
    assert load_plan(tmp_path / "plan.json").policy == "auto"


def test_what_is_wrong_with_profiles_is_said_in_a_line(tmp_path):
    folder = ran(tmp_path / "with_offload")
    (folder / "profile_1.json").unlink()
    (line,) = _plan(tmp_path)
    assert line.startswith("plan: left out: ")
    assert "one profile of each of 2" in line
