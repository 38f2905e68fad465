"""Random programs as users write them, that change what isn't a tensor, at any door.

Attributes, hooks, modes, switches and side effects change between calls, and between forward and
backward. Losses, gradients, buffers, the random state and what is counted must be bitwise those of
the same program without offload; where that raises, so must the one with it.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
import torch.nn.functional as F
from programs import KIB, TIMINGS, assert_nothing_left, make_manager
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_offload import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
    group_commit,
    group_start,
    offload_modules,
    recomputable,
)
from megatron_offload.autotune import layers, search_steps
from megatron_offload.backends.simulated import HostTimedBackend
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, HazardError

ROWS, WIDTH = 16, 24
DOORS = ("context", "model", "modules", "hand", "rows", "search")
MORE_STEPS = 6
"""At the last of them: so many come before rows are followed."""


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


FUNCTIONS = (
    *(returns, written, written, with_workspace, inner_gradient, tensor_hook),
    lambda s, x: returns(s, F.gelu(x)) * 2,
    lambda s, x: x * returns(s, s.leaf * 1 if s.number % 2 else s.leaf),
    lambda s, x: F.linear(x, s.weight),
    lambda s, x: x * x,
    lambda s, x: x * s.weight[0] + x.cos() * x.mean(-1, keepdim=True),
    lambda s, x: F.softmax(x.tanh(), -1) * 4,
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
    lambda s, x: x.double().sin().mul(x),
    lambda s, x: F.dropout(x, 0.3),
    lambda s, x: x * in_context(torch.no_grad(), number_of, x),
    lambda s, x: x * in_context(torch.inference_mode(), number_of, x),
    lambda s, x: in_context(s.mode(), lambda x: F.gelu(x.sin()) * x, x),
    lambda s, x: checkpoint(cheap, x, s.weight, use_reentrant=s.number % 4 == 0),
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


# Programs.


class Segment(nn.Module):
    """Some operations, perhaps in a mode and a checkpoint, and a segment inside."""

    def __init__(self, rng, counts, earlier, depth=0):
        super().__init__()
        self._is_marked, self.number = False, rng.randrange(100)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.leaf = nn.Parameter(torch.rand(ROWS, WIDTH))
        self.workspace, self.parts = torch.zeros(ROWS, WIDTH), nn.ModuleDict()
        self._ops = [self._one_more(rng, earlier) for _ in range(rng.randint(1, 5))]
        self.inner = None
        if depth < 2 and rng.random() < 0.3:
            self.inner = Segment(rng, counts, earlier, depth + 1)
        self.outside, self.inside = any_mode(rng, counts), any_mode(rng, counts)
        self._checkpoints = rng.choice((None,) * 16 + ("reentrant", "other", "other"))
        self.mode = any_mode(rng, counts, share=1)

    def _one_more(self, rng, earlier):
        if rng.random() < 0.02:
            return rng.choice(MAY_RAISE)
        if rng.random() < 0.6:
            return rng.choice(FUNCTIONS)
        name = rng.choice(list(PARTS))
        if earlier and rng.random() < 0.3:
            name = rng.choice(list(earlier))
        else:
            earlier[name] = PARTS[name]()
        self.parts[name] = earlier[name]
        return lambda s, x: s.parts[name](x)

    def forward(self, x):
        manager = PipelineOffloadManager.instance if self._is_marked else None
        with self.outside():
            x = group_start(x, f"group {self.number}") if manager else x
            with manager or nullcontext(), self.inside():
                if self._checkpoints:
                    is_reentrant = self._checkpoints == "reentrant" and x.requires_grad
                    x = checkpoint(self.body, x, use_reentrant=is_reentrant)
                else:
                    x = self.body(x)
            return group_commit(x, f"group {self.number}") if manager else x

    def body(self, x):
        for op in self._ops:
            y = op(self, x)
            x = (y[0] if isinstance(y, tuple) else y).float().reshape(x.shape)
        return x if self.inner is None else self.inner(x)


class Model(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.counts, earlier = Counter(), {}
        layers = (Segment(rng, self.counts, earlier) for _ in range(rng.randint(1, 3)))
        self.layers, self.output = nn.ModuleList(layers), nn.Linear(WIDTH, 1)
        self.mode = any_mode(rng, self.counts)

    def forward(self, x):
        with self.mode():
            losses = []
            for layer in self.layers:
                x = layer(x)
                losses.append(x.float().clamp(-50, 50).square().mean())
            return [self.output(x).float().mean() + losses[-1], sum(losses)]

    def set_hooks(self, rng):
        """Set some hooks; return their handles."""
        return [
            rng.choice(HOOKS)(module, self.counts)
            for name, module in self.named_modules()
            if "parametrizations" not in name and rng.random() < 0.06
            if type(module) not in (Model, nn.ModuleList, nn.ModuleDict)
        ]

    def change(self, rng):
        """Change some attributes, and parameters behind the back of their versions."""
        for module in self.modules():
            if rng.random() > 0.3:
                continue
            if hasattr(module, "change") and module is not self:
                module.change(rng)
            for key, value in vars(module).items():
                if isinstance(value, float):  # of dropout, norms and activations
                    setattr(module, key, value * 0.9)
                elif isinstance(value, torch.Tensor) and key == "factor":
                    module.factor = value * 1.5
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.weight.data.mul_(1.1)
            elif isinstance(module._parameters.get("bias"), nn.Parameter):
                module.bias.data.add_(0.1)

    def attributes(self):
        """Return what plain attributes are; keep no graph by one."""
        found = {}
        for name, module in self.named_modules():
            for key, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    setattr(module, key, value.detach())
                if key[0] != "_" and isinstance(value, (bool, int, float, list, dict, tuple)):
                    found[f"{name}.{key}"] = repr(value)
        return found


def any_rows(model, rng):
    """Return rows of some modules in layers, many of which can't be: others save the same."""
    if len(model.layers) < 2:
        return []
    rows = [{"site": "layer", "layers": 0, "offload": rng.choice(("all", 1, 3))}]
    for name, module in model.layers.named_modules():
        number, _, site = name.partition(".")
        is_pure = site.rpartition(".")[2] in COMPUTING
        if number and rng.random() < 0.2 and not isinstance(module, nn.ModuleDict):
            does = {"recompute": True} if is_pure else {"offload": rng.choice(("all", 1, 2))}
            rows.append({"layers": int(number), "site": site or "layer", **does})
    return rows[rng.random() < 0.5 :]


@contextmanager
def opened(door, model, rng):
    """Yield what is around a step, and around a forward."""
    settings = {
        "timing": rng.choice(TIMINGS),
        "seed": rng.randrange(100),
        "min_tensor_bytes": rng.choice((0, 64, 1024)),
        "checking": rng.random() < 0.1,
        "host_memory_bytes": rng.choice((0, 8 * KIB, 64 * KIB * KIB, 64 * KIB * KIB)),
        "max_inflight_bytes": rng.choice((0, 0, KIB, None)),
        "prefetch_bytes": rng.choice((0, 0, KIB, None)),
        "policy": rng.choice((None, {"kind": "modules"}, {"kind": "modules"})),
    }
    if door in ("model", "modules"):
        names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in COMPUTING]
        named = rng.sample(names, min(len(names), rng.randint(1, 3)))
        settings["recompute"] = rng.choice(((), ("norm", "mlp_act"), ("norm", *named), named))
    if door == "search":  # by the host's clock, so that there is one
        settings["backend_type"] = HostTimedBackend
        target = {"kind": "memory_target", "memory_target": "1KiB"}
        settings["policy"] = rng.choice(({"kind": "auto", "most_slowdown_percent": 1000}, target))
    if door == "rows":
        settings.pop("policy")
        settings["rows"] = any_rows(model, rng)
    manager = make_manager(**settings)
    options = {"max_fwd_stash_size": rng.choice((1, 5, 20)), "manager": manager}
    with ExitStack() as stack:
        if door == "context":
            context = OffloadActivations(**options)
        elif door in ("model", "rows", "search"):
            context = get_act_offloading_ctx_manager(model, warn_if_no_head=False, **options)
        elif door == "modules":
            names = rng.choice((["layers.*"], ["layers.**"], ["layers.*", "**.inner"]))
            names = names if any(layer.inner for layer in model.layers) else names[:1]
            stack.enter_context(offload_modules(model, names, manager=manager))
        else:
            PipelineOffloadManager.instance = manager
            stack.callback(setattr, PipelineOffloadManager, "instance", None)
            for module in model.modules():
                module._is_marked = rng.random() < 0.8
        if door in ("context", "model", "rows", "search"):
            yield nullcontext, lambda: context
            context.end_step()
        else:
            yield manager.step, nullcontext
    if any(manager.state_of().values()):
        gc.collect()
    assert_nothing_left(manager)
    manager.close()


def take_step(model, rng, forwards):
    """Run some forwards and their backwards; return by name what has to be the same."""
    inputs, losses, graphs = [], [], []

    def forward():
        x = torch.randn(ROWS, WIDTH).requires_grad_(rng.random() < 0.9)
        inputs.append(x)
        with any_mode(rng, model.counts)(), forwards():
            given = model(x)
        losses.extend(loss.detach() for loss in given)
        return given, x

    model.zero_grad()
    for _ in range(rng.randint(1, 2)):
        graphs.append(forward())
        if rng.random() < 0.2:
            forward()  # nobody goes back
        if rng.random() < 0.2:
            model.eval()
            with rng.choice((torch.no_grad, torch.inference_mode))():
                forward()
            model.train()
        if rng.random() < 0.4:
            model.change(rng)
    while graphs:
        (one, other), x = graphs.pop(rng.randrange(len(graphs)))
        kind = rng.choice(("once", "once", "twice", "both", "second order"))
        with any_mode(rng, model.counts)():
            if kind == "second order" and x.requires_grad:
                (grad,) = torch.autograd.grad(other, x, create_graph=True)
                one = one + grad.square().mean()
            one.backward(retain_graph=kind != "once")
            if kind == "twice":
                one.backward()
            elif kind != "once":
                other.backward()
        del one, other
        if rng.random() < 0.3:
            model.change(rng)
    results = {
        **model.attributes(),
        "random": bits(torch.rand(1)),
        **{f"loss {number}": bits(loss) for number, loss in enumerate(losses)},
        **{f"gradient of input {number}": bits(x.grad) for number, x in enumerate(inputs)},
        **{name: bits(x) for name, x in (*model.named_buffers(), *model.named_parameters())},
        **{f"gradient of {name}": bits(x.grad) for name, x in model.named_parameters()},
    }
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad.clamp(-1, 1)
    return results


def bits(tensor):
    if tensor is None:
        return None
    flat = tensor.detach().reshape(-1).contiguous()
    return tensor.dtype, flat.view(torch.uint8).numpy().tobytes()


def run(seed, door=None):
    """Return what each step gives, and at the end what raised if anything did."""
    rng, at_door = random.Random(seed), random.Random(~seed)
    torch.manual_seed(seed)
    model = Model(rng)
    results = []
    with ExitStack() as undo:
        handles = model.set_hooks(rng)
        undo.callback(lambda: [handle and handle.remove() for handle in handles])
        try:
            plain = nullcontext((nullcontext, nullcontext))
            with opened(door, model, at_door) if door else plain as (step, forwards):
                handles += model.set_hooks(rng)
                num_steps = rng.randint(2, 3) + MORE_STEPS * (door_of(seed) == "search")
                for _ in range(num_steps):
                    with step():
                        result = take_step(model, rng, forwards)
                    results.append(result)
        except HazardError:
            raise
        except ConfigError:  # rows that can't be, as the first forward shows
            return results
        except RuntimeError as error:
            results.append(error)
    return results


def check(seed):
    """Run a program without offload twice, and at one of the doors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(seed)
        compare(expected, run(seed))  # it repeats itself
        with (
            mock.patch.multiple(search_steps, _NUM_BARE=0),
            mock.patch.object(layers, "_LEAST_BYTES", 0),
        ):
            compare(expected, run(seed, door_of(seed)))


def door_of(seed):
    return DOORS[seed % len(DOORS)]


def compare(expected, actual):
    for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
        if isinstance(one, RuntimeError):
            assert isinstance(other, RuntimeError), f"step {number} should raise: {one}"
            return
        if isinstance(other, RuntimeError):
            raise AssertionError(f"step {number} raises") from other
        differ = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
        assert not differ, f"step {number}: {differ}"
