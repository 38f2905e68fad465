"""Bad input ends in one ConfigError that names the fix, before anything is started."""

import re

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.train.config import TrainConfig


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
        ({"model": {"layrs": 4}}, "did you mean 'layers'"),
        ({"modell": {}}, "did you mean 'model'"),
        ({"run": {"steps": 0}}, "run.steps"),
        ({"run": {"timeout_s": "inf"}}, "run.timeout_s"),
        ({"offload": {"prefetch_bytes": -1}}, "a size is 0 or more bytes"),
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
        ({"parallel": {"pipeline": 2, "ranks": 3}}, "3 ranks can't be divided"),
    ],
)
def test_a_wrong_value_is_refused_with_its_fix(sections, expected):
    assert expected in error_of(**sections)


def test_every_field_says_what_it_is():
    for section in TrainConfig.model_fields.values():
        for name, field in section.annotation.model_fields.items():
            assert field.description or re.fullmatch("simulated", name), name


@pytest.mark.parametrize(
    ("sections", "is_on"),
    [
        ({}, False),
        ({"offload": {}}, True),
        ({"offload": {"fraction": 0.5}}, True),
        ({"offload": {"fraction": 0.5, "enabled": False}}, False),
    ],
)
def test_a_section_for_offload_means_on(sections, is_on):
    assert build(**sections).offload.enabled is is_on
