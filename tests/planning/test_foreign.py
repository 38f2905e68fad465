"""Descriptions from a config.json and from Megatron's arguments, against transformers' models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_offload.errors import ConfigError
from megatron_offload.planning.description import load_description
from megatron_offload.planning.foreign import from_hugging_face, from_megatron
from megatron_offload.planning.model_cost import LayerCosts
from megatron_offload.planning.parameters import num_parameters

ROOT = Path(__file__).parent.parent.parent
SEQUENCE, BATCH = 128, 2
SIZES = {"hidden_size": 256, "intermediate_size": 640, "vocab_size": 500, "head_dim": 64}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": SEQUENCE}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 1}
LATENT |= {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1, "topk_group": 1}
WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    **{kind: {} for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma")},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "qwen2_moe": EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 192},
    "deepseek_v2": EXPERTS | LATENT | {"q_lora_rank": None},
    "deepseek_v3": EXPERTS | LATENT,
    "gpt_oss": WINDOWS | {"num_local_experts": 4, "intermediate_size": 256},
}


def described(kind, **changes):
    config = SIZES | FAMILIES[kind] | {"model_type": kind} | changes
    keys = {"microbatch": BATCH, "min_tensor_bytes": 0}
    data = from_hugging_face(config)
    data["model"] |= keys
    return config, load_description("config.json", data=data).model


def built(config, device):
    transformers = pytest.importorskip("transformers")
    own = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_of_a_config_are_those_of_transformers(kind):
    config, model = described(kind)
    counted = sum(parameter.numel() for parameter in built(config, "meta").parameters())
    assert num_parameters(model, 0) == pytest.approx(counted, rel=0.01)


class Fused(torch.autograd.Function):
    """A norm, or a gated activation, in one kernel: its inputs alone are saved."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return math.prod(inputs[1:], start=inputs[0].clone())


def saved_bytes(config, monkeypatch):
    """Return what a model saves for backward with fused norms and gates."""
    model, known, kept = built(config, "cpu").train(), set(), []
    known |= {one.untyped_storage().data_ptr() for one in model.parameters()}
    for name, module in model.named_modules():
        if name.endswith("norm"):
            monkeypatch.setattr(module, "forward", Fused.apply)
        elif name.endswith("mlp"):

            def forward(x, own=module):
                return own.down_proj(Fused.apply(own.gate_proj(x), own.up_proj(x)))

            monkeypatch.setattr(module, "forward", forward)

    def pack(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in known:
            known.add(place)
            kept.append(tensor)  # so that no other tensor takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.zeros(BATCH, SEQUENCE, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_layer_saves_what_transformers_saves_with_sdpa_and_fused_kernels(kind, monkeypatch):
    config, model = described(kind)
    two, three = (saved_bytes(config | {"num_hidden_layers": n}, monkeypatch) for n in (2, 3))
    mine = sum(group.saved_bytes for group in LayerCosts(model).layer(1))
    assert mine == pytest.approx(three - two, rel=0.01)


def test_windows_are_described_where_layers_have_them():
    assert described("gpt_oss")[1].seen_tokens(0) == 2 * 32 - 32**2 / SEQUENCE
    assert described("gpt_oss")[1].seen_tokens(1) == SEQUENCE
    assert described("qwen2", sliding_window=32, use_sliding_window=False)[1].window_size is None
    with pytest.raises(ConfigError, match="uneven distances"):
        described("gpt_oss", layer_types=["full_attention", "sliding_attention"] * 2)
    for none in ({}, [], {"hidden_size": 8}):
        with pytest.raises(ConfigError, match="it says no model_type"):
            from_hugging_face(none)
    with pytest.raises(ConfigError, match=r"model_type 'lama' .* did you mean 'llama'"):
        from_hugging_face({"model_type": "lama"})


def test_a_shipped_description_is_that_of_its_arguments():
    text = """--num-layers 61 --hidden-size 7168 --ffn-hidden-size=18432 --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm
    --swiglu --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-layer-freq "([0]*3+[1]*58)"
    --mtp-num-layers 1 --padded-vocab-size 129280 --untie-embeddings-and-output-weights
    --seq-length 4096 --global-batch-size 128 --micro-batch-size 2 --use-distributed-optimizer
    --exp-avg-dtype bf16 --recompute-granularity full --window-size 127,0 # and others --lr 1e-3
    """
    model = load_description("arguments", data=from_megatron(text)).model
    keys = ("layers", "hidden", "ffn", "attention", "exp_avg_dtype")
    keys += ("dense_layers", "vocabulary", "tied_embeddings", "data_parallel_sharding_strategy")
    shipped = load_description(ROOT / "configs" / "models" / "deepseek_v3.yaml").model
    assert [getattr(model, key) for key in keys] == [getattr(shipped, key) for key in keys]
    assert (model.num_microbatches, model.recompute, model.window_size) == (64, "full", 128)
