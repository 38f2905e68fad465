"""Megatron's MoE dispatch step, random input for it, and a small stack of MoE layers around it.

The layers are on megatron-core's own manager of the flex dispatcher. DeepEP, which moves the
tokens, needs its own build and several GPUs; `alone` replaces it: this rank is the first of
two and receives its own tokens, and what goes to experts of the second is masked out, as DeepEP
does it. Everything else is Megatron's.
"""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, NUM_EXPERTS, NUM_LOCAL_EXPERTS, TOPK = 16, 8, 4, 3

MEGATRONS = token_dispatcher._DeepepManager._indices_to_multihot  # as it was before any install()
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, float("inf"), float("-inf"), float("nan"))


def megatrons(indices, probs, num_experts):
    return MEGATRONS(types.SimpleNamespace(num_local_experts=num_experts), indices, probs)


def form_of(tensor):
    """Return all that a caller could see of a tensor."""
    bits = tensor if tensor.dtype is torch.bool else tensor.view(torch.int32)
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), bits.tolist()


def outcome(step, indices, probs, num_experts, weights):
    """Return the forms of both results and of the gradient of the probabilities."""
    leaf = probs.clone(memory_format=torch.preserve_format).requires_grad_()
    routing_map, multihot_probs = step(indices, leaf, num_experts)
    assert not routing_map.requires_grad
    assert multihot_probs.requires_grad
    multihot_probs.backward(weights)
    return [form_of(tensor) for tensor in (routing_map, multihot_probs.detach(), leaf.grad)]


def random_case(rng, *, repeats):
    """Return what `outcome` takes after the step, on the CPU; experts repeat if they may."""
    num_experts = rng.choice([1, 2, 3, 8, 33])
    topk = rng.randint(1, min(num_experts, 8))
    num_tokens = rng.choice([0, 1, 2, 7, 60])
    indices = random_indices(rng, num_tokens, topk, num_experts, repeats=repeats)
    probs = random_floats(rng, num_tokens, topk)
    weights = random_floats(rng, num_tokens, num_experts)
    if rng.random() < 0.5:
        indices, probs, weights = (each.T.contiguous().T for each in (indices, probs, weights))
    return indices, probs, num_experts, weights


def random_indices(rng, num_tokens, topk, num_experts, *, repeats):
    share_masked = rng.choice([0.0, 0.4, 1.0])
    choose = rng.choices if repeats else rng.sample
    rows = [
        [-1 if rng.random() < share_masked else e for e in choose(range(num_experts), k=topk)]
        for _ in range(num_tokens)
    ]
    dtype = rng.choice([torch.int64, torch.int32])
    return torch.tensor(rows, dtype=dtype).reshape(num_tokens, topk)


def random_floats(rng, *shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    for place in range(values.numel()):
        if rng.random() < 0.2:
            values.view(-1)[place] = rng.choice(SPECIAL)
    return values


@contextlib.contextmanager
def alone():
    """Let managers be built and used without DeepEP."""

    def dispatch(x, token_indices, token_probs, num_experts, group, **_):
        is_local = (token_indices >= 0) & (token_indices < NUM_LOCAL_EXPERTS)
        indices = token_indices.masked_fill(~is_local, -1)
        counts = [int((indices == expert).sum()) for expert in range(NUM_LOCAL_EXPERTS)]
        return x, indices, token_probs.masked_fill(~is_local, 0.0), torch.tensor(counts), None

    with mock.patch.multiple(
        token_dispatcher,
        fused_dispatch=dispatch,
        fused_combine=lambda x, *_, **__: (x, None),
        set_deepep_num_sms=lambda num_sms: None,
    ):
        yield


class Layer(torch.nn.Module):
    """A router, Megatron's dispatch and combine, and one small MLP for each local expert."""

    def __init__(self, **settings):
        super().__init__()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            num_moe_experts=NUM_EXPERTS,
            moe_router_topk=TOPK,
            moe_ffn_hidden_size=HIDDEN,
            moe_token_dispatcher_type="flex",  # noqa: S106 - a token of text, not a secret
            **settings,
        )
        self.manager = token_dispatcher._DeepepManager(
            group=None,
            num_local_experts=NUM_LOCAL_EXPERTS,
            router_topk=TOPK,
            num_experts=NUM_EXPERTS,
            config=config,
        )
        self.router = torch.nn.Linear(HIDDEN, NUM_EXPERTS)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, HIDDEN)
            )
            for _ in range(NUM_LOCAL_EXPERTS)
        )

    def dispatch(self, x):
        scores = self.router(x).softmax(dim=-1)
        chosen = scores.topk(TOPK, dim=-1).indices
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        self.manager.setup_metadata(routing_map, scores * routing_map)
        return self.manager.dispatch(x)

    def forward(self, x):
        manager = self.manager
        tokens, probs = manager.get_permuted_hidden_states_by_experts(self.dispatch(x))
        parts = tokens.split(manager.get_number_of_tokens_per_expert().tolist())
        parts = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        output = torch.cat(parts) * probs.unsqueeze(-1)
        output = manager.get_restored_hidden_states_by_experts(output.to(x.dtype))
        return x + manager.combine(output)


def train(*, num_layers=3, num_steps=2, num_tokens=40, device="cpu", **settings):
    """Train a stack; return every loss, gradient and, at the end, parameter."""
    torch.manual_seed(0)
    with alone():
        model = torch.nn.Sequential(*(Layer(**settings) for _ in range(num_layers))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(num_steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(num_tokens, HIDDEN, generator=generator).to(device)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            found += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
            optimizer.step()
    return [tensor.clone() for tensor in [*found, *model.parameters()]]
