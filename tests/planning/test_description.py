"""What a layer saves and computes, against a real one; and what a description may say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.planning.description import (
    JobDescription,
    ModelDescription,
    job_from_model,
    num_parameters,
)
from megatron_offload.planning.replay import step_profile
from megatron_offload.planning.simulate import simulate

ROOT = Path(__file__).parent.parent.parent
MIB = 2**20
COMPARE = runpy.run_path(str(ROOT / "benchmarks" / "compare_simulation.py"))

SHAPE_C = {
    "layers": 16,
    "hidden": 8192,
    "ffn": 32768,
    "heads": 64,
    "vocabulary": 32000,
    "sequence": 4096,
    "num_microbatches": 8,
    "pipeline_parallel": 4,
    "virtual_stages": 2,
    "peak_tflops": 989.0,
    "achieved_share": 0.6,
    "memory_gbps": 4800.0,
}


def describe(**changes):
    return validate(ModelDescription, SHAPE_C | changes, "model.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hiden": 1}, "unknown key 'hiden'; did you mean 'hidden'"),
        ({"layers": 15}, "15 layers don't divide into 8 stages"),
        ({"heads": 3}, "hidden 8192 is no multiple of 3"),
        ({"kv_heads": 7}, "heads 64 is no multiple of 7"),
        ({"modules": ["mlp_fc3"]}, "unknown group 'mlp_fc3'; did you mean 'mlp_fc"),
        ({"achieved_share": 1.5}, "achieved_share"),
        ({"sequence": 0}, "sequence"),
        ({"layers": 10**6}, "layers"),
        ({"tensor_parallel": 3}, "heads 64 is no multiple of 3"),
        ({"schedule": "1f2b"}, "schedule"),
    ],
)
def test_a_wrong_description_is_refused_by_name(change, said):
    with pytest.raises(ConfigError, match=said):
        describe(**change)


def test_weights_are_those_that_the_real_model_counted():
    # docs/benchmarks/h200/shape_c.json, "parameters" of the four ranks.
    counted = [3483435008, 3221291008, 3221291008, 3483443200]
    assert [num_parameters(describe(), rank) for rank in range(4)] == counted


def test_groups_hold_what_the_engine_saw_them_hold():
    # The steps of the clock in "device_profile" of shape_c.json, whose first stage has its input to
    # itself: 4096 tokens of 8192 values in bf16 are 64 MiB, scores of 64 heads 1 MiB.
    groups = [g for g in step_profile(job_from_model(describe()), 0).groups if g.key.chunk == 0]
    names = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]
    assert [g.name for g in groups] == names * 2
    assert [g.num_bytes // MIB for g in groups] == [128, 257, 0, 128, 256, 256] * 2


def test_the_input_of_a_later_stage_is_held_by_the_schedule():
    first = job_from_model(describe()).stages[1].groups[0]
    assert (first.num_bytes // MIB, first.kept_bytes // MIB) == (64, 64)


def test_norms_that_are_not_fused_are_groups_with_the_same_bytes_in_all():
    fused, apart = (job_from_model(describe(fused_norm=flag)).stages[0] for flag in (True, False))
    assert [g.name for g in apart.groups[1:9]][::4] == ["attn_norm", "mlp_norm"]
    assert sum(g.num_bytes for g in apart.groups) == sum(g.num_bytes for g in fused.groups)


def test_small_tensors_and_unmarked_groups_stay():
    stage = job_from_model(describe(min_tensor_bytes="2MiB", modules=["core_attn"])).stages[0]
    marked = [group for group in stage.groups if group.is_marked]
    assert [group.name for group in marked] == ["core_attn"] * 2
    assert (marked[0].num_bytes // MIB, marked[0].kept_bytes // MIB) == (256, 1)


def test_grouped_queries_and_gates_change_what_is_saved():
    groups = job_from_model(describe(kv_heads=8, gated_mlp=True)).stages[0].groups
    by_name = {group.name: group for group in groups}
    assert by_name["core_attn"].num_bytes // MIB == 2 * 64 + 2 * 8 + 1
    assert by_name["mlp_act"].num_bytes // MIB == 512


def test_tensor_parallel_divides_bytes_weights_and_time():
    one, four = job_from_model(describe()), job_from_model(describe(tensor_parallel=4))
    assert four.gpus_per_rank == 4
    for a, b in zip(one.stages[0].groups, four.stages[0].groups, strict=True):
        assert b.num_bytes + b.kept_bytes == (a.num_bytes + a.kept_bytes) // 4
        assert b.forward_us == pytest.approx(a.forward_us / 4)
        assert b.backward_us == pytest.approx(a.backward_us / 4)


def test_stages_tell_how_much_the_host_launches_in_a_pass():
    stages = job_from_model(describe(launches_per_layer=50)).stages
    assert [stage.num_launches for stage in stages] == [2 * 50 / 2] * 8


def test_time_is_flop_over_what_is_achieved():
    # Of a layer's forward: 24 h^2 FLOP a token for the products at f = 4h, and 2 h s for attention.
    quick = job_from_model(describe(memory_gbps=1e12)).stages[1]
    layer_us = sum(group.forward_us for group in quick.groups) / 2
    flop = 4096 * (24 * 8192**2 + 2 * 8192 * 4096)
    assert layer_us == pytest.approx(flop / (989e6 * 0.6), rel=1e-6)


def test_the_share_is_fitted_to_a_step_and_never_beyond_all():
    fit_achieved_share = COMPARE["fit_achieved_share"]
    model = fit_achieved_share(describe(), 1.5e6)
    assert simulate(job_from_model(model)).step_us == pytest.approx(1.5e6, rel=1e-5)
    with pytest.raises(ConfigError, match="no achieved_share up to 1"):
        fit_achieved_share(describe(), 0.5e6)


def test_the_predictions_of_the_documents_are_those_of_the_code_and_near_the_measured():
    documented = json.loads((ROOT / "docs" / "benchmarks" / "simulation.json").read_text())
    for file in ("shape_c", "shape_b"):
        rows = COMPARE["compare"](file)
        assert rows == [row for row in documented["rows"] if row["file"] == f"{file}.json"]
    for row in documented["rows"]:
        assert abs(row["step_ms"]["worst_percent"]) <= 5
        assert abs(row["allocated_gib"]["worst_percent"]) <= 2.5
        assert abs(row["reserved_gib"]["worst_percent"]) <= 5


def test_gpus_of_a_node_count_those_of_tensor_parallelism():
    def job(tensor_parallel, **machine):
        model = SHAPE_C | {"pipeline_parallel": 8, "tensor_parallel": tensor_parallel}
        model |= {"virtual_stages": 1}
        return validate(JobDescription, {"model": model, "machine": machine}, "job").job()

    assert [job(1).ranks_per_node, job(2).ranks_per_node, job(8).ranks_per_node] == [4, 2, 1]
    assert (job(8).machine.gpus_per_node, job(2).machine.gpus_per_node) == (8, 4)
    assert job(8, gpus_per_node=16).ranks_per_node == 2
    with pytest.raises(ConfigError, match=r"tensor_parallel 8 doesn't fit into a node of .* 4"):
        job(8, gpus_per_node=4)
