"""Operations that random programs are made of, and some that backward may recompute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 8, 24


class SaveViews(torch.autograd.Function):
    """Multiply by parts of one storage, saved as overlapping views."""

    @staticmethod
    def forward(ctx, x):
        flat = x.detach().clone().view(-1)
        square = flat.view(ROWS, WIDTH)
        ctx.save_for_backward(flat[3:], square.t(), square[::2], flat.as_strided((4, 6), (5, 2), 1))
        return x * square[0]

    @staticmethod
    def backward(ctx, grad):
        tail, transposed, even, strided = ctx.saved_tensors
        scale = tail.sum() + transposed.t()[1] + even[0] * strided.sum()
        return grad * transposed.t()[0] + scale * 1e-3


def attention(x, weight):
    return torch.softmax(x @ x.t() * 0.1, dim=-1) @ F.linear(x, weight)


def gated_thirds(x, weight):
    a, b, c = F.linear(x, weight).chunk(3, dim=-1)
    return torch.cat([a * b, b * c, c.sigmoid()], dim=-1)


def reentrant(x, weight):
    if not x.requires_grad:
        return x * x * 0.5
    return checkpoint(lambda x: x * x * 0.5, x, use_reentrant=True)


def norm(x, weight):
    return F.layer_norm(x, (WIDTH,), weight[0])


def gelu_with_dropout(x, weight):
    return F.dropout(F.gelu(x * weight[1]), 0.3)


OPS = [
    F.linear,
    lambda x, weight: x * x * 0.5,
    # Its gradient is a sum of three terms, whose order must not change either.
    lambda x, weight: x * weight[0] + x.cos() * x.mean(dim=-1, keepdim=True),
    gated_thirds,
    norm,
    attention,
    lambda x, weight: (x.t().reshape(WIDTH, ROWS) * weight[:, :ROWS]).t(),
    lambda x, weight: x * x[:, :1].expand(ROWS, WIDTH) + weight[0],
    gelu_with_dropout,
    lambda x, weight: (x + weight[2]).relu_().mul(2.0),
    lambda x, weight: SaveViews.apply(x),
    lambda x, weight: checkpoint(attention, x, weight, use_reentrant=False),
    reentrant,
]
RECIPES = [
    norm,
    gelu_with_dropout,
    lambda x, weight: (x + weight[2]).cos(),
    lambda x, weight: (x * weight[:ROWS]).t(),
]
