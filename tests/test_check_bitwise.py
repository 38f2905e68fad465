"""scripts/check_bitwise.py: that it says yes on two CPU processes, and that it can say no."""

import json
import sys

import pytest
from processes import ROOT, later, run_python

sys.path.append(str(ROOT / "scripts"))

import check_bitwise
from check_bitwise import finish, judge, summary

from megatron_offload.config import MODULES

ON_CPU = ("--device", "cpu", "--tiny")
FP32 = ("--vpp", "2", "--dtypes", "fp32")

PLAN = """
import os, time

if os.environ.get("RANK") == "1":
    from megatron_offload.engine.manager import PipelineOffloadManager
    from megatron_offload.engine.saved_tensor import SavedTensor

    steps = 0
    configure, reset = PipelineOffloadManager.configure, PipelineOffloadManager.reset
    unpack = SavedTensor.unpack

    def begin(self, *arguments, **more):
        global steps
        steps = 0
        configure(self, *arguments, **more)

    def end(self):
        global steps
        steps += 1
        reset(self)

    def wrong(self):
        tensor = unpack(self)
        is_saved = type(self) is SavedTensor  # and no input of what is recomputed
        if is_saved and self.block is not None and self.block.released:
            DO
        return tensor

    PipelineOffloadManager.configure, PipelineOffloadManager.reset = begin, end
    SavedTensor.unpack = wrong
"""


def parse(*arguments):
    return check_bitwise.parse_arguments([*arguments, "--output", "out"])


def one(name="layer", **more):
    return parse(*ON_CPU, *FP32, "--only", f"dense:{name}").todo[0] | more


def found(first=None, moved=2**20, offloaded=2**20, left=None, recomputed=2**20, held=0):
    return {
        "first_difference": first,
        "reloaded_bytes": moved,
        "recomputed_bytes": recomputed,
        "offloaded_bytes": offloaded,
        "externally_referenced_bytes": held,
        "left": left or {},
    }


def run(tmp_path, *arguments, do=None, is_later=False):
    """Run the script; return its exit code, its rows by id, and what it printed."""
    places = [later()] if is_later else []
    if do is not None:
        (tmp_path / "sitecustomize.py").write_text(PLAN.replace("DO", do))
        places.append(tmp_path)
    output = tmp_path / "out"
    words = (*ON_CPU, *arguments, "--output", output)
    result = run_python(check_bitwise.__file__, *words, path=places)
    assert not result.stderr, result.stderr
    report = json.loads((output / "check_bitwise.json").read_text())
    assert report["running"] is None
    return result.returncode, {row["id"]: row for row in report["rows"]}, result.stdout


def test_every_module_is_in_some_set():
    sets = [set(modules) for sets in check_bitwise.SETS.values() for modules in sets.values()]
    assert set().union(*sets) == set(MODULES)
    alone = set().union(*(modules for modules in sets if len(modules) == 1))
    assert alone == set(MODULES) - {"attn_proj"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--vpp", "3"], "don't divide"),
        (["--vpp", "0"], "at least 1"),
        (["--microbatches", "6"], "microbatches divisible by PP"),
        (["--ranks", "1"], "PP above 1"),
        (["--ranks", "1", "--vpp", "1", "--models", "tp"], "leaves nothing"),
        (["--budgets", "1MiB"], "INFLIGHT/PREFETCH"),
        (["--only", "dense:router"], "leaves nothing"),
        (["--tiny", "--hidden", "66"], "no multiple"),
    ],
)
def test_wrong_arguments_end_before_anything_starts(arguments, reason, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert reason in capsys.readouterr().err


def test_models_of_paired_ranks_have_half_the_pipeline():
    two, four = (parse("--models", "tp", "dense", "--ranks", ranks).todo for ranks in "24")
    assert {(one["model"], one["pp"]) for one in four} == {("tp", 2), ("dense", 4)}
    assert {(one["model"], one["pp"]) for one in two} == {("tp", 1), ("dense", 2)}
    assert {one["vpp"] for one in two if one["model"] == "tp"} == {1}
    assert {one["vpp"] for one in four if one["model"] == "tp"} == {1, 2, 4}


def test_a_row_is_as_bad_as_its_worst_rank():
    assert judge(one(), [found(), found()])["status"] == "equal"
    assert judge(one(), [found(), found(first=2)])["status"] == "differs"
    assert judge(one(), [found(moved=0), found()])["status"] == "equal"
    assert judge(one(), [found(moved=0), found(moved=0)])["status"] == "nothing was reloaded"
    assert judge(one(), [found(moved=0), found(moved=0, held=1)])["status"] == "equal"
    assert judge(one(), [found(), found(offloaded=0)])["status"] == "nothing was offloaded"
    assert judge(one(), [found(), found(recomputed=0)])["status"] == "nothing recomputed"
    assert judge(one("mlp_act"), [found(), found(recomputed=0)])["status"] == "equal"
    in_eight_bits = {**one(), "model": "fp8-blockwise"}
    assert judge(in_eight_bits, [found(), found(recomputed=0)])["status"] == "equal"
    row = judge(one(), [found(), found(left={"host bytes": 7})])
    assert (row["status"], row["reason"]) == ("failed", "left behind: {'host bytes': 7}")


def test_only_equal_is_a_yes():
    equal, out = {**one(), "status": "equal"}, {**one(), "status": "left out"}
    none = {**one(), "modules": [], "status": "done"}
    assert summary([none, equal, out]) == ("bitwise identical: yes (1 equal, 1 left out)", True)
    assert not summary([none, out])[1]
    lost = ("nothing was offloaded", "nothing was reloaded", "nothing recomputed")
    for status in ("differs", "failed", *lost, "not run"):
        assert not summary([equal, {**one(), "status": status}])[1]


def test_a_failure_without_offload_is_one_of_all_that_needs_it(capsys):
    todo = parse("--models", "dense", "--vpp", "2", "4", "--dtypes", "bf16").todo
    report = {"rows": [], "running": {"combination": todo[0], "reference": True}}
    finish(report, todo, "rank 1: boom")
    assert {row["id"] for row in report["rows"]} == {c["id"] for c in todo if c["vpp"] == 2}
    assert report["rows"][0]["reason"] == "without offload: rank 1: boom"
    assert report["running"] is None
    report["running"] = {"combination": todo[-1], "reference": False}
    finish(report, todo, "rank 0: boom")
    assert report["rows"][-1]["id"] == todo[-1]["id"]
    assert "rank 0: boom" in capsys.readouterr().out


def check_yes(code, rows, printed):
    assert code == 0, printed
    assert "bitwise identical: yes" in printed
    for row in rows.values():
        if row["modules"] and row["status"] != "left out":
            assert row["status"] == "equal", row
            assert len(row["ranks"]) == 2
            counter = "recomputed" if "layer" in row["recompute"] else "offloaded"
            assert all(rank[f"{counter}_bytes"] > 0 for rank in row["ranks"])
    references = [row for row in rows.values() if row["name"] == "none"]
    references = [row for row in references if row["model"] != "overlap"]  # as without overlap
    hashes = {step[1] for row in references for steps in row["steps"] for step in steps}
    assert len(hashes) == sum(len(steps) for row in references for steps in row["steps"])


@pytest.mark.slow
def test_every_combination_says_yes(tmp_path):
    models = ("dense", "moe", "fused")
    chosen = ("--vpp", "1", "2", "--dtypes", "fp32", "--models", *models)
    code, rows, printed = run(tmp_path, *chosen)
    check_yes(code, rows, printed)
    left_out = {row["name"] for row in rows.values() if row["status"] == "left out"}
    assert left_out == {"expert_fc1", "moe_act", "fused_group_mlp"}
    assert len(rows) == 2 * (sum(len(check_bitwise.SETS[model]) for model in models) + 2)
    assert rows["vpp2 fp32 dense:layer 16KiB/24KiB"]["ranks"][0]["reloaded_bytes"] > 2**20


@pytest.mark.slow
@pytest.mark.parametrize("is_later", [False, True])
def test_every_other_model_says_yes(tmp_path, is_later):
    models = sorted(set(check_bitwise.SETS) - {"dense", "moe", "fused"})
    only = ("--models", *models, "--only", "*:again", "*:layer", "*:five*", "*:whole*")
    # Torch's RMSNorm saves no input on a CPU, so that nothing is left to make its output from.
    words = ("--vpp", "1", "2", "--dtypes", "bf16", "--normalization", "LayerNorm", *only)
    code, rows, printed = run(tmp_path, *words, is_later=is_later)
    check_yes(code, rows, printed)
    left_out = {row["model"] for row in rows.values() if row["status"] == "left out"}
    steps = [rows[f"vpp1 bf16 {model}:none"]["steps"] for model in ("a2a", "overlap")]
    assert steps[0] == steps[1]
    missing = {"cp", "deepep", *check_bitwise._FP8}
    assert left_out == (missing if is_later else missing | {"hybrid"})


@pytest.mark.slow
def test_one_bit_of_a_reloaded_tensor_is_a_no(tmp_path):
    # The second counts the evaluation.
    do = "if steps == 2: tensor.as_strided((1,), (1,)).view(__import__('torch').uint8)[2] ^= 64"
    code, rows, printed = run(tmp_path, *FP32, "--only", "dense:mlp_act", do=do)
    assert code == 1
    assert "bitwise identical: no (1 differs)" in printed
    ranks = rows["vpp2 fp32 dense:mlp_act 0/0"]["ranks"]
    assert ranks[1]["first_difference"] == 2
    assert rows["vpp2 fp32 dense:none, again"]["status"] == "equal"


@pytest.mark.slow
def test_what_hangs_or_raises_is_a_row_and_the_rest_is_checked(tmp_path):
    do = """if self.group_name == "core_attn": time.sleep(1000)
            if self.group_name == "mlp_act": raise ValueError("boom")"""
    only = ("--only", "dense:core_attn", "dense:mlp_act", "dense:layer")
    code, rows, printed = run(tmp_path, *FP32, *only, "--deadline", "10", do=do)
    assert code == 1
    assert "bitwise identical: no (2 failed, 1 equal)" in printed
    # Rank 1 sleeps and rank 0 waits for it: which one's time ends first is open.
    late = rows["vpp2 fp32 dense:core_attn 0/0"]["reason"]
    assert late.partition(": ")[2] == "took too long: Timeout (0:00:10)"
    rank = late.split(":")[0].removeprefix("rank ")
    assert "most recent call first" in (tmp_path / "out/logs" / f"0.rank{rank}.log").read_text()
    assert rows["vpp2 fp32 dense:mlp_act 0/0"]["reason"] == "rank 1: ValueError: boom"


@pytest.mark.slow
def test_without_time_left_nothing_is_a_yes(tmp_path):
    code, rows, _ = run(tmp_path, *FP32, "--only", "dense:layer", "--limit", "0")
    assert code == 1
    row = rows["vpp2 fp32 dense:layer 16KiB/24KiB"]
    assert (row["status"], row["reason"]) == ("not run", "no time left")
