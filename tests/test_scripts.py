"""The soak and the zoo pass on the simulated device, and see a single bit that is lost."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest
from processes import ROOT, run_python
from traps import lose_a_bit

from megatron_offload.recompute.proof import Proof

sys.path.append(str(ROOT / "scripts"))

import zoo_models
from soak import Soak

SHORT = Namespace(device="cpu", steps=20, check_interval=5, error_share=0.0, seed=3)


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path):
    options = ["--device", "cpu", "--steps", "200", "--error-share", "0.3", "--output", tmp_path]
    result = run_python(ROOT / "scripts" / "soak.py", *options)
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["steps_that_differ"] == [], result.stdout
    assert report["grown"] == {}, result.stdout
    assert result.returncode == 0
    assert report["counts"]["compared"] > 10
    assert report["counts"]["bytes recomputed"] > 0
    for name in ("forward", "group", "backward", "backend", "interrupt"):
        assert report["counts"][f"error in {name}"] > 0


def test_a_bit_that_is_lost_in_a_soak_is_seen(monkeypatch):
    soak = Soak(SHORT)
    lose_a_bit(monkeypatch, "mlp")
    monkeypatch.setattr(Proof, "begin", lambda *_: False)  # else what is recomputed of it is seen
    monkeypatch.setattr(Proof, "refuse_unseen", lambda *_: "")
    soak.steps()
    assert soak.differences


def test_growth_is_seen_and_what_returns_is_none():
    soak = Soak(SHORT)
    soak.memory = [
        {"step": n, "left": 0, "live_blocks": n > 70, "pinned_bytes": n, "reserved_bytes": n % 30}
        for n in range(80)
    ]
    assert soak.growth() == {"live_blocks": 1, "pinned_bytes": 60 - 39}


def test_a_small_zoo_is_equal(tmp_path):
    pytest.importorskip("transformers")
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


def test_a_bit_that_is_lost_in_a_zoo_is_seen(monkeypatch):
    pytest.importorskip("transformers")
    model, expected = zoo_models.built("transformers", "llama")
    assert zoo_models.tried("moved", model, expected)["status"] == "equal"
    lose_a_bit(monkeypatch)
    assert zoo_models.tried("moved", model, expected)["status"] == "differs"


def test_a_model_is_as_bad_as_its_worst_mode():
    modes = {name: {"status": name, "reason": "why"} for name in ("equal", "refused", "differs")}
    assert zoo_models.verdict(modes) == {"status": "differs", "reason": "differs: why"}
    assert zoo_models.verdict({"moved": modes["equal"]})["status"] == "equal"
