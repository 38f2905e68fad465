"""Descriptions from a config.json and from Megatron's arguments, against transformers' models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_offload.errors import ConfigError
from megatron_offload.planning.description import load_description
from megatron_offload.planning.foreign import from_hugging_face, from_megatron
from megatron_offload.planning.model_cost import LayerCosts
from megatron_offload.planning.parameters import weights_of

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


def built(config, device):
    transformers = pytest.importorskip("transformers")
    own = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_of_a_config_are_those_of_transformers(kind):
    config, model = described(kind)
    counted = sum(parameter.numel() for parameter in built(config, "meta").parameters())
    assert weights_of(model, 0).number == pytest.approx(counted, rel=0.01)


class Adapted(torch.nn.Module):
    """A frozen linear layer with an adapter as of peft, whose weights are fp32."""

    def __init__(self, base):
        super().__init__()
        self.base, make = base.requires_grad_(False), torch.nn.Linear
        self.down, self.up = make(base.in_features, 16, bias=False), make(16, base.out_features)

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x.float()))).to(x.dtype)


def saved_bytes(config, rank):
    """Return what a model of transformers saves for backward."""
    model = built(config, "cpu").train().requires_grad_(rank == 0)
    for layer in model.model.layers if rank else ():
        for block in (layer.self_attn, layer.mlp):
            for name, linear in [*block.named_children()]:
                if name.endswith("_proj"):
                    setattr(block, name, Adapted(linear))
    known, kept = {one.untyped_storage().data_ptr() for one in model.parameters()}, []

    def pack(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in known:
            known.add(place)
            kept.append(tensor)  # so that no other tensor takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.zeros(2, SEQUENCE, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_eager_layer_saves_what_transformers_does(kind, rank):
    config, model = described(kind)
    update = {"eager_kernels": True, "microbatch": 2, "min_tensor_bytes": 0, "lora_rank": rank}
    mine = sum(group.saved_bytes for group in LayerCosts(model.model_copy(update=update)).layer(1))
    two, three = (saved_bytes(config | {"num_hidden_layers": n}, rank) for n in (2, 3))
    # What the adapters have made so far, of 16 values of each token, is left out.
    between = 7 * 4 * 16 * 2 * SEQUENCE * (rank > 0)
    assert mine == pytest.approx(three - two - between, rel=0.01)


def test_windows_are_described_where_layers_have_them():
    assert described("gpt_oss")[1].seen_tokens(0) == 2 * 32 - 32**2 / SEQUENCE
    assert described("gpt_oss")[1].seen_tokens(1) == SEQUENCE
    assert described("qwen2", sliding_window=32, use_sliding_window=False)[1].window_size is None
    with pytest.raises(ConfigError, match="uneven distances"):
        described("gpt_oss", layer_types=["full_attention", "sliding_attention"] * 2)
    for none in ({}, [], {"hidden_size": 8}):
        with pytest.raises(ConfigError, match="it says no model_type"):
            from_hugging_face(none)
    with pytest.raises(ConfigError, match=r"model_type 'lama' .* llama, .* can: edit"):
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
    assert not model.overlap_grad_reduce
    data = from_megatron(f"--overlap-grad-reduce {text}")
    assert load_description("arguments", data=data).model.overlap_grad_reduce


SCRIPT = """#!/bin/bash
export GPUS=8
SIZES=(
    --num-layers 12 --hidden-size 512 # small, isn't it
    --swiglu
)
LENGTH=2048
OTHERS="--seq-length $LENGTH --vocab-size 1000 --swiglu"
torchrun --nproc_per_node $GPUS --nnodes 2 pretrain_gpt.py ${SIZES[@]} \\
    $OTHERS --micro-batch-size 2 --global-batch-size 64 --tensor-model-parallel-size 4 "$@"
"""


def test_what_a_script_computes_is_refused_and_what_has_no_key_is_said(caplog):
    text = SCRIPT.replace("GPUS=8", "GPUS=${1:-8}")
    assert from_megatron(text) == from_megatron(SCRIPT)
    with pytest.raises(ConfigError, match=r"--seq-length is '\$LEN': of a script's variables"):
        from_megatron(SCRIPT.replace("$LENGTH", "$LEN"))
    assert not caplog.messages
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    model = from_megatron(f"--num-layers 12 {block} --cpu-offloading")["model"]
    assert "recompute" not in model
    (said,) = caplog.messages
    assert "--recompute-method block, --recompute-num-layers 2, --cpu-offloading" in said


@pytest.mark.parametrize(("replicas", "microbatches"), [(None, 8), (2, 16)])
def test_a_script_is_read_with_its_variables_and_its_gpus_share_the_batch(replicas, microbatches):
    model = from_megatron(SCRIPT, replicas)["model"]
    assert model["num_microbatches"] == microbatches
    assert model.get("data_parallel") == (4 if replicas is None else None), "a key says it else"
    expected = {"layers": 12, "hidden": 512, "sequence": 2048, "vocabulary": 1000}
    assert model.items() >= (expected | {"gated_mlp": True, "tensor_parallel": 4}).items()
