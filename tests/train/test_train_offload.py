"""Patterns that match nowhere, and what a run does with what its steps have found."""

from __future__ import annotations

import pytest
from training_runs import run, words
from virtual_clock import VirtualJob

from megatron_offload.autotune.loop import tune
from megatron_offload.config import OffloadConfig
from megatron_offload.errors import ConfigError
from megatron_offload.planning.files import load_plan
from megatron_offload.train.loop import check_patterns, keep_plan


@pytest.mark.by_default
@pytest.mark.parametrize("is_owner", [True, False])
def test_the_final_plan_is_said_once_and_written_by_the_first_rank(tmp_path, is_owner):
    job = VirtualJob(0.1)
    loop = tune(job.manager)
    output = tmp_path if is_owner else None
    said = []
    for _ in range(14):
        was_planning = not loop.is_converged
        job.step()
        if was_planning and loop.is_converged:
            said.append(keep_plan(loop, output))
    assert said == [loop.said]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"] * is_owner
    if is_owner:
        assert load_plan(tmp_path / "plan.json") == loop.plan


@pytest.mark.parametrize("key", ["modules", "recompute"])
def test_a_pattern_that_matches_on_no_rank_is_refused(key):
    names = {"", "decoder", "decoder.layers.0.mlp", "output_layer"}
    check_patterns(OffloadConfig(**{key: ["decoder.*.*.mlp", "output_*"]}), names)
    with pytest.raises(ConfigError, match=f"{key}: no module .* 'decoder.layers.9.mlp'; did you"):
        check_patterns(OffloadConfig(**{key: ["output_*", "decoder.layers.9.mlp"]}), names)


@pytest.mark.slow
def test_a_pattern_may_match_on_one_rank_alone(tmp_path):
    settings = ("offload.enabled=true", "run.steps=1", "run.timeout_s=60")
    settings = (*settings, "offload.modules=[output_layer*]")
    assert run(words(tmp_path / "one", *settings))[0] == 0
    status, err = run(words(tmp_path / "none", *settings[:-1], "offload.modules=[output.*]"))
    assert status == 2, err
    assert "no module of any rank matches 'output.*'; did you mean 'output_layer'?" in err
