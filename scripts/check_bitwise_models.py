"""The models of `check_bitwise.py`: what each adds to the dense one.

On a CPU they consist of megatron-core's own layers, of which nothing is late; what only
TransformerEngine has is left out there, with the reason.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from bench_peers_modes import FULL
from check_bitwise import PAIRS

NUM_EXPERTS = 4
MIXTURES = ("moe", "fused", "a2a", "deepep", "overlap")


class NoStream:
    """Stands for streams and events of CUDA where all work is done when its call returns."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def _nothing(self, *_, **__):
        return self

    wait_stream = wait_event = record_event = synchronize = record = wait = _nothing


class LatentAttention(torch.nn.Module):
    """Stands for TransformerEngine's, whose keys and values differ in width."""

    def __init__(self, config, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -1e4).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", scores, value).flatten(2)


def stand_in():
    """Put in place what megatron-core asks for and a CPU lacks; inside its bridges."""
    from megatron.core.transformer import multi_latent_attention, torch_norm
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor, as_numpy=False, **_):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    def name_of(tensor, *kind):
        found = kind_of(tensor, *kind)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    def norm(_, config, hidden_size, eps=1e-5, **__):
        return getattr(torch.nn, config.normalization)(hidden_size, eps)

    cuda = token_dispatcher.torch.cuda
    cuda.Stream = cuda.Event = cuda.stream = cuda.current_stream = NoStream
    cuda.nvtx = SimpleNamespace(range_push=lambda _: None, range_pop=lambda: None)
    kind_of, torch.Tensor.type = torch.Tensor.type, name_of  # the optimizer takes no others
    torch.Tensor.record_stream = lambda *_: None
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    torch_norm.WrappedTorchNorm.__new__ = norm  # it refuses sequence parallelism
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(multi_latent_attention, name), type):  # asked for it
            setattr(multi_latent_attention, name, type(name, (), {}))


def left_out(combination, on_gpu):
    """Return why a combination can't run here, or None."""
    model, name = combination["model"], combination["name"]
    if model == "hybrid" and importlib.util.find_spec("megatron.core.models.hybrid") is None:
        return "this megatron-core has no HybridModel"
    if model == "deepep" and importlib.util.find_spec("deep_ep") is None:
        return "needs DeepEP"
    if not on_gpu and (model == "fused" or name in ("expert_fc1", "moe_act")):
        return "needs TransformerEngine's grouped experts"
    if not on_gpu and model == "cp":
        return "needs TransformerEngine's attention"
    if not on_gpu and model.startswith("fp8"):
        return "needs TransformerEngine"
    if combination["dtype"] == "fp32" and (model.startswith("fp8") or model == "overlap"):
        return "megatron-core runs it in 16 bits only"
    if model == "overlap" and combination["pp"] > 1 and combination["vpp"] == 1:
        return "megatron-core interleaves it"
    if model == "layout" and combination["pp"] == 1:
        return "one rank has all layers"
    return None


def options_of(combination, sizes, on_gpu):
    """Return the options of the ``TransformerConfig`` that make the model what it is."""
    model = combination["model"]
    options = mixture(model, sizes, on_gpu) if model in MIXTURES else {}
    if model in ("moe", "a2a", "deepep", "overlap"):
        options["moe_shared_expert_intermediate_size"] = sizes["hidden"]
    if PAIRS.get(model) == "ep":
        kind = "flex" if model == "deepep" else "alltoall"
        options |= {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": kind}
    if model == "overlap":
        options["overlap_moe_expert_parallel_comm"] = True
    elif model == "fused":
        from megatron.core.activations import squared_relu

        options["activation_func"] = squared_relu
        options["use_transformer_engine_op_fuser"] = True
        options["use_fused_weighted_squared_relu"] = True
    elif model == "gqa":
        options |= {"num_query_groups": sizes["heads"] // 2, "qk_layernorm": True}
        options |= {"gated_linear_unit": True, "activation_func": F.silu}
    elif model == "mla":
        head = sizes["hidden"] // sizes["heads"]
        options |= {"multi_latent_attention": True, "rope_type": "rope", "qk_layernorm": True}
        options |= {"q_lora_rank": sizes["hidden"] // 2, "kv_lora_rank": sizes["hidden"] // 4}
        options |= {"kv_channels": head, "v_head_dim": head}
        options |= {"qk_head_dim": head // 2, "qk_pos_emb_head_dim": head // 2}
    elif model in ("mtp", "full"):
        options["mtp_num_layers"] = 1
        if model == "full":
            options |= FULL
    elif model == "layout":
        options["pipeline_model_parallel_layout"] = layout(sizes)
    elif model == "tp":
        options |= {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    elif model == "cp":
        options["context_parallel_size"] = 2
    elif model.startswith("fp8"):
        options |= {"fp8": "hybrid", "fp8_recipe": model.partition("-")[2]}
    return options


def mixture(model, sizes, on_gpu):
    """Return what makes the model a mixture of experts, all of it on each rank."""
    return {
        "num_moe_experts": NUM_EXPERTS,
        "moe_ffn_hidden_size": 2 * sizes["hidden"],
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_permute_fusion": False,
        "moe_grouped_gemm": on_gpu,
        "moe_token_dispatcher_type": "alltoall" if on_gpu else "allgather",
    }


def layout(sizes):
    """Return the layers by stage: the first has one more than its share, the last one less."""
    num_stages = sizes["pp"] * sizes["vpp"]
    counts = [sizes["layers"] // num_stages] * num_stages
    counts[0], counts[-1] = counts[0] + 1, counts[-1] - 1
    return "E" + "|".join("t" * count for count in counts) + "L"


def parts_of(combination, sizes, on_gpu):
    """Return what `build_chunks` takes beside the options."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    model = combination["model"]
    if model in MIXTURES:
        return {"layer_spec": expert_layer(sizes, on_gpu)}
    if model == "hybrid":
        return {"layer_spec": "none", "make": make_hybrid(sizes, on_gpu)}
    kind = "with_transformer_engine" if on_gpu else "local"
    make_layer = getattr(gpt_layer_specs, f"get_gpt_layer_{kind}_spec")
    options = {} if on_gpu else {"normalization": sizes["normalization"]}
    if model == "gqa":
        return {"layer_spec": make_layer(qk_layernorm=True, **options)}
    if model == "mla":
        layer = make_layer(qk_layernorm=True, multi_latent_attention=True, **options)
        if not on_gpu:
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = LatentAttention
        return {"layer_spec": layer, "config_type": MLATransformerConfig}
    if model in ("mtp", "full"):
        return {"layer_spec": make_layer(**options), "make": make_predicting(on_gpu)}
    return {}


def make_predicting(on_gpu):
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    def make(config, transformer_layer_spec, vp_stage, **more):
        block = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, transformer_layer_spec, use_transformer_engine=on_gpu, vp_stage=vp_stage
        )
        return GPTModel(
            config=config,
            transformer_layer_spec=transformer_layer_spec,
            mtp_block_spec=block,
            vp_stage=vp_stage,
            **more,
        )

    return make


def make_hybrid(sizes, on_gpu):
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid import hybrid_layer_specs as specs
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import torch_norm

    stack = specs.hybrid_stack_spec
    if not on_gpu:
        hybrid_block.TENorm = torch_norm.WrappedTorchNorm  # the last, which no spec says
        layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=sizes["normalization"])
        parts = layer.submodules
        attention = specs.TransformerLayerSubmodules(
            input_layernorm=parts.input_layernorm,
            self_attention=parts.self_attention,
            self_attn_bda=parts.self_attn_bda,
        )
        mlp = specs.TransformerLayerSubmodules(
            pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
        )
        submodules = specs.HybridStackSubmodules(
            attention_layer=specs.ModuleSpec(specs.TransformerLayer, submodules=attention),
            mlp_layer=specs.ModuleSpec(specs.MLPLayer, submodules=mlp),
        )
        stack = specs.ModuleSpec(specs.HybridStack, submodules=submodules)
    num_stages = sizes["pp"] * sizes["vpp"]
    each = sizes["layers"] // num_stages
    pattern = "*-" * sizes["layers"]
    stages = [pattern[each * stage + stage // sizes["pp"] :][:each] for stage in range(num_stages)]

    def make(transformer_layer_spec, **more):
        del transformer_layer_spec
        return HybridModel(hybrid_stack_spec=stack, hybrid_layer_pattern="|".join(stages), **more)

    return make


def expert_layer(sizes, on_gpu):
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import gpt_layer_specs

    if not on_gpu:
        return gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=NUM_EXPERTS, normalization=sizes["normalization"]
        )
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=NUM_EXPERTS, moe_grouped_gemm=True
    )
    # By default only the norm before the experts is a module of its own.
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv = transformer_engine.TEColumnParallelLinear
    return layer
