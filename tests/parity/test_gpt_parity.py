"""Megatron-core's own GPT and schedules over two processes: the same bits with and without offload.

PP in {1, 2}; VPP in {1, 2, 4}, one layer a chunk among them (megatron-core has virtual stages for
PP > 1 only); microbatch counts that are no multiples of PP where the schedule takes them; counts
and sequence lengths that change between steps; evaluation before the first step and in between;
tied embeddings, dropout, and recompute of whole layers and of modules. Of the later megatron-core
that `make test` unpacks beside the installed one, those that depend on its call sites and
schedules.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from processes import found_by, path_to, torchrun

WORKER = Path(__file__).parent / "gpt_worker.py"


def case_names():
    """Read the case names off the worker without importing megatron-core here."""
    for node in ast.parse(WORKER.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES":
            return [key.value for key in node.value.keys]
    raise AssertionError("the worker has no CASES")


CASES = {
    "0.16": case_names(),
    "later": [
        "pp2",
        "pp2-vpp4-one-layer-a-chunk",
        "pp2-vpp4-whole-layers",
        "tied-dropout",
        "inputs-of-full-recompute",
        "recompute-core-attention",
        "recompute-norms",
        "rows",
        "rows-of-a-function",
        "found-rows",
    ],
}
QUICK = {
    "0.16": (
        "pp1-mlp",
        "pp2-vpp4-one-layer-a-chunk",
        "tied-dropout",
        "recompute-core-attention",
        "rows",
        "rows-of-a-function",
        "found-rows",
    ),
    "later": ("pp2-vpp4-one-layer-a-chunk", "rows"),
}


def cases():
    """Yield versions with their cases; those that are not in `QUICK` are slow."""
    for version, names in CASES.items():
        for name in names:
            marks = () if name in QUICK[version] else pytest.mark.slow
            yield pytest.param(version, name, marks=marks)


@pytest.fixture(scope="module")
def run(request):
    """Return what runs the selected cases of a version, once: what came of it."""
    mine = [item.callspec.params for item in request.session.items if item.path == request.path]

    @functools.cache
    def run(version):
        names = [params["name"] for params in mine if params["version"] == version]
        on_cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return torchrun(2, WORKER, *names, path=path_to(version), **on_cpu)

    return run


@pytest.mark.parametrize(("version", "name"), [*cases()])
def test_losses_and_gradients_are_those_without_offload(version, name, run):
    ranks = found_by(run(version))[name]
    assert len(ranks) == 2
    assert all(rank["same"] for rank in ranks)
    assert all(rank["gradients_are_real"] for rank in ranks)
    assert sum(rank["num_losses"] for rank in ranks) > 0
    # With full recompute layers run without grad, and again inside backward: nothing to move.
    moves_nothing = name in ("full-recompute", "rows-of-a-function", "found-rows")
    assert all((rank["reloaded_bytes"] > 0) != moves_nothing for rank in ranks)
    if name == "inputs-of-full-recompute":  # though the schedule holds a chunk's first
        assert [rank["externally_referenced_bytes"] for rank in ranks] == [0, 0]
    if name == "rows-of-a-function":
        assert all(rank["recomputed_bytes"]["mlp_act"] for rank in ranks)
    if name == "found-rows":
        assert all(rank["recomputed_bytes"]["layer"] for rank in ranks)
        for rank, layers in zip(ranks, ("0-1,4-5", "2-3,6-7"), strict=True):
            assert f'{{layers: "{layers}", site: layer, recompute: true}}' in rank["rows"]
    if name == "rows":
        assert ["core_attn" in rank["recomputed_bytes"] for rank in ranks] == [False, True]
        assert all(rank["recomputed_bytes"][site] for rank in ranks for site in ("layer", "norm"))
        # The second rank has no MLP that is recomputed as a whole.
        assert ranks[1]["recomputed_bytes"]["mlp"], "the activation, in a group of an MLP's"
