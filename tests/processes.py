"""Programs that tests start, and where the later megatron-core is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LATER = Path(os.environ.get("MEGATRON_CORE_LATER", ROOT / ".venv" / "megatron-core-later"))
"""The later megatron-core, whose wheel brings `megatron.training`."""


def later():
    """Return the folder of the later megatron-core; where it is absent, the test is skipped."""
    if not Path(LATER, "megatron").is_dir():
        pytest.skip(f"no later megatron-core in {LATER}; `make test` puts one there")
    return LATER


def path_to(version):
    """Return what stands on PYTHONPATH for "0.16" or "later"."""
    return (later(), ROOT) if version == "later" else (ROOT,)


def run_python(*words, path=(ROOT,), env=os.environ, cwd=None, timeout=280, **more):
    """Run Python in an environment and ``more`` variables; return what became of it."""
    if path:
        more["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**env, **more},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def torchrun(num_ranks, *words, **options):
    """Run a program in so many processes."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    return run_python("-W", "ignore", *launcher, *words, **options)


def found_by(done):
    """Return the JSON that is the last line of what a program has printed."""
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
