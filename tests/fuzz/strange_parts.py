"""Modules, functions, hooks and modes as users write them, that change what isn't a tensor."""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, WIDTH = 16, 24


class SaveView(torch.autograd.Function):
    """Save a tensor by several views of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.reshape(-1), x.transpose(0, -1), x[1:])
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        flat, transposed, rest = ctx.saved_tensors
        return grad * transposed.transpose(0, -1).cos() + flat.mean() * rest.mean()


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


RETURNED = {
    "saved": lambda ctx, grad: ctx.saved_tensors[0],
    "view of saved": lambda ctx, grad: ctx.saved_tensors[0].view(-1).view(grad.shape),
    "gradient": lambda ctx, grad: grad,
    "view of gradient": lambda ctx, grad: grad[:],
    "nothing": lambda ctx, grad: None,
    "made in forward": lambda ctx, grad: ctx.made,
    "saved, written": lambda ctx, grad: ctx.saved_tensors[0].mul_(grad),
    "saved, written, not returned": lambda ctx, grad: grad * ctx.saved_tensors[0].add_(1).cos(),
    "gradient's copy, written": lambda ctx, grad: grad.clone().mul_(ctx.saved_tensors[0]),
}


class Returns(torch.autograd.Function):
    """Save what nobody else has; what backward does with that is one of `RETURNED`."""

    @staticmethod
    def forward(ctx, x, kind):
        ctx.kind, made = kind, x.detach().cos()
        if kind == "made in forward":
            ctx.made = made
        else:
            ctx.save_for_backward(made)
        return x * 1.5

    @staticmethod
    def backward(ctx, grad):
        return RETURNED[ctx.kind](ctx, grad), None


class CountedNorm(nn.LayerNorm):
    """A subclass of a known class, that does more."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class WarmGELU(nn.GELU):
    """Begins to work after some calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x.sin() if self.calls < 3 else super().forward(x)


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
        kind = rng.randrange(6)
        if kind == 0:
            self.task = 1 - self.task
        elif kind == 1:
            self.scales[self.task] *= 1.5
        elif kind == 2:
            self.options["shift"][0] += 0.25
        elif kind == 3:
            self.options["squares"] = not self.options["squares"]
        elif kind == 4:
            self.scales, self.eps = [0.75, 1.25], 1e-3
        else:
            self.pair = self.pair[1], self.pair[0]


class Hyper(nn.Module):
    """Its weight is a plain attribute, which another module makes before each call."""

    def __init__(self):
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH)
        self.weight = None

    def forward(self, x):
        self.weight = self.maker(x.mean(0)).tanh()
        return F.rms_norm(x * self.weight, (WIDTH,), self.weight)


class ReadsTensor(nn.Module):
    """Reads a tensor that is an attribute, and no buffer."""

    def __init__(self):
        super().__init__()
        self.factor = torch.rand(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x * self.factor).sin()

    def change(self, rng):
        self.factor = self.factor * 1.5 + rng.random()


class AsksGrad(nn.Module):
    """Computes something else where no gradients are asked for."""

    def forward(self, x):
        return F.silu(x) * 2 if torch.is_grad_enabled() else F.silu(x) * 3


class Average(nn.Module):
    """Keeps a running mean in a buffer, which is another tensor after each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return F.gelu(x - self.mean) * (self.mean + 1)


class Pair(nn.Module):
    """Returns a tuple, of which one is a view of the other."""

    def forward(self, x):
        y = x.sin() * x
        return y, y[:, :3]


class Block(nn.Module):
    """Modules in a module, with dropout, and a residual that is added in place."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = OwnNorm(), nn.Linear(WIDTH, WIDTH)
        self.act, self.dropout = nn.GELU(), nn.Dropout(0.2)

    def forward(self, x):
        y = self.dropout(self.act(self.linear(self.norm(x))))
        y += x
        return y

    def change(self, rng):
        self.norm.change(rng)
        self.dropout.p = rng.choice((0.0, 0.1, 0.4))


@functools.cache
def _script():
    with torch.random.fork_rng([]):
        script = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    for _ in range(3):  # what it runs is settled after some calls
        script(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()
    script.zero_grad()
    return script


class HasScript(nn.Module):
    """Has a part in TorchScript."""

    def __init__(self):
        super().__init__()
        self.script, self.norm = copy.deepcopy(_script()), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.script(self.norm(x)) * 2


def numbered_checkpoint(function, x):
    """Keep numbers in place of what is saved, and run again when backward asks for the first."""
    num_saved, again = 0, []

    def pack(tensor):
        nonlocal num_saved
        num_saved += 1
        return num_saved - 1

    def keep(tensor):
        again.append(tensor.detach())

    def unpack(number):
        if not again:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda _: None):
                function(x.detach().requires_grad_())
        return again[number]

    with saved_tensors_hooks(pack, unpack):
        return function(x)


class OtherResults(TorchDispatchMode):
    """Changes what some operations return, and counts them."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in OTHERS:
            return result
        self.counts[str(func)] += 1
        return result * 1.125


OTHERS = {torch.ops.aten.mul, torch.ops.aten.gelu, torch.ops.aten.addmm, torch.ops.aten.sin}


class OtherFunctions(TorchFunctionMode):
    """The same, for functions as they are called."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (F.gelu, F.silu, F.linear, torch.Tensor.mul, torch.Tensor.sin):
            return result
        self.counts[func.__name__] += 1
        return result * 1.125


@contextmanager
def switched(read, put, value):
    before = read()
    put(value)
    try:
        yield
    finally:
        put(before)


def lossy(counts):
    """Foreign hooks that keep float32 as float16."""

    def pack(tensor):
        counts["packed"] += 1
        return tensor.dtype, tensor.half() if tensor.dtype is torch.float32 else tensor

    return saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0]))


def cloning(counts):
    """Foreign hooks that keep copies, and count."""

    def pack(tensor):
        counts["packed"] += 1
        return tensor.detach().clone()

    return saved_tensors_hooks(pack, lambda packed: packed)


MODES = {
    "autocast": lambda counts: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda _: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "no autocast": lambda counts: torch.autocast("cpu", enabled=False),
    "no mkldnn": lambda counts: torch.backends.mkldnn.flags(enabled=False),
    "double": lambda counts: switched(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "deterministic": lambda counts: switched(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1
    ),
    "dispatch": OtherResults,
    "functions": OtherFunctions,
}
FOREIGN = {"lossy": lossy, "cloning": cloning}
