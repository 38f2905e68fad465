"""Bad input ends in one ConfigError that names the fix, before anything is started."""

import re

import pytest
from training_runs import run, words

from megatron_offload.config import OffloadConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.loop import check_patterns


def build(**sections):
    return validate(TrainConfig, sections, "run.yaml")


def error_of(**sections):
    try:
        build(**sections)
    except ConfigError as error:
        return str(error)
    return pytest.fail("nothing was refused")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"run": {"steps": 0}}, "run.steps"),
        ({"run": {"lr": "inf"}}, "run.lr"),
        ({"offload": {"modules": ["core_atn"]}}, "did you mean 'core_attn'"),
        ({"offload": {"enabled": True, "modules": ["attn_proj"]}}, "add core_attn"),
        ({"model": {"hidden": 64, "heads": 5}}, "choose one of 1, 2, 4, 8"),
        (
            {"model": {"hidden": 12, "heads": 4, "position_embedding": "rope"}},
            "needs an even width",
        ),
        ({"model": {"vocabulary": 100}}, "model.vocabulary"),
        ({"model": {"sequence_length": 2**20 + 1}}, "model.sequence_length"),
        ({"run": {"trace_step": -1}}, "trace_step"),
        # Ranks, layers and microbatches must fit.
        ({"model": {"layers": 2}, "parallel": {"pipeline": 4}}, "a multiple of 4"),
        (
            {"model": {"layers": 6}, "parallel": {"pipeline": 2, "virtual": 2}},
            "set model.layers to a multiple of 4",
        ),
        ({"parallel": {"virtual": 2}}, "parallel.virtual needs a pipeline"),
        (
            {"parallel": {"pipeline": 2, "virtual": 2}, "data": {"microbatches": 3}},
            "in multiples of parallel.pipeline 2, got",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_fix(sections, expected):
    assert expected in error_of(**sections)


def test_every_field_says_what_it_is():
    for section in TrainConfig.model_fields.values():
        for name, field in section.annotation.model_fields.items():
            assert field.description or re.fullmatch("simulated", name), name


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
    settings = ("offload.enabled=true", "run.steps=1")
    settings = (*settings, "offload.modules=[output_layer*]")
    assert run(words(tmp_path / "one", *settings))[0] == 0
    status, err = run(words(tmp_path / "none", *settings[:-1], "offload.modules=[output.*]"))
    assert status == 2, err
    assert "no module of any rank matches 'output.*'; did you mean 'output_layer'?" in err
    rows = "offload={rows: [{site: mpl, offload: 1}]}"
    status, err = run(["compare", *words(tmp_path / "rows", rows)[1:]])
    assert "did you mean 'mlp'?" in err
    assert (status, [*tmp_path.glob("rows/*/steps.jsonl")]) == (2, []), "nothing was trained"
