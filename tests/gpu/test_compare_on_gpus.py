"""The trainer's comparison on a GPU, and on two with virtual stages over NCCL."""

from __future__ import annotations

import json

import pytest
from training_runs import run, steps_of, words

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("num_gpus", [1, pytest.param(2, marks=pytest.mark.two_gpus)])
def test_a_comparison_finds_the_same_bits(num_gpus, tmp_path):
    settings = (
        "run.device=cuda",
        "model.hidden=256",
        "model.heads=4",
        "model.sequence_length=256",
        f"parallel.pipeline={num_gpus}",
        f"parallel.virtual={num_gpus}",
        "data.microbatches=4",
        "offload.policy.kind=modules",
    )
    _, *chosen = words(tmp_path, *settings)
    status, err = run(["compare", *chosen])
    assert status == 0, err
    assert json.loads((tmp_path / "compare.json").read_text())["findings"]
    for rank in steps_of(tmp_path / "with_offload")[-1]["ranks"]:
        assert rank["offloaded_bytes"] > 0
        assert rank["peak_reserved_bytes"] > 0
