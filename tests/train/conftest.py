"""A comparison of two processes that several files look at."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from training_runs import TINY, environment


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """A comparison in which all kinds of things happen, and what it printed; read-only."""
    output = tmp_path_factory.mktemp("compared") / "run"
    words = [f"{s}.{key}={json.dumps(v)}" for s, keys in TINY.items() for key, v in keys.items()]
    words += ["offload.fraction=0.5", "run.trace_step=3", "run.steps=4", f"run.output={output}"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_offload.train.cli", "compare", "--set", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout
