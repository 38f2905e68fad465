"""Prints what each part of megatron-core's own layers saves on a CPU, as JSON; see its test.

Run in a process of its own, because megatron-core holds process groups in globals.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F

HIDDEN, FFN, EXPERT_FFN, SEQUENCE, MICROBATCH = 256, 1024, 384, 64, 2
EXPERTS, CHOSEN, HEADS = 4, 2, 4
CASES = {
    "dense": {},
    "gated": {"gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True},
    "experts": {
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": True,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": CHOSEN,
        "moe_ffn_hidden_size": EXPERT_FFN,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    },
}
GROUPS = (
    *(("input_layernorm", "attn_norm"), ("linear_qkv", "qkv_linear")),
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
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    options = {"bias_activation_fusion": False, **CASES[case]}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        **options,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="LayerNorm"
    )
    model = GPTModel(config, spec, 128, SEQUENCE, position_embedding_type="rope")
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
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens, None, labels=tokens)
    return found


def main() -> None:
    for name in ("models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel.schedules"):
        importlib.import_module(f"megatron.core.{name}")
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    from megatron_offload.integrations.megatron_cpu import cpu_bridges

    vars(moe_utils).setdefault("te_general_gemm", None)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        with cpu_bridges():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
            found = {case: saved_bytes(case) for case in CASES}
        dist.destroy_process_group()
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
