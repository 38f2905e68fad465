"""The choice of what is kept, moved and recomputed, held against more of them.

Longer, and on large jobs: `benchmarks/check_choice.py`.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
CHECK = runpy.run_path(str(BENCHMARKS / "check_choice.py"))


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_keeps_its_target_and_costs_no_more_than_one_that_recomputes_nothing(seed):
    assert CHECK["check_random"](seed) == []


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 1, 2, 59, 74, 96])
def test_on_small_jobs_no_choice_of_all_is_five_percent_quicker(seed):
    assert CHECK["check_exact"](seed) <= 5.0
