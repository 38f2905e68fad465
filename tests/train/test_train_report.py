"""A real comparison of two processes leaves a page, timelines and the way to do it again."""

from __future__ import annotations

import pytest
from training_runs import TINY, steps_of

from megatron_offload.cli import report
from megatron_offload.config import load_yaml
from megatron_offload.files.strict_model import validate
from megatron_offload.train.config import TrainConfig

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow


def test_compare_ends_with_the_page_and_where_it_is(compared):
    output, printed = compared
    page = output / "report.html"
    assert f"report, for a browser: {page}\nShown: " in printed
    text = page.read_text()
    assert "Bitwise identical over 4 steps on 2 ranks" in text
    assert text.count('<figure class="timeline"') == 2
    assert "the fraction that may be offloaded is 0.5" in text


def test_the_report_says_what_the_run_did(compared):
    found = report.read_report(compared[0])
    assert all(found.findings.values())
    assert found.facts.is_simulated
    assert found.facts.device.startswith("simulated on ")
    ranks = found.facts.by_rank
    assert (found.facts.num_steps, [one.rank for one in ranks]) == (4, [0, 1])
    assert [trace.rank for trace in found.traces] == [0, 1]
    assert {row["name"] for row in found.groups} == {"core_attn", "mlp_act"}
    last = steps_of(compared[0] / "with_offload")[-1]
    moved = [sum(row["offloaded_bytes"] for row in x) for x in (found.groups, last["ranks"])]
    assert moved == [sum(one.offloaded_bytes for one in ranks)] * 2
    assert moved[0] > 0
    for group in (group for one in ranks for group in one.groups):
        assert sum(group.kept_bytes_by_reason.values()) == group.kept_bytes
    assert sum(row["kept_bytes"] for row in found.groups) > 0
    without, offloaded = found.memory[0].highest
    assert 0 < offloaded < without
    assert all(one.pinned_host_bytes >= one.peak_host_bytes > 0 for one in ranks)
    assert found.facts.versions.keys() >= {"python", "torch", "megatron-core"}


def test_the_written_configuration_is_the_one_that_was_given(compared):
    path = compared[0] / "config.yaml"
    written = validate(TrainConfig, load_yaml(path), str(path))
    assert written.offload.fraction == 0.5
    assert written.offload.model_fields_set == TINY["offload"].keys() | {"fraction"}
    assert written.model.model_fields_set == TINY["model"].keys()
    assert written.run.output == compared[0]
