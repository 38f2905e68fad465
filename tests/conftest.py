"""What many tests share: where helpers lie, what a GPU test needs, how much is tried at random."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=300, help="how many random programs to run")
    parser.addoption(
        "--every-line", type=int, default=151, help="interrupt a step at each n-th of its lines"
    )
    parser.addoption("--fuzz-first-seed", type=int, default=0, help="seed of the first of them")
    parser.addoption("--faults", type=int, default=2, help="how many training runs to kill")


def pytest_generate_tests(metafunc):
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--faults")))
    if "fuzz_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--fuzz-first-seed")
        seeds = range(first, first + metafunc.config.getoption("--fuzz"))
        metafunc.parametrize("fuzz_seed", seeds)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def quick_collections():
    """Collect what the test makes, and not the libraries, each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
