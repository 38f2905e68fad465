"""benchmarks/measure_layers.py on a CPU: what it writes is what predictions are held against."""

from __future__ import annotations

import json
import os

import pytest
from processes import ROOT, run_python

pytest.importorskip("megatron.core")

SCRIPT = ROOT / "benchmarks" / "measure_layers.py"
# Of a torchrun around the tests the script must see nothing.
OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.slow
def test_steps_of_every_shape_are_timed_and_what_comes_too_late_is_said(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    command = (SCRIPT, "--device", "cpu", "--warmup", "1", "--steps", "2")
    for limit, output in (("600", tmp_path / "a.json"), ("0", tmp_path / "b.json")):
        words = ("--shapes", "gated", "2048", "--limit", limit, "--output", output)
        done = run_python(*command, *words, env=environment)
        assert done.returncode == 0, done.stderr
    shapes = json.loads((tmp_path / "a.json").read_text())["shapes"]
    assert list(shapes) == ["gated", "2048"]
    for shape in shapes.values():
        assert len(shape["steps_ms"]) == 3
        assert 0 < shape["host_ms"] <= shape["step_ms"]
    late = json.loads((tmp_path / "b.json").read_text())["shapes"]
    assert [shape["error"] for shape in late.values()] == ["no time left"] * 2
