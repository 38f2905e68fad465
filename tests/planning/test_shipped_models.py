"""Shipped descriptions against published counts, and the GPUs that descriptions name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_offload.config import config_folder, load_yaml
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.planning.description import JobDescription, load_description
from megatron_offload.planning.parameters import static_bytes, weights_of

MODELS = Path(__file__).parent.parent.parent / "configs" / "models"
ALONE = dict.fromkeys(("pipeline_parallel", "virtual_stages", "tensor_parallel"), 1)
ALONE |= {"expert_parallel": 1, "stage_layers": None}
ALONE |= {f"account_for_{end}_in_pipeline_split": False for end in ("embedding", "loss")}

PUBLISHED = {
    # Of the safetensors index beside each model's weights, which count what they hold.
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30.5e9,  # arXiv:2505.09388, and the model's card
    "qwen3_235b_a22b": 235e9,  # likewise
    "gpt_oss_120b": 116.83e9,  # arXiv:2508.10925, table 1
    "deepseek_v3": 671e9 + 11.5e9,  # README_WEIGHTS beside its weights: MTP has so many of its own
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name):
    model = load_description(MODELS / f"{name}.yaml").model
    counted = weights_of(model.model_copy(update=ALONE), 0).number
    assert counted == pytest.approx(PUBLISHED[name], rel=0.01)


def described(gpu="B200", **changes):
    sizes = {"layers": 4, "hidden": 1024, "ffn": 4096, "heads": 8, "vocabulary": 1000}
    sizes |= {"sequence": 1024, "num_microbatches": 4, "optimizer": "adam"}
    machine = {key: changes.pop(key) for key in [*changes] if "gbps" in key}
    job = {"model": sizes | changes, "machine": {"gpu": gpu} | machine}
    return validate(JobDescription, job, "job")


def test_a_gpu_s_name_says_what_a_job_leaves_out():
    job = described("H200-141GB")
    assert (job.model.peak_tflops, job.model.memory_gbps) == (989, 4800)
    assert (job.machine.h2d_gbps, job.machine.node_gbps, job.machine.gpus_per_node) == (55, 410, 8)
    own = described("H200-141GB", d2h_gbps=9, peak_tflops=500)
    assert (own.model.peak_tflops, own.machine.d2h_gbps, own.machine.h2d_gbps) == (500, 9, 55)
    for name in load_yaml(config_folder("machines") / "gpus.yaml")["gpus"]:
        machine = described(name).machine
        assert machine.both_gbps <= machine.d2h_gbps <= machine.node_d2h_gbps < machine.node_gbps
    with pytest.raises(ConfigError, match=r"no GPU 'H100' is known; .* H100-80GB,"):
        described("H100")


@pytest.mark.parametrize(
    ("change", "per_parameter"),
    [
        ({}, 2 + 4 + 12),
        ({"optimizer": "sgd"}, 2 + 4 + 4),
        ({"exp_avg_dtype": "bf16", "main_grads_dtype": "bf16"}, 2 + 2 + 8),
        ({"data_parallel": 4}, 2 + 4 + 12 / 4),
        ({"data_parallel": 2, "context_parallel": 2}, 2 + 4 + 12 / 4),
        ({"data_parallel": 4, "data_parallel_sharding_strategy": "no_shard"}, 2 + 4 + 12),
        ({"static_bytes_per_parameter": 7}, 7),
    ],
)
def test_replicas_share_what_they_are_said_to(change, per_parameter):
    model = described(**change).model
    assert static_bytes(model, 0) == pytest.approx(weights_of(model, 0).number * per_parameter)


def test_sharded_weights_are_gathered_a_layer_at_a_time():
    keys = {"data_parallel": 8, "data_parallel_sharding_strategy": "optim_grads_params"}
    model, layer = described(**keys).model, 12 * 1024**2 + 2 * 1024
    wanted = weights_of(model, 0).number * 18 / 8 + layer * (2 * 2 + 4)
    assert static_bytes(model, 0) == pytest.approx(wanted)


def test_experts_are_shared_by_all_gpus_that_have_the_same():
    keys = {"experts": 8, "expert_ffn": 4096, "data_parallel": 8}
    one, eight = (described(**keys, expert_parallel=n).model for n in (1, 8))
    experts = 4 * 8 * 2 * 4096 * 1024
    saved = static_bytes(one, 0) - static_bytes(eight, 0)
    assert saved == pytest.approx(experts * (6 + 12 / 8) - experts / 8 * (6 + 12))


def test_adapters_alone_have_gradients_and_an_optimizer():
    whole, lora = (described(lora_rank=r, optimizer=None) for r in (0, 16))
    adapters = 4 * 16 * (1024 + 3072 + 2048 + 2 * (1024 + 4096))
    weights = weights_of(whole.model, 0).number
    assert weights_of(lora.model, 0).number == weights + adapters
    assert static_bytes(lora.model, 0) == 2 * weights + 18 * adapters
    backward = [sum(g.backward_us for g in x.job().stages[0].groups) for x in (whole, lora)]
    assert backward[1] < backward[0]


def test_a_window_shortens_attention_but_for_each_layer_that_skips_it():
    keys = {"window_size": 128, "window_attn_skip_freq": 2, "sequence": 8192}
    groups = described(**keys).job().stages[0].groups
    first, second = [group for group in groups if group.name == "core_attn"][:2]
    assert first.num_bytes == second.num_bytes
    assert first.backward_us < 0.5 * second.backward_us


def test_further_tokens_have_a_loss_each_on_the_last_stage():
    plain, further = (described(pipeline_parallel=2, mtp_num_layers=n).job() for n in (0, 1))
    assert plain.stages[0] == further.stages[0]
    added = further.stages[1].groups[len(plain.stages[1].groups) :]
    assert [group.name for group in added][::8] == ["mtp", "loss"]
    assert not any(group.is_marked for group in added)
