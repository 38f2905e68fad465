"""Prints what each part of megatron-core's own layers saves on a CPU, as JSON; see its test.

Layers are those of small versions of the shipped descriptions. Run in a process of its own, because
megatron-core holds process groups in globals.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
import megatron_programs
from megatron_programs import build_config, build_model, load_megatron, one_process

from megatron_offload.planning.description import load_description
from megatron_offload.planning.model import ModelDescription

MODELS = Path(__file__).parents[2] / "configs" / "models"
FAMILIES = {
    "gpt_16x8192_pp4_vpp2": {},
    "llama3_8b": {"kv_heads": 2},
    "mixtral_8x7b": {"kv_heads": 2},
    "mixtral_8x7b, apart": {"kv_heads": 2, "fused_kernels": False},
    "mixtral_8x7b, apart and not gated": {"fused_kernels": False, "gated_mlp": False},
    "qwen3_30b_a3b": {"kv_heads": 2, "experts": 16, "experts_per_token": 4},
    "gpt_oss_120b": {"kv_heads": 2, "experts": 16},
    "deepseek_v3": {"q_lora_rank": 384, "kv_lora_rank": 256, "experts": 16, "dense_layers": 0},
}
"""Of each shipped description what is other than in its file, besides the sizes below."""
SMALL = {"layers": 1, "hidden": 512, "ffn": 1536, "heads": 8, "vocabulary": 128, "sequence": 64}
SMALL |= {"microbatch": 2, "fused_norm": False, "min_tensor_bytes": 0}
GROUPS = (
    *(("input_layernorm", "attn_norm"), ("linear_qkv", "qkv_linear")),
    *((f"{name}_layernorm", "qkv_linear") for name in ("q", "k", "kv")),
    *((f"linear_{name}_proj", "qkv_linear") for name in ("q_down", "q_up", "kv_down", "kv_up")),
    *(("core_attention", "core_attn"), ("linear_proj", "attn_proj")),
    *(("pre_mlp_layernorm", "mlp_norm"), ("router", "router")),
)


def small(name: str) -> ModelDescription:
    """Return the small version of a shipped description, with all of it on one GPU."""
    model = load_description(MODELS / f"{name.partition(',')[0]}.yaml").model
    alone = dict.fromkeys(("pipeline_parallel", "virtual_stages", "expert_parallel"), 1)
    widths = {"expert_ffn": 256} if model.expert_ffn else {}
    widths |= {"shared_expert_ffn": 256} if model.shared_expert_ffn else {}
    own = {"stage_layers": None, "mtp_num_layers": 0} | FAMILIES[name]
    return model.model_copy(update=SMALL | alone | widths | own)


class FlashAttention(torch.nn.Module):
    """Stands for TransformerEngine's, which saves what goes in and comes out, and a sum of each
    query's and head's scores."""

    def __init__(self, config, *_, **__):
        super().__init__()
        self.width = getattr(config, "v_head_dim", None) or config.kv_channels

    def forward(self, query, key, value, *_, **__):
        return _Attended.apply(query, key, value.contiguous(), self.width)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, width):
        out = query.new_zeros(*query.shape[:3], width).flatten(2)
        ctx.save_for_backward(query, key, value, out, query.new_zeros(query.shape[:3]).float())
        return out.view_as(out)


class _Normed(torch.autograd.Function):
    """Stands for TransformerEngine's norm, which saves what goes in and a number of each row."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens.contiguous(), tokens.new_zeros(tokens.shape[:-1]).float())
        return tokens * weight


def options_of(model: ModelDescription) -> dict:
    """Return Megatron's options for a layer."""
    options = {
        "num_layers": 1,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "ffn_hidden_size": model.ffn,
        "qk_layernorm": model.qk_layernorm,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "bias_activation_fusion": model.gated_mlp and model.fused_kernels,
    }
    if model.gated_mlp:
        options |= {"gated_linear_unit": True, "activation_func": F.silu}
    if model.kv_lora_rank:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        options |= {name: getattr(model, name) for name in names}
        options |= {"multi_latent_attention": True, "rope_type": "rope"}
    else:
        options |= {"num_query_groups": model.kv_heads, "kv_channels": model.kv_channels}
    if model.experts:
        options |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.experts_per_token,
            "moe_ffn_hidden_size": model.expert_ffn or model.ffn,
            "moe_shared_expert_intermediate_size": model.shared_expert_ffn or None,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    return options


def group_of(module: str, model: ModelDescription) -> str:
    """Return the described group that a module's saved tensors belong to; empty for none."""
    last, has_experts = module.rpartition(".")[2], model.experts > 0
    if last == "self_attention" and not model.fused_kernels:  # a CPU has no fused rotation
        return "core_attn"
    for name, group in GROUPS:
        if last == name:
            return group
    shared = "shared " if "shared_experts" in module else ""
    if last in ("linear_fc1", "linear_fc2"):
        is_expert = has_experts and not shared
        return f"{shared}{'expert' if is_expert else 'mlp'}_{last[-3:]}"
    if last in ("mlp", "shared_experts"):
        return "router" if has_experts and not shared else f"{shared}mlp_act"
    return "moe_act" if "local_experts" in module else ""


def saved_bytes(model: ModelDescription) -> Counter[str]:
    """Build one layer, run its forward, and count storages by group."""
    from megatron.core.models.backends import LocalSpecProvider

    config = build_config(options_of(model), offload=False)
    attention = mock.patch.object(LocalSpecProvider, "core_attention", return_value=FlashAttention)
    with attention, mock.patch.object(megatron_programs, "LatentAttention", FlashAttention):
        built = build_model(config)
    entered = [""]
    for name, module in built.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
        module.register_forward_hook(lambda *_: entered.pop() and None)
    known = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    kept, found = [], Counter()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept.append(tensor)  # so that no other tensor takes its place
            found[group_of(entered[-1], model)] += storage.nbytes()
        return tensor

    tokens = torch.zeros(model.microbatch, model.sequence, dtype=torch.int64)
    mask = torch.ones(1, 1, model.sequence, model.sequence, dtype=torch.bool).triu(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        built(tokens, tokens, mask, labels=tokens)
    return found


def main() -> None:
    load_megatron()
    norm = mock.patch.object(
        torch.nn.RMSNorm, "forward", lambda self, tokens: _Normed.apply(tokens, self.weight)
    )
    with one_process(), norm:
        found = {name: saved_bytes(small(name)) for name in FAMILIES}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
