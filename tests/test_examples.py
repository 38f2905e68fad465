"""The examples run, on a CPU and small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = "--layers 2 --hidden 64 --ffn 128 --heads 4 --kv-heads 2 --vocabulary 128 --sequence 128"


@pytest.mark.parametrize("lora", ["4", pytest.param("0", marks=pytest.mark.slow)])
def test_a_long_context_has_the_same_losses_in_all_modes(lora, tmp_path):
    modes = ["none", "offload", "save_on_cpu", "checkpoint", "checkpoint+offload"]
    output = tmp_path / "found.json"
    words = [*SMALL.split(), "--steps", "2", "--lora", lora, "--output", output, "--modes", *modes]
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "long_context.py", *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(output.read_text())["modes"]
    assert list(found) == modes
    assert len({tuple(found[mode]["losses"]) for mode in modes}) == 1
    assert len(set(found["none"]["losses"])) == 2
    assert found["checkpoint+offload"]["pinned_bytes"] > 0


def test_without_a_gpu_the_longest_is_not_looked_for(tmp_path):
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "long_context.py", "--layers", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )
    assert ran.returncode == 2
    assert "give --sequence" in ran.stderr
