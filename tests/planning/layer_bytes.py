"""Prints what each part of megatron-core's own layers saves on a CPU, as JSON; see its test.

Run in a process of its own, because megatron-core holds process groups in globals.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from megatron_programs import build_config, build_model, load_megatron, one_process

HIDDEN, FFN, EXPERT_FFN, SEQUENCE, MICROBATCH = 256, 1024, 384, 64, 2
EXPERTS, CHOSEN, HEADS = 4, 2, 4
GATED = {"gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True}
LATENT = {
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "qk_layernorm": True,
}
CASES = {
    "dense": {},
    "gated": GATED,
    "experts": {
        **GATED,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": CHOSEN,
        "moe_ffn_hidden_size": EXPERT_FFN,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    },
    "queries": {**GATED, "kv_channels": 256, "num_query_groups": 2, "qk_layernorm": True},
    "latent": {
        **GATED,
        **LATENT,
        "multi_latent_attention": True,
        "rope_type": "rope",
        "normalization": "LayerNorm",
    },
}
GROUPS = (
    *(("input_layernorm", "attn_norm"), ("linear_qkv", "qkv_linear")),
    *((f"{name}_layernorm", "qkv_linear") for name in ("q", "k", "kv")),
    *((f"linear_{name}_proj", "qkv_linear") for name in ("q_down", "q_up", "kv_down", "kv_up")),
    *(("pre_mlp_layernorm", "mlp_norm"), ("router", "router")),
)


def group_of(module: str, case: str) -> str:
    """Return the described group that a module's saved tensors belong to; empty for none."""
    last = module.rpartition(".")[2]
    for name, group in GROUPS:
        if last == name:
            return group
    if last in ("linear_fc1", "linear_fc2"):
        return f"{'expert' if case == 'experts' else 'mlp'}_{last[-3:]}"
    if last == "mlp":
        return "router" if case == "experts" else "mlp_act"
    return "moe_act" if "local_experts" in module else ""


def saved_bytes(case: str) -> Counter[str]:
    """Build one layer, run its forward, and count storages by group."""
    options = {"bias_activation_fusion": False, **CASES[case]}
    config = build_config(
        {
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "ffn_hidden_size": FFN,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "add_bias_linear": False,
            "params_dtype": torch.bfloat16,
            "bf16": True,
            **options,
        },
        offload=False,
    )
    model = build_model(config)
    entered = [""]
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
        module.register_forward_hook(lambda *_: entered.pop() and None)
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, found = [], Counter()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept.append(tensor)  # so that no other tensor takes its place
            found[group_of(entered[-1], case)] += storage.nbytes()
        return tensor

    tokens = torch.zeros(MICROBATCH, SEQUENCE, dtype=torch.int64)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens, mask, labels=tokens)
    return found


def main() -> None:
    load_megatron()
    with one_process():
        found = {case: saved_bytes(case) for case in CASES}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
