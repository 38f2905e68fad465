"""Known faults of megatron-core's own handler: each shows with it, and not with this package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import ROOT, found_by, path_to, run_python
from upstream_sides import KIB

PROGRAM = Path(__file__).with_name("upstream_programs.py")


@pytest.fixture(scope="module")
def findings():
    found = found_by(run_python("-W", "ignore", PROGRAM, path=path_to("later")))
    assert found["version"].startswith("0.19."), "which has the faults"
    return found


RIGHT = {"equal": True, "error": ""}


def test_7398_an_inline_reload_does_not_race_its_own_copy(findings):
    """#7398, #7399: the same steps are right only where copies are done at once."""
    found = findings["inline_reload"]
    assert [run for run, is_right in found.items() if not is_right] == ["theirs, late"]
    assert len(found) == 4


def test_6783_a_chunk_of_one_layer_does_not_end_too_early(findings):
    """#6783, #7574: where a group is kept, the next one is taken for another microbatch's."""
    assert findings["early_end, two layers"]["theirs"] == RIGHT
    assert "Chunk mismatch" in findings["early_end"]["theirs"]["error"]
    assert findings["early_end"]["ours"] == RIGHT


def test_6553_inputs_of_recomputed_norms_are_offloaded(findings):
    """#6553: of six nothing is freed; here all but those that backward needs first."""
    found = findings["pinned_inputs"]
    assert found["theirs"] == found["ours"] == RIGHT
    assert found["alive"]["theirs"] == found["alive"]["without"] == [6, 6, 6]
    assert found["alive"]["ours"] == [2, 2, 2]


def test_recompute_that_rows_ask_for_compiles_nothing(findings):
    failed = "RuntimeError: no compiler"
    assert findings["uncompiled"] == {"Megatron's": failed, "without rows": failed, "rows": True}


def test_6429_segments_run_again_between_forwards(findings):
    """#6429, #6311: there recompute by segments under overlap is refused with offload."""
    assert findings["segments, not run again"]["theirs"] == RIGHT
    assert "Chunk mismatch" in findings["segments"]["theirs"]["error"]
    assert findings["segments"]["ours"] == RIGHT


def test_7237_a_discarded_output_is_not_moved(findings):
    """#7237: what the copy reads is gone, so the projection's weights get a wrong gradient."""
    assert findings["discarded_output, marked"]["theirs"] == RIGHT
    assert findings["discarded_output"]["theirs"] == {"equal": False, "error": ""}
    assert findings["discarded_output"]["ours"] == RIGHT


def test_5101_a_group_that_is_kept_reloads_no_other_early(findings):
    """#5101: when the third group's backward begins, all three that moved are back already."""
    found = findings["halves"]
    assert found["theirs"] == found["ours"] == RIGHT
    assert found["found"]["theirs"]["back"] == 3
    assert found["found"]["ours"]["back"] <= 1, "prefetch_bytes has room for one"


def test_5101_a_share_counts_bytes(findings):
    """#5101: half of six groups is a ninth of the bytes; here half, to within a group."""
    found = findings["halves of the bytes"]
    largest = 8 / 27
    assert found["theirs"] == found["ours"] == RIGHT
    assert found["found"]["theirs"]["share"] == pytest.approx(3 / 27)
    assert 0.5 - largest < found["found"]["ours"]["share"] <= 0.5


def test_4911_the_host_gives_no_more_than_its_cap(findings):
    """Megatron-Bridge #4911: fused experts pin all that they save; here the rest stays."""
    found = findings["host_memory"]
    assert found["theirs"] == found["ours"] == RIGHT
    assert found["host_bytes"]["theirs"] > 700 * KIB
    assert 0 < found["host_bytes"]["ours"] <= 128 * KIB


def test_2279_no_variable_has_to_be_set(findings):
    """NeMo-RL #2279: what is missing is noticed by the first forward, if at all."""
    assert "TE CPU offload is not available" in findings["no_switch"]["theirs"]["error"]
    assert findings["no_switch"]["ours"] == RIGHT


def test_the_documents_name_every_test_of_a_fault():
    named = re.findall(r"`(test_\d+\w+)`", (ROOT / "docs" / "megatron.md").read_text())
    assert sorted(named) == sorted(name for name in globals() if re.match(r"test_\d", name))
