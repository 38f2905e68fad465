"""Megatron-core's own GPT and schedules over two processes: the same bits with and without offload.

PP in {1, 2}; VPP in {1, 2, 4}, one layer a chunk among them (megatron-core has virtual stages for
PP > 1 only); microbatch counts that are no multiples of PP where the schedule takes them; counts
and sequence lengths that change between steps; evaluation before the first step and in between;
tied embeddings, dropout, and recompute of whole layers and of modules. The later megatron-core that
`make test` unpacks beside the installed one runs what depends on its call sites and schedules.
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
        if isinstance(node, ast.Assign) and node.targets[0].id == "CASES":
            return [key.value for key in node.value.keys]
    raise AssertionError("the worker has no CASES")


LATER_CASES = [
    "pp2",
    "pp2-vpp4-one-layer-a-chunk",
    "pp2-vpp4-whole-layers",
    "tied",
    "recompute-core-attention",
    "recompute-norms",
]


def compare(cases, tmp_path_factory, *, later=False):
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


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return compare(case_names(), tmp_path_factory)


@pytest.fixture(scope="module")
def later_findings(tmp_path_factory):
    return compare(LATER_CASES, tmp_path_factory, later=True)


def check(ranks, *, moves):
    assert len(ranks) == 2
    assert all(rank["same"] for rank in ranks)
    assert all(rank["gradients_are_real"] for rank in ranks)
    assert sum(rank["num_losses"] for rank in ranks) > 0
    assert all((rank["reloaded_bytes"] > 0) == moves for rank in ranks)


@pytest.mark.xdist_group("parity")
@pytest.mark.parametrize("name", case_names())
def test_losses_and_gradients_are_those_without_offload(name, findings):
    # With full recompute layers run without grad, and again inside backward: nothing to move.
    check(findings[name], moves=name != "full-recompute")


@pytest.mark.xdist_group("parity-later")
@pytest.mark.parametrize("name", LATER_CASES)
def test_the_later_megatron_core_gives_the_same_bits_too(name, later_findings):
    check(later_findings[name], moves=True)
