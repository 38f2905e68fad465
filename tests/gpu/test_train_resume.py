"""A run on GPUs that is killed, or told to stop, goes on to the bits of one that was left alone.

What a CPU doesn't have: bf16 with float32 main parameters, the random states of the device, and
with two GPUs NCCL.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from training_runs import numbers, run, stored, whole, words

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STEPS = 6
MOMENTS = {"step": 4, "save": 2, "term": 3}
"""When a run fails: at that step, at that checkpoint, or told so at that step."""
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


class Runs:
    """All runs of one number of GPUs, in two waves: side by side they take no longer than one."""

    def __init__(self, folder, num_gpus):
        self.folder, self.chosen = folder, settings(num_gpus)
        with ThreadPoolExecutor() as pool:
            undisturbed = pool.submit(run, words(folder / "undisturbed", *self.chosen))
            self.failed = dict(zip(MOMENTS, pool.map(self.fail, MOMENTS), strict=True))
            self.saved = {moment: whole(folder / moment) for moment in MOMENTS}
            self.resumed = dict(zip(MOMENTS, pool.map(self.resume, MOMENTS), strict=True))
        status, err = undisturbed.result()
        assert status == 0, err

    def fail(self, moment):
        # Something whole lies there before.
        failure = {"rank": 0, "moment": moment, "count": MOMENTS[moment], "delay": 0.0}
        chosen = words(self.folder / moment, *self.chosen)
        return run(chosen, program=(FAILING,), FAILURE=json.dumps(failure))

    def resume(self, moment):
        return run(words(self.folder / moment, *self.chosen, resume=True))


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.two_gpus)])
def runs(request, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"), request.param)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(runs, moment):
    expected, found = runs.folder / "undisturbed", runs.folder / moment
    status, err = runs.failed[moment]
    if moment == "term":
        assert status == 143, err
        assert runs.saved[moment] == [2, 3]
    else:
        assert status == 1, err
        assert "SIGKILL" in err.partition("a rank failed")[2]
        assert runs.saved[moment] == [2]
    status, err = runs.resumed[moment]
    assert status == 0, err
    assert f"going on after step {runs.saved[moment][-1]}" in err
    assert numbers(found) == numbers(expected)
    assert stored(found, STEPS) == stored(expected, STEPS)
