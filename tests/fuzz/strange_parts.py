"""What users' programs are made of that change what isn't a tensor: modules, functions, modes."""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as hooked_weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_offload import recomputable

ROWS, WIDTH = 16, 24


def function_of(forward, backward):
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Own", (torch.autograd.Function,), parts).apply


def save_views(ctx, x):
    ctx.save_for_backward(x.reshape(-1), x.transpose(0, -1), x[1:])
    return x * 1


def use_views(ctx, grad):
    flat, transposed, rest = ctx.saved_tensors
    return grad * transposed.t().cos() + flat.mean() * rest.mean()


def save_own(ctx, x):
    made = x.detach().cos()
    ctx.save_for_backward(made)
    return x * 1.5


def make_gradient(ctx, x):
    ctx.made = x.detach().cos()
    return x * 1.5


RETURNS = (
    function_of(save_own, lambda ctx, grad: ctx.saved_tensors[0]),
    function_of(save_own, lambda ctx, grad: ctx.saved_tensors[0].view(-1).view(grad.shape)),
    function_of(save_own, lambda ctx, grad: grad),
    function_of(save_own, lambda ctx, grad: grad[:]),
    function_of(save_own, lambda ctx, grad: None),
    function_of(save_own, lambda ctx, grad: ctx.saved_tensors[0].mul_(grad)),
    function_of(save_own, lambda ctx, grad: grad * ctx.saved_tensors[0].add_(1).cos()),
    function_of(save_own, lambda ctx, grad: grad.clone().mul_(ctx.saved_tensors[0])),
    function_of(make_gradient, lambda ctx, grad: ctx.made),
)
views = function_of(save_views, use_views)
handed_on = function_of(lambda ctx, x: x, lambda ctx, grad: grad * 1)
scaled_in_place = function_of(
    lambda ctx, x: ctx.mark_dirty(x) or x.mul_(1.25), lambda ctx, grad: grad * 1.25
)


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
        self.task = rng.randrange(2)
        self.scales[self.task] *= 1.5
        self.options["shift"][0] += 0.25
        self.options["squares"] = not self.options["squares"]
        if rng.random() < 0.5:
            self.scales, self.eps, self.pair = [0.75, 1.25], 1e-3, self.pair[::-1]


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


@functools.cache
def _script():
    with torch.random.fork_rng([]):
        return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))


def scripted():
    script = _script()
    with torch.no_grad():  # else the copy's weights are no leaves
        script = copy.deepcopy(script)
    for parameter in script.parameters():
        parameter.requires_grad_()
    return script


def with_script(m, x):
    with torch.jit.optimized_execution(False):  # else what it runs, and saves, may change
        return m.script(x) * 2


def with_made_weight(m, x):
    m.weight = m.maker(x.mean(0)).tanh()
    return F.rms_norm(x * m.weight, (WIDTH,), m.weight)


def with_running_mean(m, x):
    m.mean = m.mean * 0.9 + x.detach().mean(0) * 0.1
    return F.gelu(x - m.mean) * (m.mean + 1)


def linear():
    return nn.Linear(WIDTH, WIDTH)


PARTS = {
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "gelu": nn.GELU,
    "silu": lambda: nn.SiLU(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "mish": nn.Mish,
    "counted_norm": lambda: CountedNorm(WIDTH),
    "warm_gelu": WarmGELU,
    "own_norm": OwnNorm,
    "block": Block,
    "hyper": lambda: Does(with_made_weight, maker=linear(), weight=None),
    "mean": lambda: Does(with_running_mean, mean=nn.Buffer(torch.zeros(WIDTH))),
    "reads_tensor": lambda: Does(lambda m, x: (x * m.factor).sin(), factor=torch.rand(WIDTH)),
    "asks_grad": lambda: Does(lambda m, x: F.silu(x) * (2 if torch.is_grad_enabled() else 3)),
    "pair": lambda: Does(lambda m, x: (lambda y: (y, y[:, :3]))(x.sin() * x)),
    "script": lambda: Does(with_script, script=scripted()),
    "dropout": lambda: nn.Dropout(0.3),
    "linear": linear,
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "hooked_weight_norm": lambda: hooked_weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
}


def through_data(s, x):
    y = F.linear(x, s.weight)
    y.data.mul_(1.5)
    return y.sin() * y


def with_workspace(s, x):
    s.workspace.data.copy_(x.detach())
    unused = x * s.workspace
    s.workspace.data.mul_(2)
    return x * s.workspace.clone() + unused.detach()


def unsafe_parts(s, x):
    a, b = F.linear(x, s.weight).unsafe_chunk(2, -1)
    a.mul_(2)
    return torch.cat([a.sin(), b.cos() * b], -1)


def stale_view(s, x):
    y = F.linear(x, s.weight)
    view = y.view(-1)
    y.mul_(2)
    return view.view(x.shape) if s.number % 2 else view.view(x.shape).sin() * y


def slice_changed(s, x):
    y = F.gelu(x)
    y[:, :2].mul_(3)
    return y.sin()


def inner_gradient(s, x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)
    return x * grad


def in_context(context, function, x):
    with context:
        return function(x)


def hooked(s, x):
    y = x.cos() * x
    if y.requires_grad:
        y.register_hook(lambda grad: None if grad is None else grad * 1.5)
    return y


def as_complex(s, x):
    pairs = torch.view_as_complex(x.reshape(ROWS, -1, 2))
    return torch.view_as_real((pairs * 1.5j).conj() * pairs.conj().sin()).flatten(-2)


def created(x):
    return F.gelu(x) * torch.linspace(0, 1, WIDTH).cos() * (2 if torch.is_grad_enabled() else 3)


def cheap(x, weight):
    return F.gelu(F.linear(x, weight)) * x


def number_of(x):
    return float((x.sin() * x.cos()).mean())


def numbered_checkpoint(function, x):
    """Keep numbers in place of what is saved, and run again when backward asks for the first."""
    num_saved, again = 0, []

    def pack(tensor):
        nonlocal num_saved
        num_saved += 1
        return num_saved - 1

    def unpack(number):
        if not again:
            keep = saved_tensors_hooks(lambda x: again.append(x.detach()), lambda _: None)
            with torch.enable_grad(), keep:
                function(x.detach().requires_grad_())
        return again[number]

    return in_context(saved_tensors_hooks(pack, unpack), function, x)


FUNCTIONS = {
    "linear": lambda s, x: F.linear(x, s.weight),
    "square": lambda s, x: x * x,
    "thrice": lambda s, x: x * s.weight[0] + x.cos() * x.mean(-1, keepdim=True),
    "tanh": lambda s, x: x.tanh(),
    "softmax": lambda s, x: F.softmax(x, -1) * 4,
    "gelu": lambda s, x: F.gelu(x, approximate="tanh"),
    "in place": lambda s, x: (F.linear(x, s.weight).relu_() * 2).add_(x),
    "residual": lambda s, x: F.gelu(x).add_(x),
    "slice changed": slice_changed,
    "stale view": stale_view,
    "through data": through_data,
    "workspace": with_workspace,
    "unsafe parts": unsafe_parts,
    "parts": lambda s, x: (lambda a, b, c: torch.cat([a * b, b * c, c.sin()], 1))(*x.chunk(3, 1)),
    "part": lambda s, x: (x * 2).split(8, 1)[1].sin().repeat(1, 3),
    "only part": lambda s, x: F.linear(x, s.weight).split(ROWS)[0],
    "expand": lambda s, x: x * x[:, :1].expand(ROWS, WIDTH),
    "expanded": lambda s, x: x.sin()[:1].expand(ROWS, WIDTH),
    "transposed": lambda s, x: (x.t() * s.weight[:, :ROWS]).t(),
    "reshaped": lambda s, x: x.t().reshape(ROWS, WIDTH) * x,
    "strided": lambda s, x: x[:, ::2].repeat(1, 2) * x.flip(0),
    "int8": lambda s, x: x * (x.detach() * 20).to(torch.int8) * 0.1,
    "bool": lambda s, x: torch.where(x > 0, x * (x < 1), -x).masked_fill(x > 2, 0.5),
    "complex": as_complex,
    "index": lambda s, x: x[torch.arange(ROWS).flip(0)] * x,
    "double": lambda s, x: x.double().sin().mul(x),
    "dropout": lambda s, x: F.dropout(x, 0.3),
    "views": lambda s, x: views(x),
    "pass": lambda s, x: handed_on(F.silu(x)) * 2,
    "scale": lambda s, x: scaled_in_place(F.gelu(x)) * 2,
    "returns": lambda s, x: RETURNS[s.number % len(RETURNS)](x),
    "returns to a leaf": lambda s, x: x * RETURNS[s.number % len(RETURNS)](s.leaf),
    "no grad": lambda s, x: x * in_context(torch.no_grad(), number_of, x),
    "inference": lambda s, x: x * in_context(torch.inference_mode(), number_of, x),
    "inner gradient": inner_gradient,
    "foreign": lambda s, x: in_context(s.foreign(), lambda x: F.gelu(x.sin()) * x, x),
    "tensor hook": hooked,
    "checkpoint": lambda s, x: checkpoint(cheap, x, s.weight, use_reentrant=s.number % 4 == 0),
    "numbered checkpoint": lambda s, x: numbered_checkpoint(lambda y: cheap(y, s.weight), x),
    "by hand": lambda s, x: recomputable(cheap, x, s.weight),
    "by hand, created": lambda s, x: recomputable(created, x) * x,
    "by hand, dropout": lambda s, x: x * recomputable(lambda y: F.dropout(y.sin(), 0.2), x),
    "by hand, a list": lambda s, x: recomputable(lambda xs: torch.cat(xs, -1)[:, ::2] * 1, [x, -x]),
}
MAY_RAISE = (lambda s, x: x.sigmoid().mul_(2), lambda s, x: x * 1 if x.is_leaf else x.add_(0.5))


class OtherResults(TorchDispatchMode):
    """Changes what some operations return, and counts them."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _other(self.counts, func, func.overloadpacket, args, kwargs)


class OtherFunctions(TorchFunctionMode):
    """The same, for functions as they are called."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _other(self.counts, func, func, args, kwargs)


_OTHERS = {
    *(torch.ops.aten.mul, torch.ops.aten.gelu, torch.ops.aten.addmm, torch.ops.aten.sin),
    *(F.gelu, F.silu, F.linear, torch.Tensor.mul, torch.Tensor.sin),
}


def _other(counts, func, kind, args, kwargs):
    result = func(*args, **(kwargs or {}))
    if kind not in _OTHERS:
        return result
    counts[str(kind)] += 1
    return result * 1.125


@contextmanager
def switched(read, put, value):
    before = read()
    put(value)
    try:
        yield
    finally:
        put(before)


def foreign(counts, pack, unpack):
    def counted(tensor):
        counts["packed"] += 1
        return pack(tensor)

    return saved_tensors_hooks(counted, unpack)


def _halved(tensor):
    alias = tensor.detach()
    return alias.dtype, alias.half() if alias.dtype is torch.float32 else alias


FOREIGN = (
    lambda counts: foreign(counts, _halved, lambda packed: packed[1].to(packed[0])),
    lambda counts: foreign(counts, lambda x: x.detach().clone(), lambda packed: packed),
)
_DTYPE = torch.get_default_dtype, torch.set_default_dtype
_DEBUG = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
MODES = (
    lambda counts: torch.autocast("cpu", torch.bfloat16),
    lambda counts: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    lambda counts: torch.autocast("cpu", enabled=False),
    lambda counts: torch.backends.mkldnn.flags(enabled=False),
    lambda counts: switched(*_DTYPE, torch.float64),
    lambda counts: switched(*_DEBUG, 1),
    OtherResults,
    OtherFunctions,
    *FOREIGN,
)


def _scaled(given, factor):
    if isinstance(given, tuple):
        return tuple(None if x is None else x * factor for x in given)
    return given * factor


def _global_hook(module, counts):
    kind = type(module)
    return register_module_forward_hook(
        lambda m, args, out: out * 1.5 if type(m) is kind is nn.GELU else None
    )


def _after_accumulation(module, change):
    def hook(parameter):
        if parameter.grad is not None:
            change(parameter)

    weight = next(module.parameters(), None)
    return None if weight is None else weight.register_post_accumulate_grad_hook(hook)


HOOKS = (
    lambda m, counts: m.register_forward_hook(lambda m, args, out: _scaled(out, 1.25)),
    lambda m, counts: m.register_forward_pre_hook(lambda m, args: _scaled(args, 0.75)),
    lambda m, counts: m.register_forward_pre_hook(lambda m, a: a and (a[0] + 0.1,), prepend=True),
    lambda m, counts: m.register_forward_pre_hook(lambda m, a: counts.update([type(m).__name__])),
    lambda m, counts: m.register_full_backward_hook(lambda m, grads, _: _scaled(grads, 1.5)),
    lambda m, counts: _after_accumulation(m, lambda p: p.grad.mul_(0.5)),
    lambda m, counts: _after_accumulation(m, lambda p: p.data.sub_(p.grad, alpha=0.01)),
    lambda m, counts: _after_accumulation(m, lambda p: setattr(p, "grad", p.grad * 2)),
    _global_hook,
)
