"""What random programs are made of: functions, modules with state, modes and hooks around them."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_offload import recomputable

ROWS, WIDTH = 16, 24


# Functions of a segment and its input.


def function_of(forward, backward):
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Own", (torch.autograd.Function,), parts).apply


def save_own(ctx, x):
    ctx.save_for_backward(x.detach().cos())
    return x * 1.5


def keep_own(ctx, x):
    ctx.made = x.detach().cos()
    return x * 1.5


def save_views(ctx, x):
    flat = x.detach().clone().view(-1)
    square = flat.view(ROWS, WIDTH)
    ctx.save_for_backward(flat[3:], square.t(), square[::2], flat.as_strided((4, 6), (5, 2), 1))
    return x * square[0]


def use_views(ctx, grad):
    tail, transposed, even, strided = ctx.saved_tensors
    scale = tail.sum() + transposed.t()[1] + even[0] * strided.sum()
    return grad * transposed.t()[0] + scale * 1e-3


VIEWS = function_of(save_views, use_views)
RETURNS = (
    function_of(save_own, lambda ctx, grad: ctx.saved_tensors[0]),
    function_of(save_own, lambda ctx, grad: ctx.saved_tensors[0].view(-1).view(grad.shape)),
    function_of(save_own, lambda ctx, grad: grad),
    function_of(save_own, lambda ctx, grad: grad[:]),
    function_of(save_own, lambda ctx, grad: None),
    function_of(save_own, lambda ctx, grad: ctx.saved_tensors[0].mul_(grad)),
    function_of(save_own, lambda ctx, grad: grad * ctx.saved_tensors[0].add_(1).cos()),
    function_of(save_own, lambda ctx, grad: grad.clone().mul_(ctx.saved_tensors[0])),
    function_of(keep_own, lambda ctx, grad: ctx.made),
    function_of(lambda ctx, x: x, lambda ctx, grad: grad * 1),
    function_of(lambda ctx, x: ctx.mark_dirty(x) or x.mul_(1.25), lambda ctx, grad: grad * 1.25),
)


def returns(s, x):
    return RETURNS[s.number % len(RETURNS)](x)


def written(s, x):
    """Is read where what it is a view of, a part of it, or its data has been written to."""
    y = F.linear(x, s.weight)
    parts = y.unsafe_chunk(2, -1) if s.number % 2 else (y[:, :12], y[:, 12:])
    (y, y.data, y[:, :2], y.view(-1), parts[0])[s.number % 5].mul_(1.5)
    first, second = parts
    return torch.cat([first, second.cos() * second], -1) + (y.sin() * y if s.number % 3 else 0)


def with_workspace(s, x):
    s.workspace.data.copy_(x.detach())
    unused = x * s.workspace
    s.workspace.data.mul_(2)
    return x * s.workspace.clone() + unused.detach()


def inner_gradient(s, x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)
    return x * grad


def tensor_hook(s, x):
    y = x.cos() * x
    if y.requires_grad:
        y.register_hook(lambda grad: None if grad is None else grad * 1.5)
    return y


def in_context(context, function, x):
    with context:
        return function(x)


def number_of(x):
    return float((x.sin() * x.cos()).mean())


def cheap(x, weight):
    return F.gelu(F.linear(x, weight)) * x


def created(x):
    return F.gelu(x) * torch.linspace(0, 1, WIDTH).cos() * (2 if torch.is_grad_enabled() else 3)


SIMPLE = (
    *(written, written, inner_gradient, tensor_hook),
    lambda s, x: VIEWS(x),
    lambda s, x: F.linear(x, s.weight),
    lambda s, x: x * x,
    # Its gradient is a sum of three terms, whose order must not change either.
    lambda s, x: x * s.weight[0] + x.cos() * x.mean(-1, keepdim=True),
    lambda s, x: F.softmax(x.tanh(), -1) * 4,
    lambda s, x: F.softmax(x @ x.t() * 0.1, -1) @ F.linear(x, s.weight),
    lambda s, x: F.gelu(x, approximate="tanh"),
    lambda s, x: (F.linear(x, s.weight).relu_() * 2).add_(x),
    lambda s, x: F.gelu(x).add_(x),
    lambda s, x: (lambda a, b, c: torch.cat([a * b, b * c, c.sin()], 1))(*x.chunk(3, 1)),
    lambda s, x: (x * 2).split(8, 1)[1].sin().repeat(1, 3),
    lambda s, x: F.linear(x, s.weight).split(ROWS)[0],
    lambda s, x: x * x[:, :1].expand(ROWS, WIDTH),
    lambda s, x: (x.t() * s.weight[:, :ROWS]).t().reshape(ROWS, WIDTH) * x,
    lambda s, x: x[:, ::2].repeat(1, 2) * x[torch.arange(ROWS).flip(0)],
    lambda s, x: torch.where(x > 0, x * (x.detach() * 20).to(torch.int8) * 0.1, -x),
    lambda s, x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)).conj().sin()),
    lambda s, x: F.dropout(x, 0.3),
    lambda s, x: x * in_context(torch.no_grad(), number_of, x),
    lambda s, x: x * in_context(torch.inference_mode(), number_of, x),
    lambda s, x: checkpoint(cheap, x, s.weight, use_reentrant=s.number % 4 == 0),
)
"""Need no more of a segment than its weight and number, and any backward may run twice."""
FUNCTIONS = (
    *(returns, with_workspace, *SIMPLE),
    lambda s, x: returns(s, F.gelu(x)) * 2,
    lambda s, x: x * returns(s, s.leaf * 1 if s.number % 2 else s.leaf),
    lambda s, x: x.double().sin().mul(x),
    lambda s, x: in_context(s.mode(), lambda x: F.gelu(x.sin()) * x, x),
    lambda s, x: recomputable(cheap, x, s.weight),
    lambda s, x: recomputable(created, x) * x,
    lambda s, x: x * recomputable(lambda y: F.dropout(y.sin(), 0.2), x),
    lambda s, x: recomputable(lambda xs: torch.cat(xs, -1)[:, ::2] * 1, [x, -x]),
)
MAY_RAISE = (lambda s, x: x.sigmoid().mul_(2), lambda s, x: x * 1 if x.is_leaf else x.add_(0.5))


# Modules, whose attributes change.


class Does(nn.Module):
    """Is what a function does; has its parts and attributes."""

    def __init__(self, function, **has):
        super().__init__()
        self.function = function
        for name, value in has.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


class CountedNorm(nn.LayerNorm):
    """A subclass of a known class that counts, and does something else at first."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x.sin() if self.calls < 2 else super().forward(x) * (1 + 0.1 * self.calls)


class OwnNorm(nn.Module):
    """A norm that reads plain attributes, which its owner changes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.eps, self.task, self.pair = 1e-5, 0, (1.0, 0.1)
        self.scales, self.options = [1.0, 0.5], {"shift": [0.0], "squares": True}

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        y = self.weight * y * self.scales[self.task] + self.options["shift"][0]
        return y * self.pair[0] + (y * y if self.options["squares"] else y.cos()) * self.pair[1]

    def change(self, rng):
        self.task = rng.randrange(2)
        self.scales[self.task] *= 1.5
        self.options["shift"][0] += 0.25
        self.options["squares"], self.pair = rng.random() < 0.5, self.pair[::-1]


def linear():
    return nn.Linear(WIDTH, WIDTH)


def block(m, x):
    y = m.dropout(m.act(m.linear(m.norm(x))))
    y += x
    return y


def with_made_weight(m, x):
    m.weight = m.maker(x.mean(0)).tanh()
    return F.rms_norm(x * m.weight, (WIDTH,), m.weight)


def with_running_mean(m, x):
    m.mean = m.mean * 0.9 + x.detach().mean(0) * 0.1
    return F.gelu(x - m.mean) * (m.mean + 1)


COMPUTING = {
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "counted_norm": lambda: CountedNorm(WIDTH),
    "own_norm": OwnNorm,
    "gelu": nn.GELU,
    "silu": lambda: nn.SiLU(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "linear": linear,
    "dropout": lambda: nn.Dropout(0.3),
    "block": lambda: Does(
        block, norm=OwnNorm(), linear=linear(), act=nn.GELU(), dropout=nn.Dropout(0.2)
    ),
    "asks_grad": lambda: Does(lambda m, x: F.silu(x) * (2 if torch.is_grad_enabled() else 3)),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
}
"""What a pattern may name."""
PARTS = COMPUTING | {
    "hyper": lambda: Does(with_made_weight, maker=linear(), weight=None),
    "mean": lambda: Does(with_running_mean, mean=nn.Buffer(torch.zeros(WIDTH))),
    "reads_tensor": lambda: Does(lambda m, x: (x * m.factor).sin(), factor=torch.rand(WIDTH)),
    "pair": lambda: Does(lambda m, x: (lambda y: (y, y[:, :3]))(x.sin() * x)),
}


# Modes and hooks around them.


CHANGED = {
    *(torch.ops.aten.mul, torch.ops.aten.gelu, torch.ops.aten.addmm, torch.ops.aten.sin),
    *(F.gelu, F.silu, F.linear, torch.Tensor.mul, torch.Tensor.sin),
}


def changing(mode, method, counts):
    """Return a mode that changes what some operations return, and counts them."""

    def call(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        kind = getattr(func, "overloadpacket", func)
        if kind not in CHANGED:
            return result
        counts[str(kind)] += 1
        return result * 1.125

    return type("Changing", (mode,), {method: call})()


@contextmanager
def switched(name, value):
    before = getattr(torch, f"get_{name}")()
    getattr(torch, f"set_{name}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_{name}")(before)


def foreign(counts, pack, unpack):
    def counted(tensor):
        counts["packed"] += 1
        return pack(tensor)

    return saved_tensors_hooks(counted, unpack)


def halved(tensor):
    alias = tensor.detach()
    return alias.dtype, alias.half() if alias.dtype is torch.float32 else alias


FOREIGN = (
    lambda counts: foreign(counts, halved, lambda packed: packed[1].to(packed[0])),
    lambda counts: foreign(counts, lambda x: x.detach().clone(), lambda packed: packed),
)
MODES = (
    lambda counts: torch.autocast("cpu", torch.bfloat16),
    lambda counts: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    lambda counts: torch.autocast("cpu", enabled=False),
    lambda counts: torch.backends.mkldnn.flags(enabled=False),
    lambda counts: switched("default_dtype", torch.float64),
    lambda counts: switched("deterministic_debug_mode", 1),
    lambda counts: changing(TorchDispatchMode, "__torch_dispatch__", counts),
    lambda counts: changing(TorchFunctionMode, "__torch_function__", counts),
    *FOREIGN,
)


def any_mode(rng, counts, share=0.15):
    mode = rng.choice(MODES)
    return (lambda: mode(counts)) if rng.random() < share else nullcontext


def scaled(given, factor):
    if isinstance(given, tuple):
        return tuple(None if x is None else x * factor for x in given)
    return given * factor


def after_accumulation(module, change):
    def hook(parameter):
        if parameter.grad is not None:
            change(parameter)

    weight = next(module.parameters(), None)
    return None if weight is None else weight.register_post_accumulate_grad_hook(hook)


HOOKS = (
    lambda m, counts: m.register_forward_hook(lambda m, args, out: scaled(out, 1.25)),
    lambda m, counts: m.register_forward_pre_hook(lambda m, args: scaled(args, 0.75)),
    lambda m, counts: m.register_forward_pre_hook(lambda m, a: a and (a[0] + 0.1,), prepend=True),
    lambda m, counts: m.register_forward_pre_hook(lambda m, a: counts.update([type(m).__name__])),
    lambda m, counts: m.register_full_backward_hook(lambda m, grads, _: scaled(grads, 1.5)),
    lambda m, counts: after_accumulation(m, lambda p: p.grad.mul_(0.5)),
    lambda m, counts: after_accumulation(m, lambda p: p.data.sub_(p.grad, alpha=0.01)),
    lambda m, counts: after_accumulation(m, lambda p: setattr(p, "grad", p.grad * 2)),
    lambda m, counts: register_module_forward_hook(
        lambda m, args, out: out * 1.5 if type(m) is nn.GELU else None
    ),
)
