"""Inputs of layers under Megatron's full recompute: the same bits, and their memory is there."""

from __future__ import annotations

import os

import pytest
import torch
from programs import assert_nothing_left

from megatron_offload import OffloadConfig, PipelineOffloadManager

# Read by TransformerEngine where it chooses attention's backward.
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
pytest.importorskip("transformer_engine.pytorch", reason="no TransformerEngine")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MIB = 1 << 20
LAYERS, WIDTH, SEQUENCE, VOCABULARY = 16, 1024, 4096, 1024
INPUT_BYTES = SEQUENCE * WIDTH * 2
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
"""With it Megatron calls TransformerEngine's checkpoint in place of its own."""


@pytest.fixture(scope="module")
def megatron(one_rank):
    """One process of megatron-core's, with this package in it."""
    from megatron_offload.integrations import megatron_core

    settings = {"max_inflight_bytes": INPUT_BYTES, "prefetch_bytes": INPUT_BYTES}
    config = OffloadConfig(backend="cuda", policy={"kind": "modules"}, **settings)
    manager = PipelineOffloadManager.get_instance()
    manager.configure(config)
    megatron_core.install()
    yield manager
    megatron_core.uninstall()


def seed():
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def build(*, offload, **options):
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    if offload:
        options |= {"offload_modules": ["layer_input"], "min_offloaded_tensor_size": 1}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=8,
        hidden_dropout=0.1,
        attention_dropout=0.0,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        deterministic_mode=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full",
        fine_grained_activation_offloading=offload,
        **options,
    )
    seed()
    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    ).to("cuda", torch.bfloat16)


def train(manager, *, offload, **options):
    """Return losses and gradients of some steps, and the peak of the last beside what was there."""
    model = build(offload=offload, **options)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1), device="cuda")
    positions = torch.arange(SEQUENCE, device="cuda")[None]
    numbers = []
    for _ in range(4):
        seed()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        manager.reset()
        numbers += [loss.detach(), *(p.grad.cpu() for p in model.parameters())]
    assert_nothing_left(manager)
    return numbers, peak


CASES = {
    "uniform": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "two-layers": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_method": "block", "recompute_num_layers": LAYERS - 2},
    "fp8": {"recompute_method": "uniform", "recompute_num_layers": 1, **FP8},
}


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_the_same_and_the_inputs_are_gone(megatron, case):
    options = CASES[case]
    expected, peak_without = train(megatron, offload=False, **options)
    found, peak = train(megatron, offload=True, **options)
    assert all(map(torch.equal, expected, found))
    stats = megatron.last_step
    segments = {"two-layers": LAYERS // 2, "block": LAYERS - 2}.get(case, LAYERS)
    assert stats.by_name["layer_input"].num_groups == segments
    # Backward needs the last at once, and the one before it is on its way back.
    assert stats.peak_released_bytes >= (segments - 3) * INPUT_BYTES
    assert stats.peak_released_bytes % INPUT_BYTES == 0, "hidden states alone"
    assert peak_without - peak >= 0.95 * (stats.peak_released_bytes - 2 * INPUT_BYTES)
