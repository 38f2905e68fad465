"""Runs that several files look at: a comparison of two processes, and one rank in this process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from training_runs import TINY, be_the_rank, environment, words

from megatron_offload.cli import main as cli


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """A comparison in which all kinds of things happen, and what it printed; read-only."""
    output = tmp_path_factory.mktemp("compared") / "run"
    words = [f"{s}.{key}={json.dumps(v)}" for s, keys in TINY.items() for key, v in keys.items()]
    words += ["offload.fraction=0.5", "run.trace_step=3", "run.steps=4", f"run.output={output}"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_offload", "compare", "--set", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


@pytest.fixture
def train(monkeypatch, request):
    """Train in this process, with the ``ONE_RANK`` settings of the test's file."""

    def train(output, *settings):
        with monkeypatch.context() as patch:
            be_the_rank(patch)
            assert cli.main(words(output, *request.module.ONE_RANK, *settings)) == 0

    return train
