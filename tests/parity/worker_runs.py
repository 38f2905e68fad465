"""Runs `gpt_worker.py` on two processes and reads its findings; shared by the parity tests."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
WORKER = Path(__file__).parent / "gpt_worker.py"


def case_names():
    """Read the case names off the worker without importing megatron-core here."""
    for node in ast.parse(WORKER.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "CASES":
            return [key.value for key in node.value.keys]
    raise AssertionError("the worker has no CASES")


def cases_of(names, quick):
    """Parametrise by case; those that are not in ``quick`` are slow."""
    cases = [pytest.param(x, marks=() if x in quick else pytest.mark.slow) for x in names]
    return pytest.mark.parametrize("name", cases)


def compare(request, tmp_path_factory, *, later=False):
    """Run the cases of this file that were selected; return what each rank found, by case."""
    mine = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["name"] for item in mine]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if later:
        folder = os.environ.get("MEGATRON_CORE_LATER", ROOT / ".venv" / "megatron-core-later")
        if not Path(folder, "megatron").is_dir():
            pytest.skip(f"no later megatron-core in {folder}; `make test` puts one there")
        environment["PYTHONPATH"] = str(folder)
    output = tmp_path_factory.mktemp("parity") / "findings.json"
    launcher = [
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    result = subprocess.run(
        [sys.executable, *launcher, str(WORKER), str(output), *cases],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(output.read_text())


def check(ranks, *, moves):
    assert len(ranks) == 2
    assert all(rank["same"] for rank in ranks)
    assert all(rank["gradients_are_real"] for rank in ranks)
    assert sum(rank["num_losses"] for rank in ranks) > 0
    assert all((rank["reloaded_bytes"] > 0) == moves for rank in ranks)
