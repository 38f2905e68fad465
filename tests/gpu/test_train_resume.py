"""A run on GPUs that is killed, or told to stop, goes on to the bits of one that was left alone.

What a CPU doesn't have: bf16 with float32 main parameters, the random states of the device, and
with two GPUs NCCL.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_runs import numbers, run, stored, whole, words

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STEPS = 6
FAILING = str(Path(__file__).parent.parent / "train" / "failing_rank.py")


def settings(num_gpus):
    return (
        "run.device=cuda",
        f"run.steps={STEPS}",
        "run.checkpoint_interval=2",
        "model.hidden=256",
        "model.heads=4",
        "model.sequence_length=256",
        f"parallel.pipeline={num_gpus}",
        f"parallel.virtual={num_gpus}",
        "data.microbatches=4",
    )


@pytest.fixture(
    scope="module",
    params=[
        1,
        pytest.param(
            2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
        ),
    ],
)
def undisturbed(request, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed")
    status, err = run(words(output, *settings(request.param)))
    assert status == 0, err
    return output, settings(request.param)


@pytest.mark.parametrize("moment", ["step", "save", "term"])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(undisturbed, moment, tmp_path):
    expected, chosen = undisturbed
    # The count is of steps or of checkpoints; in each case something whole lies there before.
    found = {"rank": 0, "moment": moment, "count": {"step": 4, "save": 2, "term": 3}[moment]}
    found["delay"] = 0.0
    status, err = run(words(tmp_path, *chosen), program=(FAILING,), FAILURE=json.dumps(found))
    if moment == "term":
        assert status == 143, err
        assert whole(tmp_path) == [2, 3]
    else:
        assert status == 1, err
        assert "SIGKILL" in err.partition("a rank failed")[2]
        assert whole(tmp_path) == [2]
    last = whole(tmp_path)[-1]
    status, err = run(words(tmp_path, *chosen, resume=True))
    assert status == 0, err
    assert f"going on after step {last}" in err
    assert numbers(tmp_path) == numbers(expected)
    assert stored(tmp_path, STEPS) == stored(expected, STEPS)
