"""Plans for a job that four H200s ran, and what they predict beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_offload.core.machine import Machine
from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.files import load_profile
from megatron_offload.planning.profiled_job import job_of
from megatron_offload.planning.schedule import make_schedule

GIB = 2**30
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
MEASURED = json.loads((BENCHMARKS / "h200" / "planned_c.json").read_text())
PROFILES = [
    load_profile(BENCHMARKS / "h200" / "profiles_c" / f"profile_{rank}.json") for rank in range(4)
]
MACHINE = Machine(node_gbps=160.0, node_d2h_gbps=None)
"""What all four GPUs got in the measured run."""


def rows(option):
    """Return the ranks of the measured mode with this option."""
    return [row for row in MEASURED["rows"] if row["mode"].endswith(option)]


@pytest.mark.sampled
@pytest.mark.parametrize("target", [34, 30, 26, 22])
def test_plans_for_a_recorded_step_are_near_what_was_measured(target):
    ranks = rows(f"policy.target_bytes={target}GiB")
    assert len(ranks) == 4
    chooser = Chooser(PROFILES, job_of(PROFILES, make_schedule("interleaved", 4, 8, 2), MACHINE))
    plan = chooser.under((target * GIB,) * 4)
    ratio = plan.ranks[0].predicted_step_us / chooser.without.step_us
    assert ratio == pytest.approx(max(row["ratio"] for row in ranks), rel=0.05)
    measured = [row["peak_reserved_bytes"] for row in ranks]
    assert max(measured) <= (target + 0.5) * GIB, "the run kept its target"
    predicted = max(rank.predicted_peak_bytes for rank in plan.ranks)
    assert predicted == pytest.approx(max(measured), rel=0.05)
    assert predicted <= target * GIB
    assert plan.ranks[0].moved_bytes > 0


def test_auto_has_kept_its_promise():
    ranks = rows("policy.most_slowdown_percent=0.8")
    assert max(row["ratio"] for row in ranks) <= 1.01
    assert max(row["peak_reserved_bytes"] for row in ranks) <= 26 * GIB
    assert all(row["early_returns"] == row["late_reloads"] == 0 for row in ranks)
    assert min(row["d2h_bytes"] for row in ranks) > 0


def test_the_documented_curve_is_the_measured_one():
    points = json.loads((BENCHMARKS / "tradeoff.json").read_text())["points"]
    documented = {point["label"]: point for point in points if point["kind"] == "measured"}
    assert len(documented) == len(MEASURED["rows"]) // 4
    for target in (34, 30, 26, 22):
        ranks = rows(f"policy.target_bytes={target}GiB")
        point = documented[f"target {target} GiB"]
        assert point["peak_bytes"] == max(row["peak_reserved_bytes"] for row in ranks)
        percent = 100 * (max(row["ratio"] for row in ranks) - 1)
        assert point["step_time_percent"] == pytest.approx(percent, abs=1e-3)
