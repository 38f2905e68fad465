"""What many tests share: small programs, managers on the simulated backend, and parity."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
