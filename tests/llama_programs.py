"""A small Llama of transformers, and a step of it: losses and gradients, on any device."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="no transformers")

LAYERS, HIDDEN, BATCH, LENGTH, WORDS = 4, 64, 2, 128, 256
STATE_BYTES = BATCH * LENGTH * HIDDEN * 4
KINDS = [None, {"use_reentrant": False}, {"use_reentrant": True}]


def make_model(checkpointing):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    return model


def train(model, context, num_microbatches=2):
    """Take a step; return losses and gradients."""
    torch.manual_seed(1)
    losses, device = [], next(model.parameters()).device
    for _ in range(num_microbatches):
        words = torch.randint(WORDS, (BATCH, LENGTH)).to(device)
        with context:
            loss = model(input_ids=words, labels=words).loss
        loss.backward()
        losses.append(loss.detach())
    gradients = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return losses + gradients
