"""Megatron-core's own layers and schedules, with this package in the place of its offload.

The programs of `megatron_programs` run in one process for each version of megatron-core and each
order of imports.
"""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import megatron_cases
import pytest
from processes import found_by, path_to, run_python
from torch.utils.cpp_extension import get_default_build_root

PROGRAM = Path(__file__).with_name("megatron_programs.py")

ATTENTION = {*megatron_cases.ATTENTION}
INPUTS = ("inputs", "inputs-of-two-layers", "inputs-in-shares")
BY_ROWS = {"core_attn": 6, "expert_fc1": 6, "moe_act": 6, "mlp_norm": 3}
ROWS = {
    "rows": BY_ROWS,
    "rows-overlapped": BY_ROWS,
    "rows-of-further-tokens": {"core_attn": 3, "mlp_act": 0},
}
MOVES = {
    "dense": ATTENTION,
    "names-beyond": ATTENTION | {"mlp_fc1", "**.linear_fc2"},
    "names-beyond-alone": {"mlp_fc1"},
    "moe": ATTENTION | {"expert_fc1", "moe_act"},
    "moe-one-by-one": ATTENTION,
    "moe-recompute-act": {"expert_fc1", "moe_act"},
    "selective-recompute": {"attn_norm", "attn_proj", "mlp_norm"},
    **{case: {"layer_input"} for case in INPUTS},
    "inputs-of-some-layers": ATTENTION | {"layer_input", "mlp_fc1"},
    "evaluation": ATTENTION,
    "evaluation-with-grad": ATTENTION,
    "captured": ATTENTION,
    "captured-moe": ATTENTION | {"expert_fc1", "moe_act"},
    "captured-inputs": {"layer_input"},
    **{case: set(groups) for case, groups in ROWS.items()},
}
BOTH = {"norm", "mlp_act"}
RECOMPUTED = {
    "none-again": set(),
    **dict.fromkeys(("by-default", "gelu", "gelu-fused", "gated-fused", "moe-gated-fused"), BOTH),
    "gated": {"norm"},  # by parts that have no name
    "moe-gated": {"norm"},
    "latent": BOTH,
}
STAYS = ["nothing-listed-is-large", "full-recompute"]
LATER_ONLY = {
    "half": ATTENTION,
    "kept-bytes": ATTENTION,
    "wait-at-commit": ATTENTION,
    "one-in-flight": ATTENTION,
    "delayed": {"expert_fc1", "moe_act"},
}
RUNS = {
    ("0.16", "imports-first"): [*MOVES, *STAYS, *RECOMPUTED],
    ("0.16", "installed-first"): ["dense", "moe", "selective-recompute"],
    ("later", "imports-first"): [*MOVES, *STAYS, *LATER_ONLY, "none", *RECOMPUTED],
    ("later", "installed-first"): ["dense", "moe", "selective-recompute"],
}


def drop_stale_locks():
    """Take away locks of runs that were killed while they compiled: others wait for them."""
    for lock in Path(get_default_build_root()).rglob("lock"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - lock.stat().st_mtime > 300:
                lock.unlink()


@functools.cache
def outcome(run):
    """Run a process; return what became of it."""
    version, order = run
    drop_stale_locks()
    return run_python(PROGRAM, order, *RUNS[run], path=path_to(version))


def finding(run):
    found = found_by(outcome(run))
    assert found["version"].startswith("0.16.") == (run[0] == "0.16")
    return found


def param(run, *case):
    marks = pytest.mark.slow if run[1] == "installed-first" else ()
    return pytest.param(run, *case, id="-".join((*run, *case)), marks=marks)


def programs(*cases):
    """Parametrise by run and case, of those runs that have the case."""
    pairs = [param(run, case) for run, known in RUNS.items() for case in cases if case in known]
    return pytest.mark.parametrize(("run", "case"), pairs)


@programs(*MOVES, *STAYS, *LATER_ONLY, "none", *RECOMPUTED)
def test_losses_and_gradients_are_those_without_offload_and_nothing_is_left(run, case):
    found = finding(run)["cases"][case]
    assert found["finite"]
    assert found["equal"]
    for step in found["steps"]:
        assert not any(step["left"].values())
        assert step["reloaded_bytes"] <= step["offloaded_bytes"]


@programs(*(case for case in MOVES if "captured" in case))
def test_a_step_of_megatrons_schedule_asks_for_nothing_that_a_capture_forbids(run, case):
    steps = finding(run)["cases"][case]["steps"]
    assert [step["is_captured"] for step in steps] == [False, False, True]
    assert steps[-1]["reloaded_bytes"] == steps[-2]["reloaded_bytes"] > 0


@programs(*MOVES, *LATER_ONLY)
def test_all_listed_groups_move_from_the_first_step_on(run, case):
    steps = finding(run)["cases"][case]["steps"]
    expected = {**MOVES, **LATER_ONLY}[case]
    assert set(steps[0]["names"]) == expected
    assert steps[0]["offloaded_bytes"] > 0
    assert steps[0]["summary"]
    assert set(steps[0]["summary"]) <= expected


@programs(*MOVES, "wait-at-commit", "one-in-flight", "delayed")
def test_every_learned_step_moves_the_same_bytes_of_the_same_names(run, case):
    """Inputs of checkpoints without output too, though Megatron saves detached copies of them."""
    found = finding(run)["cases"][case]["steps"]
    first, *steps = (step["offloaded_bytes"] for step in found)
    assert len(set(steps)) == 1
    assert 0 < steps[0] <= first, "the first can't know yet what something else keeps anyway"
    assert all(step["names"] == found[0]["names"] for step in found)


@programs(*INPUTS)
def test_of_a_checkpoint_hidden_states_leave_and_nothing_else(run, case):
    hidden_bytes = 16 * 2 * 32 * 4
    segments = 2 if case == "inputs-of-two-layers" else 4
    for step in finding(run)["cases"][case]["steps"]:
        assert step["groups"] == {"layer_input": 3 * segments}
        assert step["offloaded_bytes"] == 3 * segments * hidden_bytes


@programs("inputs-of-some-layers")
def test_layers_that_are_not_recomputed_have_the_groups_that_they_always_have(run, case):
    for step in finding(run)["cases"][case]["steps"]:
        assert set(step["groups"].values()) == {6}, "two layers of each kind, three microbatches"


@programs(*ROWS)
def test_marked_groups_are_those_of_the_layers_that_rows_name(run, case):
    found = finding(run)["cases"][case]
    for step in found["steps"][1:]:  # in the first a forward is watched
        assert step["groups"] == ROWS[case], "three microbatches of each layer"
    if "further" in case:
        assert step["recomputed"]["mlp_act"] == 6 << 13, "of two layers, 8 KiB each"
    else:
        assert found["recomputed"] == [False, True, True, False]
    if case == "rows":  # two of 8 KiB in each core, and of a norm not its statistics
        summary = {
            "core_attn": 2 << 14,
            "expert_fc1": 1 << 14,
            "moe_act": 1 << 16,
            "mlp_norm": 4096,
        }
        assert found["steps"][-1]["summary"] == summary


@programs("rows", "rows-overlapped", "moe-recompute-act")
def test_what_megatron_recomputes_is_counted_where_rows_have_asked_for_it(run, case):
    sizes = {"rows": 4, "rows-overlapped": 2, "moe-recompute-act": 0}  # of an element
    expected = 2 * 3 * 2 * 16 * 2 * 64 * sizes[case]  # two experts for a token
    for step in finding(run)["cases"][case]["steps"]:
        assert step["recomputed"].get("moe_act", 0) == expected


@programs(*STAYS, "none")
def test_nothing_moves_where_nothing_should(run, case):
    assert [step["offloaded_bytes"] for step in finding(run)["cases"][case]["steps"]] == [0, 0, 0]


@programs("half")
def test_megatrons_fraction_reaches_the_policy(run, case):
    steps = finding(run)["cases"][case]["steps"]
    assert [step["kept"] for step in steps] == [12, 12, 12]  # of 24 that hold something
    assert steps[1]["offloaded_bytes"] < steps[0]["offloaded_bytes"]


@programs(*RECOMPUTED)
def test_each_unit_is_recomputed(run, case):
    for step in finding(run)["cases"][case]["steps"]:
        assert set(step["remade"]) == RECOMPUTED[case]


@pytest.mark.parametrize("run", [param(run) for run in RUNS])
def test_install_patches_every_reference_and_uninstall_restores_exactly(run):
    references = finding(run)["references"]
    assert references["num_shared"] >= 14
    for where in ("module", "reference", "class", "manager"):
        assert references[where], where
    assert references["changed"] == []
    assert references["added"] == []
