"""What a layer saves and computes, against a real one; and what a description may say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.description import (
    JobDescription,
    fit,
    job_from_model,
    load_description,
)
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.model import ModelDescription
from megatron_offload.planning.model_cost import LayerCosts
from megatron_offload.planning.parameters import static_bytes, weights_of
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
        ({"layers": 15}, "15 layers don't divide into 8 stages; stage_layers says"),
        ({"heads": 3}, "hidden 8192 is no multiple of 3"),
        ({"kv_heads": 7}, "heads 64 is no multiple of 7"),
        ({"modules": ["mlp_fc3"]}, "unknown group 'mlp_fc3'; did you mean 'mlp_fc"),
        ({"achieved_share": 1.5}, "achieved_share"),
        ({"peak_tflops": 1e308, "memory_gbps": 5e-324}, "peak_tflops(.|\n)*memory_gbps"),
        ({"static_bytes_per_parameter": 1e308, "stage_layers": [-1]}, "layers.0(.|\n)*static"),
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
    assert [weights_of(describe(), rank).number for rank in range(4)] == counted


def test_groups_hold_what_the_engine_saw_them_hold():
    # The steps of the clock in "device_profile" of shape_c.json, whose first stage has its input to
    # itself: 4096 tokens of 8192 values in bf16 are 64 MiB, scores of 64 heads 1 MiB.
    groups = [group for group in job_from_model(describe()).stages[0].groups if group.is_marked]
    names = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]
    assert [g.name for g in groups] == names * 2
    assert [g.num_bytes // MIB for g in groups] == [128, 257, 0, 128, 256, 256] * 2


def test_norms_that_are_not_fused_are_groups_with_the_same_bytes_in_all():
    fused, apart = (job_from_model(describe(fused_norm=flag)).stages[0] for flag in (True, False))
    assert [g.name for g in apart.groups[1:9]][::4] == ["attn_norm", "mlp_norm"]
    assert sum(g.num_bytes for g in apart.groups) == sum(g.num_bytes for g in fused.groups)


def test_small_tensors_and_unmarked_groups_are_kept():
    stage = job_from_model(describe(min_tensor_bytes="2MiB", modules=["core_attn"])).stages[0]
    marked = [group for group in stage.groups if group.is_marked]
    assert [group.name for group in marked] == ["core_attn"] * 2
    # The output of the core is kept, as its projection, no group, has it too; so do sums of scores,
    # and sines and cosines.
    assert (marked[0].num_bytes // MIB, marked[0].kept_bytes // MIB) == (192, 64 + 1 + 4)


def test_tensor_parallel_divides_bytes_weights_and_time():
    silent = Machine(nvlink_gbps=1e12, p2p_latency_us=0)
    one, four = (job_from_model(describe(rotary=False, tensor_parallel=n), silent) for n in (1, 4))
    assert four.gpus_per_rank == 4
    least_us = 2 * 2  # of a product of any size
    for a, b in zip(one.stages[0].groups, four.stages[0].groups, strict=True):
        assert b.num_bytes + b.kept_bytes == (a.num_bytes + a.kept_bytes) // 4
        assert b.forward_us == pytest.approx(a.forward_us / 4, abs=least_us)
        assert b.backward_us == pytest.approx(a.backward_us / 4, abs=least_us)


def test_products_are_quicker_beside_what_only_reads_and_writes():
    def product_us(**changes):
        groups = job_from_model(describe(rotary=False, **changes)).stages[1].groups
        return next(g for g in groups if g.name == "mlp_fc2").backward_us

    # At its limit of power a GPU has more clock for products where it often waits for memory.
    slow, plain = (
        product_us(fused_gradients=True, memory_gbps=1e12),
        product_us(fused_gradients=True),
    )
    assert 0.95 * slow < plain < 0.995 * slow
    assert product_us(fused_gradients=True, memory_gbps=10.0) == pytest.approx(
        0.85 * slow, rel=1e-3
    ), "and no more than its full clock"


@pytest.mark.parametrize("hidden", [2048, 4096, 8192])
def test_a_step_of_one_size_predicts_those_of_the_others(hidden, tmp_path):
    data = json.loads((ROOT / "docs" / "benchmarks" / "h200" / "layers.json").read_text())
    fitted, others = data["shapes"][str(hidden)], ("2048", "4096", "8192", "2048-small", "1024")
    keys = COMPARE["SIZES"]

    def given(sizes):
        known = {key: sizes[name] for key, name in keys.items()}
        return known | {"ffn": 4 * sizes["hidden"]}

    for name in others:
        shape = data["shapes"][name]
        measured = {"step_ms": fitted["step_ms"], "model": given(fitted["sizes"])}
        model = {"peak_tflops": 989.0, "memory_gbps": 4800.0} | given(shape["sizes"])
        (tmp_path / "job.yaml").write_text(json.dumps({"model": model, "measured": measured}))
        job = load_description(tmp_path / "job.yaml").job()
        assert simulate(job).step_us / 1e3 == pytest.approx(shape["step_ms"], rel=0.05), name


def test_the_host_draws_out_what_the_device_does_sooner():
    small = {"hidden": 512, "ffn": 2048, "heads": 4, "sequence": 512, "vocabulary": 512}
    job = job_from_model(describe(**small, host_us_per_launch=30))
    stage_us = 2 * 30 * 76
    assert simulate(job).ranks[1].compute_us == pytest.approx(2 * 8 * stage_us)
    moving = simulate(job, RankSettings())
    marked = sum(group.is_marked for group in job.stages[1].groups)
    assert moving.ranks[1].compute_us == pytest.approx(2 * 8 * (stage_us + marked * 350))


def test_context_parallel_is_one_rank_s_share_of_the_tokens():
    one, four = job_from_model(describe()), job_from_model(describe(context_parallel=4))
    assert four.gpus_per_rank == 4
    assert four.static_bytes == one.static_bytes
    for a, b in zip(one.stages[-1].groups, four.stages[-1].groups, strict=True):
        saved = a.num_bytes + a.kept_bytes
        assert b.num_bytes + b.kept_bytes == saved // 4
    attention = [
        next(g for g in job.stages[0].groups if g.name == "core_attn") for job in (one, four)
    ]
    assert attention[1].forward_us == pytest.approx(attention[0].forward_us / 4, rel=0.02), (
        "a quarter of the queries, each against the whole sequence"
    )
    with pytest.raises(ConfigError, match="sequence 4096 is no multiple of 3"):
        describe(context_parallel=3)


def test_stages_may_have_other_numbers_of_layers():
    uneven = describe(stage_layers=[1, 3, 2, 2, 2, 2, 2, 2])
    stages = job_from_model(uneven).stages
    counts = [sum(group.name == "core_attn" for group in stage.groups) for stage in stages]
    assert counts == [1, 3, 2, 2, 2, 2, 2, 2]
    assert weights_of(uneven, 1).number > weights_of(uneven, 2).number
    for wrong in ([2] * 7, [1] * 8):
        with pytest.raises(ConfigError, match=r"stage_layers .* the model has 8 with 16"):
            describe(stage_layers=wrong)


MOE = {"experts": 8, "experts_per_token": 2, "expert_ffn": 4096, "gated_mlp": True}
MOE |= {"data_parallel": 4}


def test_experts_take_as_many_tokens_a_gpu_as_are_chosen():
    groups = job_from_model(describe(**MOE, expert_parallel=4)).stages[1].groups
    by_name = {group.name: group for group in groups}
    assert "mlp_fc1" not in by_name
    names = ("mlp_norm", "expert_fc1", "moe_act", "expert_fc2")
    # The activation has its input, both halves of the gate, and what probabilities multiply.
    sizes = [64, 2 * 64, 2 * (64 + 3 * 32), 2 * 32]
    assert [by_name[name].num_bytes // MIB for name in names] == sizes
    assert (by_name["router"].is_marked, by_name["router"].kept_bytes // MIB) == (False, 64)
    assert [unit.unit for unit in by_name["expert_fc2"].units] == ["moe_act"]
    alone = job_from_model(describe(**MOE)).stages[1].groups
    units = {unit.unit: unit.num_bytes // MIB for group in alone for unit in group.units}
    assert units == {"norm": 64, "moe_act": 64}


def test_weights_of_experts_are_shared_and_the_first_layers_may_be_dense():
    def weights(**changes):
        return weights_of(describe(**MOE, **changes), 1).number

    expert = 3 * 4096 * 8192
    assert weights() - weights(expert_parallel=4) == 4 * 6 * expert
    assert weights(shared_expert_ffn=1024) - weights() == 4 * 3 * 1024 * 8192
    adapted = (1 + 3) + (1 + 1) + 8 * ((1 + 1) + (0.5 + 1))  # of attention and of each expert
    assert weights(lora_rank=16) - weights() == 4 * 16 * adapted * 8192
    stages = job_from_model(describe(**MOE, dense_layers=3)).stages
    names = [[g.name for g in stage.groups if g.name.endswith("_fc1")] for stage in stages[:2]]
    assert names == [["mlp_fc1", "mlp_fc1"], ["mlp_fc1", "expert_fc1"]]
    with pytest.raises(ConfigError, match="experts 8 is no multiple of 3"):
        describe(**MOE, expert_parallel=3)
    with pytest.raises(ConfigError, match="expert_parallel 8 doesn't divide the 4 GPUs of a stage"):
        describe(**MOE, expert_parallel=8)


def test_the_share_is_fitted_to_a_step_and_never_beyond_all():
    model = fit(describe(), 1.5e6)
    assert simulate(job_from_model(model)).step_us == pytest.approx(1.5e6, rel=1e-5)
    with pytest.raises(ConfigError, match="no achieved_share up to 1"):
        fit(describe(), 0.5e6)


def test_a_step_that_waits_for_the_host_fits_the_host():
    small = describe(layers=16, hidden=1024, ffn=4096, heads=16, sequence=512)
    step_us = simulate(job_from_model(small)).step_us
    fitted = fit(small, 0.8 * step_us)
    assert simulate(job_from_model(fitted)).step_us == pytest.approx(0.8 * step_us, rel=1e-5)
    assert fitted.achieved_share == small.achieved_share
    assert fitted.host_us_per_group == pytest.approx(0.8 * small.host_us_per_group, rel=0.01)


def test_what_if_changes_the_model_and_not_the_share_of_the_measured_step():
    path = ROOT / "configs" / "models" / "gpt_16x8192_pp4_vpp2.yaml"
    share = load_description(path).model.achieved_share
    changes = ["sequence=8192", "sequence=2048", "layers=8", "num_microbatches=16", "kv_heads=8"]
    for change in changes:
        asked = load_description(path, [f"model.{change}"])
        assert asked.model.achieved_share == share, change
    other = load_description(path, ['machine={"p2p_gbps": 2}', "machine.p2p_gbps=1"])
    assert (other.model.achieved_share, other.machine.p2p_gbps) == (share, 1)
    half = load_description(path, ["model.layers=8", "measured.step_ms=2969.4"])
    assert half.model.achieved_share == pytest.approx(share / 2, rel=0.1), "of all 16 layers"


def test_a_measured_step_needs_a_whole_model_beside_it(tmp_path):
    path = tmp_path / "job.yaml"
    model = {key: value for key, value in SHAPE_C.items() if key != "sequence"}
    path.write_text(json.dumps({"model": model, "measured": {"step_ms": 1500}}))
    with pytest.raises(ConfigError, match=r"measured: 'model\.sequence' is required"):
        load_description(path, ["model.sequence=4096"])


def test_the_predictions_of_the_documents_are_those_of_the_code_and_near_the_measured():
    documented = json.loads((ROOT / "docs" / "benchmarks" / "simulation.json").read_text())["rows"]
    for file in ("h200/shape_c.json", "h200/lora_found_rows_before.txt"):
        assert COMPARE["compare"](file) == [row for row in documented if row["file"] == file]
    page = (ROOT / "docs" / "simulation.md").read_text()
    assert "\n".join(COMPARE["table"](documented)) in page
    for row in documented:
        errors = {x: abs(row[x]["worst_percent"]) for x in ("allocated_gib", "reserved_gib")}
        assert errors["allocated_gib"] <= 2, row
        assert errors["reserved_gib"] <= 4, row
        is_far = "experts" in row["job"] or row["job"].startswith("24 x 2048")  # wait for the host
        assert abs(row["step_ms"]["worst_percent"]) <= 5 or is_far, row


def test_products_have_workspaces_and_small_weights_leave_parts_of_their_segments():
    def beside(**changes):
        model = describe(pipeline_parallel=1, virtual_stages=1, **changes)
        job = job_from_model(model)
        return (job.static_bytes[0] - static_bytes(model, 0)) // MIB, job.unused_bytes[0]

    # An expert's weights and their gradients have 5.5 MiB: three lie in a segment of 20.
    experts = {"hidden": 2048, "ffn": 8192, "heads": 16, "expert_ffn": 1408, "experts": 32}
    attention_bytes = 2 * 16 * (20 // 2 - 8) * MIB
    assert beside() == (3 * 32, 0)
    assert beside(**experts) == (
        7 * 32,
        2 * 16 * 64 * (20 * MIB // 3 - 11 * MIB // 2) + attention_bytes,
    )
    assert beside(**experts, expandable_segments=True) == (7 * 32, 0)
    assert beside(eager_kernels=True, optimizer="adam", hidden=2048) == (2 * 32, 0)


def test_a_recomputed_layer_has_no_more_than_its_groups_before_have_saved():
    model = describe(recompute="full")
    last, *before = reversed(LayerCosts(model)._layer(0))
    (layer,) = LayerCosts(model).layer(0)
    saved = sum(group.saved_bytes for group in before) + last.saved_bytes
    peak = layer.backward_temp_bytes + layer.backward_block_bytes
    assert peak == saved + last.backward_temp_bytes, "that of the second linear layer's backward"


def test_gpus_of_a_node_count_those_of_tensor_parallelism():
    def job(tensor_parallel, **machine):
        model = SHAPE_C | {"pipeline_parallel": 8, "tensor_parallel": tensor_parallel}
        model |= {"virtual_stages": 1}
        return validate(JobDescription, {"model": model, "machine": machine}, "job").job()

    assert [job(1).ranks_per_node, job(2).ranks_per_node, job(4).ranks_per_node] == [4, 2, 1]
    assert job(8, gpus_per_node=16).ranks_per_node == 2
    with pytest.raises(ConfigError, match=r"tensor_parallel 8 doesn't fit into a node of .* 4"):
        job(8)


def test_units_that_the_job_recomputes_are_no_longer_saved():
    def saved(*units):
        groups = job_from_model(describe(recompute=list(units))).stages[1].groups
        return sum(group.num_bytes for group in groups[:6]) // MIB

    assert saved() - saved("norm") == 2 * 64
    assert saved() - saved("norm", "mlp_act") == 2 * 64 + 256
    with pytest.raises(ConfigError, match="recompute"):
        describe(recompute=["nrm"])
