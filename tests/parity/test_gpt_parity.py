"""Megatron-core's own GPT and schedules over two processes: the same bits with and without offload.

PP in {1, 2}; VPP in {1, 2, 4}, one layer a chunk among them (megatron-core has virtual stages for
PP > 1 only); microbatch counts that are no multiples of PP where the schedule takes them; counts
and sequence lengths that change between steps; evaluation before the first step and in between;
tied embeddings, dropout, and recompute of whole layers and of modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worker_runs import case_names, cases_of, check, compare

QUICK = ("pp1-mlp", "pp2-vpp4-one-layer-a-chunk", "tied", "dropout", "recompute-core-attention")


@pytest.fixture(scope="module")
def findings(request, tmp_path_factory):
    return compare(request, tmp_path_factory)


@cases_of(case_names(), QUICK)
def test_losses_and_gradients_are_those_without_offload(name, findings):
    # With full recompute layers run without grad, and again inside backward: nothing to move.
    check(findings[name], moves=name != "full-recompute")
