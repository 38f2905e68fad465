"""Megatron-core's own GPT and schedules over two processes: the same bits with and without offload.

PP in {1, 2}; VPP in {1, 2, 4}, one layer a chunk among them (megatron-core has virtual stages for
PP > 1 only); microbatch counts that are no multiples of PP where the schedule takes them; counts
and sequence lengths that change between steps; evaluation before the first step and in between;
tied embeddings, dropout, and recompute of whole layers and of modules.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "gpt_worker.py"


def case_names():
    """Read the case names off the worker without importing megatron-core here."""
    for node in ast.parse(WORKER.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "CASES":
            return [key.value for key in node.value.keys]
    raise AssertionError("the worker has no CASES")


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    output = tmp_path_factory.mktemp("parity") / "findings.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launcher, str(WORKER), str(output)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.xdist_group("parity")
@pytest.mark.parametrize("name", case_names())
def test_losses_and_gradients_are_those_without_offload(name, findings):
    ranks = findings[name]
    assert len(ranks) == 2
    assert all(rank["same"] for rank in ranks)
    assert all(rank["gradients_are_real"] for rank in ranks)
    assert sum(rank["num_losses"] for rank in ranks) > 0
    if name == "full-recompute":  # its layers run without grad, and again inside backward
        assert all(rank["reloaded_bytes"] == 0 for rank in ranks)
    else:
        assert all(rank["reloaded_bytes"] > 0 for rank in ranks)
