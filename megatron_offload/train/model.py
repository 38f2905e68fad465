"""Builds megatron-core's own GPT, a chunk for each virtual stage, and its optimizer.

Invariants: with offload off, nothing here differs from a plain megatron-core program; two runs in
one process, one after the other, start from the same state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_offload.config import MEGATRON_MODULES
from megatron_offload.integrations import megatron_cpu
from megatron_offload.train.config import TrainConfig


@contextlib.contextmanager
def open_model_parallel(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Make a pipeline of the ranks and seed every generator; on a CPU also opens the bridges."""
    virtual = config.parallel.virtual
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(megatron_cpu.cpu_bridges())
        else:
            # Only kernels that give the same bits every time, where there is such a kernel.
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Overwriting every fresh tensor costs time and proves nothing here.
            deterministic: Any = torch.utils.deterministic
            deterministic.fill_uninitialized_memory = False
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=config.parallel.pipeline,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            create_gloo_process_groups=False,
        )
        # Stages hold different layers.
        seed = config.run.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        yield
        parallel_state.destroy_model_parallel()


def build_chunks(
    config: TrainConfig, device: torch.device, **settings: Any
) -> list[DistributedDataParallel]:
    """Build this rank's model chunks, in the order of their virtual stages.

    ``settings`` are more of `TransformerConfig`.
    """
    transformer = _transformer_config(config, device, **settings)
    virtual = config.parallel.virtual
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    if device.type == "cuda" and getattr(transformer_engine, "HAVE_TE", False):
        layer_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        norm = config.model.normalization
        layer_spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=norm)
    chunks = []
    for stage in range(virtual):
        vp_stage = stage if virtual > 1 else None
        model = GPTModel(
            config=transformer,
            transformer_layer_spec=layer_spec,
            vocab_size=-(-config.model.vocabulary // 128) * 128,
            max_sequence_length=config.model.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(False, vp_stage),
            share_embeddings_and_output_weights=config.model.tied_embeddings,
            position_embedding_type=config.model.position_embedding,
            vp_stage=vp_stage,
        ).to(device=device, dtype=transformer.params_dtype)
        # Only the first chunk's buckets could be reduced while backward still runs.
        chunk = DistributedDataParallel(transformer, ddp, model, disable_bucketing=stage > 0)
        chunks.append(chunk)
    transformer.finalize_model_grads_func = finalize_model_grads
    return chunks


def _transformer_config(
    config: TrainConfig, device: torch.device, **settings: Any
) -> TransformerConfig:
    """Translate into megatron-core's configuration, whose defaults compile no fused kernels."""
    model, parallel, on_gpu = config.model, config.parallel, device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    result = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        ffn_hidden_size=model.ffn or 4 * model.hidden,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        normalization=model.normalization,
        add_bias_linear=model.bias,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        # Two ranks that are each other's previous and next must not batch their requests.
        batch_p2p_comm=on_gpu and parallel.virtual == 1,
        overlap_p2p_comm=parallel.virtual > 1,
        deallocate_pipeline_outputs=True,
        deterministic_mode=on_gpu,
        # These make megatron-core's own call sites mark their groups, and its schedules end steps.
        fine_grained_activation_offloading=config.offload.enabled,
        offload_modules=["core_attn"],  # stands for ours, which it doesn't know
        min_offloaded_tensor_size=config.offload.min_tensor_elements,
        **settings,
    )
    marked = (row.site for row in config.offload.rows or () if row.site in MEGATRON_MODULES)
    result.offload_modules = [*dict.fromkeys((*config.offload.modules, *marked))]
    return result


def build_optimizer(config: TrainConfig, chunks: list[DistributedDataParallel]) -> Any:
    """Build megatron-core's optimizer: AdamW, float32 main weights, clipping over all ranks."""
    dtype = next(chunks[0].parameters()).dtype
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.run.lr,
            min_lr=0.0,
            weight_decay=0.01,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
        ),
        list(chunks),
        use_gloo_process_groups=False,
    )
