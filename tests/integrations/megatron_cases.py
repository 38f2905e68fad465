"""Configurations of megatron-core's GPT, by the names of the cases that train them."""

from __future__ import annotations

import torch

ATTENTION = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]

MOE = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
    "offload_modules": [*ATTENTION, "expert_fc1", "moe_act"],
}
GATED = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}
RECOMPUTED = {"mlp_act", "norm"}
ROWS = [
    {"site": "core_attn", "layers": "0-1", "offload": 2},
    {"site": "mlp_norm", "layers": 3, "offload": 1},
    {"site": "expert_fc1", "layers": "0,2", "offload": "all"},
    {"site": "moe_act", "layers": "0,3", "offload": "all"},
    {"site": "moe_act", "layers": "1-2", "recompute": True},
]
IN_ROWS = {**MOE, "num_layers": 4, "rows": ROWS}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
INPUTS = {**FULL, "num_layers": 4, "offload_modules": ["layer_input"]}
SELECTIVE = {"recompute_granularity": "selective"}
EXPERTS = {**MOE, "offload_modules": ["expert_fc1", "moe_act"]}

CASES = {
    "dense": {},
    "nothing-listed-is-large": {"min_offloaded_tensor_size": 10**9},
    "moe": MOE,
    "names-beyond": {"offload_modules": [*ATTENTION, "mlp_fc1", "**.linear_fc2", "router"]},
    "names-beyond-alone": {"offload_modules": ["mlp_fc1"]},
    "moe-one-by-one": {**MOE, "moe_grouped_gemm": False, "offload_modules": ATTENTION},
    "moe-recompute-act": {**EXPERTS, **SELECTIVE, "recompute_modules": ["moe_act"]},
    "selective-recompute": {**SELECTIVE, "recompute_modules": ["layernorm", "core_attn"]},
    "full-recompute": FULL,
    "inputs": INPUTS,
    "inputs-of-two-layers": {**INPUTS, "recompute_num_layers": 2},
    "inputs-of-some-layers": {
        **INPUTS,
        "recompute_method": "block",
        "recompute_num_layers": 2,
        "offload_modules": [*ATTENTION, "layer_input", "mlp_fc1"],
    },
    "inputs-in-shares": {**INPUTS, "distribute_saved_activations": True},
    "evaluation": {},
    "evaluation-with-grad": {},
    "captured": {},
    "captured-moe": MOE,
    "captured-inputs": INPUTS,
    "half": {"activation_offload_fraction": 0.5},
    "none": {"activation_offload_fraction": 0.0},
    "kept-bytes": {"delta_offload_bytes_across_pp_ranks": 1 << 14},
    "wait-at-commit": {"fine_grained_offloading_max_inflight_offloads": 0},
    "one-in-flight": {"fine_grained_offloading_max_inflight_offloads": 1},
    "by-default": {"add_bias_linear": True, "recomputes": None},
    "none-again": {"add_bias_linear": True, "recomputes": ()},
    "gelu": {"add_bias_linear": True, "recomputes": RECOMPUTED},
    "gelu-fused": {"bias_activation_fusion": True, "recomputes": RECOMPUTED},
    "gated": {**GATED, "recomputes": RECOMPUTED},
    "gated-fused": {**GATED, "bias_activation_fusion": True, "recomputes": RECOMPUTED},
    "moe-gated": {**MOE, **GATED, "recomputes": RECOMPUTED},
    "moe-gated-fused": {**MOE, **GATED, "bias_activation_fusion": True, "recomputes": RECOMPUTED},
    "latent": {
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
        "rope_type": "rope",
        "normalization": "LayerNorm",
        "recomputes": RECOMPUTED,
    },
    "rows": IN_ROWS,
    "rows-overlapped": {
        **IN_ROWS,
        "overlap_moe_expert_parallel_comm": True,
        "expert_model_parallel_size": 2,  # as it asks for; there is one rank
        "moe_token_dispatcher_type": "alltoall",
        "bf16": True,
        "params_dtype": torch.bfloat16,
    },
    "rows-of-further-tokens": {
        "mtp_num_layers": 2,
        "rows": [
            {"site": "core_attn", "layers": 2, "offload": 2},
            {"site": "mlp_act", "layers": "1,3", "recompute": True},
        ],
    },
    "delayed": {**EXPERTS, "delay_offload_until_cuda_graph": True},
}
