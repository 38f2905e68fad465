"""The sentences of a report say what its numbers say."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from reports import GIB, bare_report, gpu_report

from megatron_offload.engine.stats import GroupStats
from megatron_offload.report.report import MemoryKind, Pair


def test_the_verdict_says_whether_the_bits_are_the_same():
    assert gpu_report().verdict == "Bitwise identical over 5 steps on 2 ranks."
    found = {"losses of 5 steps": True, "gradients of 2 ranks": False}
    verdict = gpu_report(findings=found).verdict
    assert verdict == "NOT the same bits (gradients of 2 ranks differ) over 5 steps on 2 ranks."
    assert (
        bare_report().verdict == "Not compared with a run without offload over 5 steps on 1 rank."
    )


def test_the_highest_rank_of_each_run_counts():
    kind = MemoryKind("x", (Pair(5, 4), Pair(3, 6), Pair(None, None)))
    assert kind.highest == (5, 6)
    assert MemoryKind("x", ()).highest.change is None


@pytest.mark.parametrize("pair", [Pair(None, 1), Pair(1, None), Pair(0, 1)])
def test_a_change_needs_both(pair):
    assert pair.change is None


def test_groups_are_added_up_and_say_what_moved_and_why_the_rest_stayed():
    kept = {"why": GIB, "more": GIB + GIB // 2}
    ranks = [
        {
            "groups": [
                asdict(GroupStats("x", 2, GIB, GIB, 5 * GIB // 2, kept)),
                asdict(GroupStats("y")),
            ]
        },
        {"groups": [asdict(GroupStats("x", 2, 2 * GIB))]},
    ]
    x, y = gpu_report(ranks=ranks).groups
    assert (x["name"], x["num_groups"], x["offloaded_bytes"]) == ("x", 4, 3 * GIB)
    moved = "3.0 GiB moved: named in offload.modules"
    assert x["reasons"] == [moved, "1.5 GiB kept: more", "1.0 GiB kept: why"]
    assert y["reasons"] == ["nothing in it to move: too small, or kept alive by something else"]
