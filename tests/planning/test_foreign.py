"""Descriptions from a config.json and from Megatron's arguments, against transformers' models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_offload.errors import ConfigError
from megatron_offload.planning.description import load_description
from megatron_offload.planning.foreign import from_hugging_face, from_megatron
from megatron_offload.planning.parameters import num_parameters

ROOT = Path(__file__).parent.parent.parent
SEQUENCE = 128
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
    return config, load_description("config.json", data=from_hugging_face(config)).model


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_of_a_config_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    config, model = described(kind)
    own = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16)
    counted = sum(parameter.numel() for parameter in built.parameters())
    assert num_parameters(model, 0) == pytest.approx(counted, rel=0.01)


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
