"""The later megatron-core that `make test` unpacks beside the installed one: the same bits too.

The cases are those that depend on its call sites and schedules.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_gpt_parity import cases_of, check, compare

CASES = [
    "pp2",
    "pp2-vpp4-one-layer-a-chunk",
    "pp2-vpp4-whole-layers",
    "tied",
    "inputs-of-full-recompute",
    "recompute-core-attention",
    "recompute-norms",
]


@pytest.fixture(scope="module")
def findings(request, tmp_path_factory):
    return compare(request, tmp_path_factory, later=True)


@cases_of(CASES, ("pp2-vpp4-one-layer-a-chunk",))
def test_losses_and_gradients_are_those_without_offload(name, findings):
    check(findings[name], moves=True)
