"""Rows on described jobs: bytes that no row names are kept, and none are lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from problems import PIPELINE

from megatron_offload.core.row_config import RowConfig
from megatron_offload.files.strict_model import validate
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.description import job_from_model
from megatron_offload.planning.frontier import Plan
from megatron_offload.planning.job_rows import (
    WHOLE_SITES,
    RankLayers,
    inflight,
    units_of,
    with_rows,
    with_units,
)
from megatron_offload.planning.model import ModelDescription
from megatron_offload.planning.simulate import simulate

MODEL = {**PIPELINE, "hidden": 2048, "ffn": 8192, "heads": 16, "microbatch": 2}
MODELS = {
    "dense": {},
    "norms apart": {"fused_norm": False, "gated_mlp": True},
    "experts": {"experts": 8, "shared_expert_ffn": 1024, "dense_layers": 2},
}


@pytest.fixture(params=MODELS)
def job(request):
    return job_from_model(validate(ModelDescription, MODEL | MODELS[request.param], "model"))


def saved(job):
    """Return what each stage saves in all, and what rows have freed of it for recompute."""
    return [
        sum(
            group.saved_bytes + sum(unit.num_bytes for unit in group.recomputed)
            for group in stage.groups
        )
        for stage in job.stages
    ]


def rows_of(action, layer):
    return Plan({layer: action}, 0, 0.0, 0).rows()


def test_without_rows_all_is_kept(job):
    bare = with_rows(job, ())
    assert saved(bare) == saved(job)
    assert not any(group.is_marked for stage in bare.stages for group in stage.groups)
    assert simulate(bare).step_us == simulate(job).step_us


def test_each_action_conserves_bytes_and_frees_what_it_says(job):
    for rank in range(2):
        held, stages = inflight(job, rank), job.schedule.stages_of(rank)
        for layer, actions in RankLayers(job, rank).actions(WHOLE_SITES).items():
            assert {one.parts for one in actions} >= {(("layer", "recompute"),)}
            for action in actions:
                rows = rows_of(action, layer)
                after = with_rows(job, rows)
                assert saved(after) == saved(job), rows
                freed_bytes = copied_bytes = 0
                for stage in stages:
                    pairs = after.stages[stage].groups, job.stages[stage].groups
                    moved = sum(group.num_bytes for group in pairs[0] if group.is_marked)
                    kept = sum(group.saved_bytes for group in pairs[0]) - moved
                    before = sum(group.saved_bytes for group in pairs[1])
                    freed_bytes += held[stage] * (before - kept)
                    copied_bytes += moved
                assert (freed_bytes, copied_bytes) == (action.freed_bytes, action.copied_bytes)
                took_us = sum(
                    sum(g.backward_us for g in after.stages[x].groups)
                    - sum(g.backward_us for g in job.stages[x].groups)
                    for x in stages
                )
                if not action.copied_bytes:  # of a copy it is for an order alone
                    assert took_us == pytest.approx(action.us, rel=1e-2)


def test_units_run_again_in_all_layers_and_what_a_whole_site_keeps_is_its_input(job):
    assert units_of(job) == ("norm", "mlp_act")
    rows = [RowConfig(site=unit, recompute=True) for unit in units_of(job)]
    for layer, actions in RankLayers(job, 0, units_of(job)).actions(WHOLE_SITES).items():
        *others, whole = (rows_of(action, layer) for action in actions)
        assert others[0] == tuple(rows)
        assert all(own[:2] == others[0] for own in others)
        assert [row.site for row in whole] == ["layer"]
    unitwise, alone = with_rows(job, rows), with_units(job, units_of(job))
    for one, other in zip(unitwise.stages, alone.stages, strict=True):
        assert sum(g.saved_bytes for g in one.groups) == sum(g.saved_bytes for g in other.groups)
    again = with_rows(job, [*rows, RowConfig(site="layer", recompute=True)])
    assert again == with_rows(job, [RowConfig(site="layer", recompute=True)])
    for stage in again.stages:
        layers = [group for group in stage.groups if group.layer is not None]
        assert {group.saved_bytes for group in layers} == {stage.output_bytes}


def test_what_is_recomputed_waits_for_what_it_is_made_from(job):
    rows = [RowConfig(site="mlp", offload="all"), RowConfig(site="mlp_act", recompute=True)]
    for stage in with_rows(job, rows).stages:
        before = None
        for group in stage.groups:
            if group.name in ("mlp_fc2", "expert_fc2"):
                (unit,) = group.recomputed
                assert unit.parents == (before.name,)
                assert before.is_marked
            before = group


def test_paced_layers_do_the_same_in_another_order(job):
    layers = RankLayers(job, 0)
    actions = layers.actions(WHOLE_SITES)
    most = {layer: max(own, key=lambda one: one.copied_bytes) for layer, own in actions.items()}
    first = min(actions)
    for plan in (Plan(most, 0, 0.0, 0), Plan(most | {first: actions[first][0]}, 0, 0.0, 0)):
        found = layers.paced(plan, actions).actions
        assert sorted(found.values()) == sorted(plan.actions.values())
        assert all(found[layer] in (*actions[layer], *plan.actions.values()) for layer in found)


@pytest.mark.parametrize("num_layers", [2, 4, 5])
def test_copies_that_fill_the_link_begin_at_even_distances(num_layers):
    model = MODEL | {"layers": 8, "pipeline_parallel": 1, "virtual_stages": 1}
    layers = RankLayers(job_from_model(validate(ModelDescription, model, "model")), 0)
    actions = layers.actions(())
    some = {x: max(own, key=lambda one: one.copied_bytes) for x, own in actions.items()}
    some |= {x: own[0] for x, own in actions.items() if x >= num_layers}
    found = [
        x for x, one in layers.paced(Plan.of(some), actions).actions.items() if one.copied_bytes
    ]
    gaps = {after - before for before, after in pairwise((*found, 8))}
    assert found[0] == 0
    assert max(gaps) - min(gaps) <= 2


def test_copies_of_a_rank_without_other_microbatches_have_the_link_one_way():
    machine = Machine(d2h_gbps=50, h2d_gbps=50, both_gbps=40, node_gbps=40, gpus_per_node=1)
    found = []
    for num_ranks in (1, 2):
        model = MODEL | {"pipeline_parallel": num_ranks, "virtual_stages": 1}
        job = job_from_model(validate(ModelDescription, model, "model"), machine)
        found.append(RankLayers(job, 0).link_bytes_per_us)
    assert found == [40e3, 20e3]
