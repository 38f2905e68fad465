"""The soak passes on the simulated device, and sees a single bit that is lost."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path):
    options = ["--device", "cpu", "--steps", "200", "--error-share", "0.3", "--output", tmp_path]
    result = subprocess.run(
        [sys.executable, SCRIPTS / "soak.py", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["steps_that_differ"] == [], result.stdout
    assert report["grown"] == {}, result.stdout
    assert result.returncode == 0
    assert report["counts"]["compared"] > 10
    assert report["counts"]["bytes made again"] > 0
    for name in ("forward", "group", "backward", "backend", "interrupt"):
        assert report["counts"][f"error in {name}"] > 0


def test_a_lost_bit_is_seen(monkeypatch):
    soak = load_script("soak").Soak(
        Namespace(device="cpu", steps=20, check_interval=5, error_share=0.0, seed=3)
    )
    copy = soak.manager.backend.copy

    def copy_badly(pairs, stream, label):
        event = copy(pairs, stream, label)
        soak.manager.backend.sync_copies()
        if stream is soak.manager.backend.h2d_stream and label.startswith("mlp"):
            pairs[0][0].view(-1).view(torch.uint8)[3] ^= 1
        return event

    monkeypatch.setattr(soak.manager.backend, "copy", copy_badly)
    soak.steps()
    assert soak.differences


def test_growth_is_seen_and_what_comes_back_is_none():
    soak = load_script("soak").Soak(
        Namespace(device="cpu", steps=20, check_interval=5, error_share=0.0, seed=3)
    )
    soak.memory = [
        {"step": n, "left": 0, "live_blocks": n > 70, "pinned_bytes": n, "reserved_bytes": n % 30}
        for n in range(80)
    ]
    assert soak.growth() == {"live_blocks": 1, "pinned_bytes": 60 - 19}
