"""scripts/zoo.py: that it trains other people's models, and sees a single bit that is lost."""

from __future__ import annotations

import json
import sys

import pytest
from processes import ROOT, run_python
from traps import lose_a_bit

pytest.importorskip("transformers")
sys.path.append(str(ROOT / "scripts"))

import zoo_models


def test_a_small_zoo_is_equal(tmp_path):
    output = tmp_path / "zoo.json"
    words = ("--here", "--only", "transformers:llama", "--output", output)
    result = run_python(ROOT / "scripts" / "zoo.py", *words)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    assert rows["llama"]["status"] == "equal", rows["llama"]["reason"]
    modes = rows["llama"]["modes"]
    assert {mode for mode, found in modes.items() if found["did something"]} == {*modes} - {
        "default"
    }


def test_a_lost_bit_is_seen(monkeypatch):
    model, expected = zoo_models.built("transformers", "llama")
    assert zoo_models.tried("moved", model, expected)["status"] == "equal"
    lose_a_bit(monkeypatch)
    assert zoo_models.tried("moved", model, expected)["status"] == "differs"


def test_a_model_is_as_bad_as_its_worst_mode():
    modes = {name: {"status": name, "reason": "why"} for name in ("equal", "refused", "differs")}
    assert zoo_models.verdict(modes) == {"status": "differs", "reason": "differs: why"}
    assert zoo_models.verdict({"moved": modes["equal"]})["status"] == "equal"
