"""Random programs of torch's own functions, at the doors that make their outputs again.

What a function has made is used, viewed, changed in place, cast and made something of again, in
any order. Losses, gradients and the random state must be bitwise those of the same program without
offload; where that refuses a change in place, so must the one with it.
"""

from __future__ import annotations

import random
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from programs import KIB, TIMINGS, assert_nothing_left, make_config, make_manager
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
    offload_modules,
    recomputable,
)
from megatron_offload.errors import InPlaceModificationError

ROWS, WIDTH, STEPS = 5, 16, 3


class SaveView(torch.autograd.Function):
    """Save a tensor by several views of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.reshape(-1), x.transpose(0, -1), x[1:])
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        flat, transposed, rest = ctx.saved_tensors
        return grad * transposed.transpose(0, -1).cos() + (flat.mean() * rest.mean()).to(grad.dtype)


class Pass(torch.autograd.Function):
    """Hand on what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 1


class Scale(torch.autograd.Function):
    """Change what it is given in place, and say so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(1.25)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.25


class RootMeanSquare(nn.Module):
    """A norm as Llama's: in float32, and cast back before its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


RootMeanSquare.__name__ = "LlamaRMSNorm"


def rotated(x):
    half = x.shape[-1] // 2
    angle = torch.linspace(0, 1, x.shape[-1]).to(x.dtype)
    return x * angle.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()


def rotated_as_complex(x):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    angle = torch.polar(torch.ones(pairs.shape[-1]), torch.linspace(0, 1, pairs.shape[-1]))
    return torch.view_as_real((pairs * angle.conj()).conj() * pairs.conj()).flatten(-2).to(x.dtype)


def with_a_changed_slice(x):
    y = F.gelu(x)
    y[..., :2].mul_(3)
    return y.sin()


def with_a_changed_list(x):
    sizes = [1] * x.dim()
    y = x.sin().repeat(sizes)
    sizes[0] = 9
    return y * 2


def in_the_middle(x):
    y = x[..., 1:-1] * 2
    return F.pad(y.sin() * y, (1, 1))


FUNCTIONS = {
    "sin": torch.sin,
    "cube": lambda x: x.tanh().pow(3),
    "square": lambda x: x.tanh().square(),
    "neg": lambda x: -x,
    "from one": lambda x: 1 - x,
    "quotient": lambda x: 2 / (x.abs() + 1),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 1.0, inplace=True),
    "leaky in place": lambda x: F.leaky_relu(x * 2, 0.2, True),
    "relu in place": lambda x: (x + 1).relu_(),
    "gelu changed": lambda x: F.gelu(x).add_(0.5) * 2,
    "norm changed": lambda x: F.layer_norm(x, x.shape[-1:]).mul_(2).sin(),
    "slice changed": with_a_changed_slice,
    "list changed": with_a_changed_list,
    "double": lambda x: x.double().cos().to(x.dtype),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float": lambda x: x.float(),
    "transposed copy": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "reshaped copy": lambda x: x.transpose(0, -1).reshape(-1).reshape(x.shape),
    "cat": lambda x: torch.cat([x, x.sin()], 0)[: x.shape[0]],
    "stack": lambda x: torch.stack([x, x.cos()], -1)[..., 0],
    "expand": lambda x: x[..., :1].expand(x.shape) * x,
    "gate": lambda x: (lambda a, b: F.silu(a) * b)(*torch.cat([x, x + 1], -1).chunk(2, -1)),
    "glu": lambda x: F.glu(torch.cat([x, x.cos()], -1)),
    "middle": in_the_middle,
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "dropout": lambda x: F.dropout(x, 0.3),
    "rotated": rotated,
    "complex": rotated_as_complex,
    "mask": lambda x: x.masked_fill(x > 1, 0.0) * (x > 0),
    "sum": lambda x: x / (x.norm() + 1),
    "checkpoint": lambda x: checkpoint(lambda y: F.gelu(y).sin() * y, x, use_reentrant=False),
    "by hand": lambda x: recomputable(lambda y: F.dropout(F.gelu(y) * y, 0.2), x),
    "by hand, a list": lambda x: recomputable(lambda ys: torch.cat(ys, -1)[..., ::2] * 1, [x, -x]),
    "views": SaveView.apply,
    "pass": Pass.apply,
    "pass made": lambda x: Pass.apply(F.silu(x)) * 2,
    "scale made": lambda x: Scale.apply(F.gelu(x)) * 2,
}

OF_TWO = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b.tanh(),
    "quotient": lambda a, b: a / (b.abs() + 1),
    "gate": lambda a, b: F.silu(a) * b.sin(),
    "row": lambda a, b: a * b.mean(-1, keepdim=True),
    "number": lambda a, b: a * b.mean(),
    "type": lambda a, b: a.type_as(b),
    "in place": lambda a, b: F.gelu(a).mul_(b.detach().to(a.dtype)) * 2,
    "bias, dropout, sum": lambda a, b: F.dropout(a + 0.1, 0.2) + b,
    "by hand": lambda a, b: recomputable(lambda u, v: u * v.sigmoid(), a, b),
}

OF_THE_MODEL = {
    "layer norm": lambda m, x: m.layer_norm(x.float()),
    "llama norm": lambda m, x: m.llama_norm(x),
    "linear": lambda m, x: m.linear(x.float()),
    "gelu": lambda m, x: m.gelu(m.linear(x.float())),
    "silu in place": lambda m, x: m.silu(m.layer_norm(x.float())),
    "block": lambda m, x: x + m.linear(m.gelu(m.linear(m.llama_norm(x).float()))).to(x.dtype),
    "weight": lambda m, x: x * m.llama_norm.weight,
    "transposed product": lambda m, x: x.float() @ (m.linear.weight * 1.5).sin().t(),
    "pixels": lambda m, x: m.group_norm(
        x.float().reshape(-1, WIDTH, 1, 1).to(memory_format=torch.channels_last)
    ).reshape(x.shape),
}

CHANGES = (
    lambda x: x.add_(0.5),
    lambda x: x.mul_(1.1),
    lambda x: x[..., :1].mul_(2.0),
    lambda x: x.detach().clamp_(-3, 3),
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm, self.llama_norm = nn.LayerNorm(WIDTH), RootMeanSquare()
        self.group_norm = nn.GroupNorm(4, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gelu, self.silu = nn.GELU(), nn.SiLU(inplace=True)

    def forward(self, x, seed):
        rng = random.Random(seed)
        made = [x]
        for _ in range(rng.randint(4, 20)):
            y = self._one_more(rng, made)
            if y.shape != x.shape:
                y = y.reshape(x.shape)
            if rng.random() < 0.1:
                changed = rng.choice(made)
                if not changed.is_leaf:
                    rng.choice(CHANGES)(changed)
            made.append(y)
            if rng.random() < 0.1:
                del made[1:-1]
        terms = (y.float().clamp(-50, 50).mean() * number for number, y in enumerate(made[-4:], 1))
        return sum(terms)

    def _one_more(self, rng, made):
        x, other = made[-1] if rng.random() < 0.7 else rng.choice(made), rng.choice(made)
        is_cast = rng.random() < 0.08
        with torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext():
            kind = rng.random()
            if kind < 0.6:
                return rng.choice(list(FUNCTIONS.values()))(x)
            if kind < 0.8:
                return rng.choice(list(OF_TWO.values()))(x, other)
            return rng.choice(list(OF_THE_MODEL.values()))(self, x)


def run(model, seed, context=None):
    """Return the loss, all gradients and a number drawn after backward; an error in their place."""
    model.zero_grad()
    torch.manual_seed(seed)
    shape = (ROWS, WIDTH) if seed % 2 else (3, ROWS, WIDTH)
    x = torch.randn(shape, requires_grad=True)
    try:
        with context or nullcontext():
            loss = model(x, seed)
        if seed % 7 == 0:
            loss.backward(retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16) if seed % 11 == 0 else nullcontext():
            loss.backward()
    except RuntimeError as error:
        return error
    parameters = (parameter.grad for parameter in model.parameters())
    return loss.detach(), torch.rand(1), x.grad, *parameters


def check(seed):
    """Run a program without offload, and at one of the doors for some steps."""
    rng = random.Random(seed)
    torch.manual_seed(0)
    model = Model()
    expected = run(model, seed)
    settings = {
        "recompute": rng.choice(("auto", "auto", "auto", ("norm", "mlp_act"), "pointwise", ())),
        "min_tensor_bytes": rng.choice((0, 64, 200)),
        "checking": rng.random() < 0.1,
        "host_memory_bytes": rng.choice((0, 4 * KIB, 64 * KIB * KIB, 64 * KIB * KIB)),
        "max_inflight_bytes": rng.choice((0, 0, KIB, None)),
    }
    timing, door = rng.choice(TIMINGS), rng.choice(("context", "context", "model", "modules"))
    if door == "modules":
        settings["recompute"] = rng.choice((("norm", "mlp_act"), ("norm", "*linear"), ()))
        manager = make_manager(timing, seed=seed, **settings)
        with offload_modules(model, ["*"], manager=manager):
            for _ in range(STEPS):
                with manager.step():
                    is_done = compare(expected, run(model, seed))
    else:
        config = make_config(timing, seed=seed, **settings)
        if door == "model":
            context = get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
        else:
            context = OffloadActivations(config=config)
        manager = context.manager
        for _ in range(STEPS):
            is_done = compare(expected, run(model, seed, context))
            context.end_step()
    if is_done:
        assert_nothing_left(manager)
    manager.close()


def compare(expected, actual):
    """Compare every bit, or that both were refused; return whether nothing was."""
    if isinstance(expected, RuntimeError):
        assert isinstance(actual, RuntimeError), f"without offload: {expected}"
        return False
    if isinstance(actual, InPlaceModificationError) and "made again" in str(actual):
        return (
            False  # only its copy needs it as it was, and may have been under way: no way to tell
        )
    if isinstance(actual, RuntimeError):
        raise actual
    for index, (a, b) in enumerate(zip(expected, actual, strict=True)):
        same = a is b is None or (a is not None and b is not None and a.dtype == b.dtype)
        same = same and (a is None or torch.equal(a.view(torch.int32), b.view(torch.int32)))
        assert same, f"result {index} differs"
    return True
