"""Patterns that match nowhere."""

from __future__ import annotations

import pytest
from training_runs import run, words

from megatron_offload.config import OffloadConfig
from megatron_offload.errors import ConfigError
from megatron_offload.train.loop import check_patterns


@pytest.mark.parametrize("key", ["modules", "recompute"])
def test_a_pattern_that_matches_on_no_rank_is_refused(key):
    names = {"", "decoder", "decoder.layers.0.mlp", "output_layer"}
    check_patterns(OffloadConfig(**{key: ["decoder.*.*.mlp", "output_*"]}), names)
    with pytest.raises(ConfigError, match=f"{key}: no module .* 'decoder.layers.9.mlp'; did you"):
        check_patterns(OffloadConfig(**{key: ["output_*", "decoder.layers.9.mlp"]}), names)


def test_a_row_of_a_site_that_no_rank_has_is_refused():
    names = {"decoder.layers.0", "decoder.layers.1.mlp.linear_fc1", "output_layer"}
    for site in ("mlp", "layer", "norm", "core_attn", "mlp.linear_*"):
        check_patterns(OffloadConfig(rows=[{"site": site, "offload": 1}]), names)
    for site, near in (("mpl", "mlp"), ("linear_fc1", "mlp.linear_fc1"), ("output_layer", "")):
        with pytest.raises(ConfigError, match=f"rows: no module .* '{site}'; did .*{near}'"):
            check_patterns(OffloadConfig(rows=[{"site": site, "offload": 1}]), names)


@pytest.mark.slow
def test_a_pattern_may_match_on_one_rank_alone(tmp_path):
    settings = ("offload.enabled=true", "run.steps=1", "run.timeout_s=60")
    settings = (*settings, "offload.modules=[output_layer*]")
    assert run(words(tmp_path / "one", *settings))[0] == 0
    status, err = run(words(tmp_path / "none", *settings[:-1], "offload.modules=[output.*]"))
    assert status == 2, err
    assert "no module of any rank matches 'output.*'; did you mean 'output_layer'?" in err
    rows = "offload={rows: [{site: mpl, offload: 1}]}"
    status, err = run(["compare", *words(tmp_path / "rows", rows)[1:]])
    assert "did you mean 'mlp'?" in err
    assert (status, [*tmp_path.glob("rows/*/steps.jsonl")]) == (2, []), "nothing was trained"
