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

ROOT = Path(__file__).parent.parent.parent
WORKER = Path(__file__).parent / "gpt_worker.py"


def case_names():
    """Read the case names off the worker without importing megatron-core here."""
    for node in ast.parse(WORKER.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES":
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
    launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [sys.executable, *launcher, "--nproc-per-node=2", str(WORKER), str(output), *cases],
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


QUICK = ("pp1-mlp", "pp2-vpp4-one-layer-a-chunk", "tied", "dropout", "recompute-core-attention")


@pytest.fixture(scope="module")
def findings(request, tmp_path_factory):
    return compare(request, tmp_path_factory)


@cases_of(case_names(), QUICK)
def test_losses_and_gradients_are_those_without_offload(name, findings):
    # With full recompute layers run without grad, and again inside backward: nothing to move.
    check(findings[name], moves=name != "full-recompute")
    if name == "inputs-of-full-recompute":  # though the schedule holds a chunk's first
        assert [rank["externally_referenced_bytes"] for rank in findings[name]] == [0, 0]
