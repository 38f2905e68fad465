"""The sentences of a report say what its numbers say."""

from __future__ import annotations

import pytest
from reports import GIB, bare_report, gpu_report

from megatron_offload.report.report import Comparison, GroupRow, MemoryKind, Pair


def test_the_verdict_has_bits_memory_and_time():
    assert gpu_report().verdict == (
        "Bitwise identical over 5 steps on 2 ranks; peak reserved memory down from 38.0 GiB to "
        "30.0 GiB (\N{MINUS SIGN}21.1 %); step time +0.4 %."
    )


def test_different_bits_are_named_first():
    found = Comparison(False, (("losses of 5 steps", True), ("gradients of 2 ranks", False)))
    verdict = gpu_report(comparison=found).verdict
    assert verdict.startswith("NOT the same bits over 5 steps on 2 ranks: gradients of 2 ranks")
    assert "losses" not in verdict


def test_nothing_is_guessed():
    verdict = bare_report().verdict
    assert verdict.startswith("Not compared with a run without offload, over 5 steps on 1 rank;")
    assert "memory was not measured" in verdict
    assert "speed is not judged" in verdict
    alone = gpu_report(
        comparison=None,
        memory=[MemoryKind("reserved memory", (Pair(None, 2 * GIB), Pair(None, 3 * GIB)))],
        step_time_s=Pair(None, 1.0),
    )
    assert "peak reserved memory 3.0 GiB; step time has nothing to be held against" in alone.verdict


def test_more_memory_is_up():
    memory = [MemoryKind("reserved memory", (Pair(GIB, 2 * GIB),))]
    assert "up from 1.0 GiB to 2.0 GiB (+100.0 %)" in gpu_report(memory=memory).verdict


def test_the_highest_rank_of_each_run_counts():
    kind = MemoryKind("x", (Pair(5, 4), Pair(3, 6), Pair(None, None)))
    assert kind.highest == (5, 6)
    assert MemoryKind("x", ()).highest.change is None


@pytest.mark.parametrize("pair", [Pair(None, 1), Pair(1, None), Pair(0, 1)])
def test_a_change_needs_both(pair):
    assert pair.change is None


def test_reasons_say_what_moved_and_why_the_rest_stayed():
    row = GroupRow("x", 4, 3 * GIB, 3 * GIB, 3 * GIB, 0, {"why": GIB, "more": GIB + GIB // 2})
    assert row.reasons == [
        "3.0 GiB moved: named in offload.modules",
        "1.5 GiB kept: more",
        "1.0 GiB kept: why",
        "512.0 MiB kept: the run did not note why",
    ]
    assert GroupRow("x", 4, 0, 0, 0, 0).reasons == [
        "nothing in it to move: too small, or kept alive by something else"
    ]
