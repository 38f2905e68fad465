"""What any program leaves is a page: its last step, its configuration, and nothing of others."""

from __future__ import annotations

import pytest
import torch
from programs import MOVING
from torch import nn

from megatron_offload import OffloadActivations, OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.cli.report import read_report, write_page
from megatron_offload.config import load_yaml
from megatron_offload.core.trace import StepTrace, write_traces
from megatron_offload.observe.run_report import save_report

pytest.importorskip("jinja2")


def make_context():
    """Return a context in which a step has passed."""
    context = OffloadActivations(config=MOVING)
    with context:
        loss = nn.Sequential(nn.Linear(64, 64), nn.GELU())(torch.randn(64, 64)).sum()
    loss.backward()
    return context


@pytest.fixture
def offload():
    return make_context()


def test_a_context_leaves_its_last_step_and_nothing_of_an_earlier_run(tmp_path, offload):
    for rank in (0, 3):
        write_traces(tmp_path / f"trace_{rank}.json", [StepTrace(rank)])
    (tmp_path / "frontier.json").write_text("old")
    offload.save_report(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "run.json"}
    found, page = read_report(tmp_path), write_page(tmp_path).read_text()
    (rank,) = found.facts.by_rank
    assert rank.offloaded_bytes == offload.last_step.offloaded_bytes > 0
    assert rank.pinned_host_bytes >= rank.peak_host_bytes > 0
    assert f"In the last step {offload.last_step.verdict}.<" in page
    assert OffloadConfig(**load_yaml(tmp_path / "config.yaml")) == MOVING
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace('"ranks": 1', '"ranks": 2'))
    assert "In the last step of the first of 2 ranks at most" in write_page(tmp_path).read_text()


@pytest.mark.by_default
@pytest.mark.parametrize("given", [{"prefetch_bytes": 7}, {"recompute": ["norm"]}], ids=str)
def test_settings_are_those_that_were_given_and_none_of_the_door(tmp_path, given):
    model, config = nn.Sequential(nn.LayerNorm(8)), OffloadConfig(**given)
    context = get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
    context.save_report(tmp_path)
    assert load_yaml(tmp_path / "config.yaml") == given


def test_a_context_that_has_had_no_step_leaves_none_of_an_earlier_one(tmp_path):
    for has_step in (True, False):
        context = make_context() if has_step else OffloadActivations(config=MOVING)
        context.save_report(tmp_path)
        (rank,) = read_report(tmp_path).facts.by_rank
        assert (rank.offloaded_bytes > 0) == has_step
        del context


def test_other_ranks_leave_their_timelines_alone(tmp_path, offload, monkeypatch):
    monkeypatch.setattr("megatron_offload.machine.job_ranks.num_ranks", lambda: 2)
    save_report(offload.manager, tmp_path, StepTrace(0))
    monkeypatch.setattr("megatron_offload.machine.job_ranks.rank_in", lambda: 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save_report(offload.manager, tmp_path, StepTrace(1))
    assert [one.rank for one in read_report(tmp_path).traces] == [0, 1]
    (tmp_path / "trace_1.json").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_report_that_can_not_be_left_is_a_warning(tmp_path, offload, caplog):
    path = tmp_path / "steps.jsonl"  # a run of the trainer
    path.write_text("")
    for folder in (tmp_path, path):
        offload.save_report(folder)
        assert f"no report in {folder}: " in caplog.text
    assert [*tmp_path.iterdir()] == [path]
