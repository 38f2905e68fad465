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

import torch
import torch.nn.functional as F
from programs import KIB, TIMINGS, assert_nothing_left, make_config, make_manager
from strange_parts import (
    FOREIGN,
    MODES,
    RETURNED,
    ROWS,
    WIDTH,
    AsksGrad,
    Average,
    Block,
    CountedNorm,
    HasScript,
    Hyper,
    OwnNorm,
    Pair,
    Pass,
    ReadsTensor,
    Returns,
    SaveView,
    Scale,
    WarmGELU,
    numbered_checkpoint,
)
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as hooked_weight_norm
from torch.utils.checkpoint import checkpoint

from megatron_offload import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
    group_commit,
    group_start,
    offload_modules,
    recomputable,
)
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import HazardError

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
    "hyper": Hyper,
    "reads_tensor": ReadsTensor,
    "asks_grad": AsksGrad,
    "average": Average,
    "pair": Pair,
    "block": Block,
    "script": HasScript,
    "dropout": lambda: nn.Dropout(0.3),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "hooked_weight_norm": lambda: hooked_weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}
COMPUTES_ONLY = ("norm", "gelu", "silu", "leaky", "mish", "block", "asks_grad", "linear", "dropout")


def through_data(s, x):
    y = F.linear(x, s.weight)
    y.data.mul_(1.5)
    return y.sin() * y


def with_workspace(s, x):
    s.workspace.data.copy_(x.detach())
    s.unused = x * s.workspace
    s.workspace.data.mul_(2)
    s.unused = None
    return x * s.workspace.clone()


def with_a_raise(s, x):
    y = x.sigmoid()
    y.mul_(2)
    return y


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


def aside(s, x, context):
    with context:
        factor = (x.sin() * x.cos()).mean()
    return x * float(factor)


def in_foreign(s, x):
    with FOREIGN[("lossy", "cloning")[s.number % 2]](s.counts):
        return F.gelu(x.sin()) * x


def hooked(s, x):
    y = x.cos() * x
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 1.5)
    return y


def as_complex(s, x):
    pairs = torch.view_as_complex(x.reshape(ROWS, -1, 2))
    return torch.view_as_real((pairs * 1.5j).conj() * pairs.conj().sin()).flatten(-2)


def created(x):
    return F.gelu(x) * torch.linspace(0, 1, WIDTH).cos() * (2 if torch.is_grad_enabled() else 3)


def cheap(x, weight):
    return F.gelu(F.linear(x, weight)) * x


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
    "expand": lambda s, x: x * x[:, :1].expand(ROWS, WIDTH),
    "transposed": lambda s, x: (x.t() * s.weight[:, :ROWS]).t(),
    "reshaped": lambda s, x: x.t().reshape(ROWS, WIDTH) * x,
    "strided": lambda s, x: x[:, ::2].repeat(1, 2) * x.flip(0),
    "int8": lambda s, x: x * (x.detach() * 20).to(torch.int8) * 0.1,
    "bool": lambda s, x: torch.where(x > 0, x * (x < 1), -x).masked_fill(x > 2, 0.5),
    "complex": as_complex,
    "index": lambda s, x: x[torch.arange(ROWS).flip(0)] * x,
    "double": lambda s, x: x.double().sin().mul(x),
    "dropout": lambda s, x: F.dropout(x, 0.3),
    "views": lambda s, x: SaveView.apply(x),
    "pass": lambda s, x: Pass.apply(F.silu(x)) * 2,
    "scale": lambda s, x: Scale.apply(F.gelu(x)) * 2,
    "returns": lambda s, x: Returns.apply(x, s.returned),
    "returns to a leaf": lambda s, x: x * Returns.apply(s.leaf, s.returned),
    "no grad": lambda s, x: aside(s, x, torch.no_grad()),
    "inference": lambda s, x: aside(s, x, torch.inference_mode()),
    "inner gradient": inner_gradient,
    "foreign": in_foreign,
    "tensor hook": hooked,
    "checkpoint": lambda s, x: checkpoint(cheap, x, s.weight, use_reentrant=s.number % 2 == 0),
    "numbered checkpoint": lambda s, x: numbered_checkpoint(lambda y: cheap(y, s.weight), x),
    "by hand": lambda s, x: recomputable(cheap, x, s.weight),
    "by hand, created": lambda s, x: recomputable(created, x) * x,
    "by hand, dropout": lambda s, x: x * recomputable(lambda y: F.dropout(y.sin(), 0.2), x),
    "by hand, a list": lambda s, x: recomputable(lambda xs: torch.cat(xs, -1)[:, ::2] * 1, [x, -x]),
}
RARE = {"raises": with_a_raise}


class Segment(nn.Module):
    """Some operations, perhaps in a mode and a checkpoint, and a segment inside."""

    def __init__(self, rng, counts, earlier, depth=0):
        super().__init__()
        self.counts, self.is_marked, self.unused = counts, False, None
        self.number, self.returned = rng.randrange(100), rng.choice(list(RETURNED))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.leaf = nn.Parameter(torch.rand(ROWS, WIDTH))
        self.workspace = torch.zeros(ROWS, WIDTH)
        self.parts, self.ops = nn.ModuleDict(), []
        for _ in range(rng.randint(1, 5)):
            self.ops.append(self._one_more(rng, earlier))
        self.inner = None
        if depth < 2 and rng.random() < 0.3:
            self.inner = Segment(rng, counts, earlier, depth + 1)
        self.outside, self.inside = (_any_mode(rng, counts, 0.15) for _ in range(2))
        self.checkpoints = rng.choice((None,) * 8 + ("reentrant", "other"))

    def _one_more(self, rng, earlier):
        if rng.random() < 0.02:
            return rng.choice(list(RARE.values()))
        if rng.random() < 0.6:
            return rng.choice(list(FUNCTIONS.values()))
        if earlier and rng.random() < 0.3:
            name, part = rng.choice(earlier)
        else:
            name = rng.choice(list(PARTS))
            part = PARTS[name]()
            earlier.append((name, part))
        self.parts[name] = part
        return lambda s, x: s.parts[name](x)

    def forward(self, x):
        manager = PipelineOffloadManager.instance if self.is_marked else None
        with self.outside():
            x = group_start(x, f"group {self.number}") if manager else x
            with manager or nullcontext(), self.inside():
                if self.checkpoints:
                    is_reentrant = self.checkpoints == "reentrant" and x.requires_grad
                    x = checkpoint(self.body, x, use_reentrant=is_reentrant)
                else:
                    x = self.body(x)
            return group_commit(x, f"group {self.number}") if manager else x

    def body(self, x):
        for op in self.ops:
            y = op(self, x)
            y = (y[0] if isinstance(y, tuple) else y).float()
            x = y if y.shape == x.shape else y.reshape(x.shape)
        return x if self.inner is None else self.inner(x)


def _any_mode(rng, counts, share):
    if rng.random() > share:
        return nullcontext
    mode = rng.choice([*MODES.values(), *FOREIGN.values()])
    return lambda: mode(counts)


class Model(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.counts = Counter()
        earlier = []
        self.layers = nn.ModuleList(
            Segment(rng, self.counts, earlier) for _ in range(rng.randint(1, 3))
        )
        self.output = nn.Linear(WIDTH, 1)
        self.mode = _any_mode(rng, self.counts, 0.2)

    def forward(self, x):
        with self.mode():
            losses = []
            for layer in self.layers:
                x = layer(x)
                losses.append(x.float().clamp(-50, 50).square().mean())
            return [self.output(x).float().mean() + losses[-1], sum(losses)]

    def set_hooks(self, rng, share):
        """Set some hooks; return their handles."""
        handles = []
        for name, module in self.named_modules():
            is_fixed = isinstance(module, torch.jit.ScriptModule) or "parametrizations" in name
            if is_fixed or module is self or rng.random() > share:
                continue
            kind = rng.randrange(5)
            if kind == 0:
                hook = lambda m, args, out: _scaled(out, 1.25)  # noqa: E731
                handles.append(module.register_forward_hook(hook))
            elif kind == 1:
                hook = lambda m, args: (args[0] * 0.75,) if args else None  # noqa: E731
                handles.append(module.register_forward_pre_hook(hook, prepend=rng.random() < 0.5))
            elif kind == 2:
                hook = lambda m, args: self.counts.update([type(m).__name__])  # noqa: E731
                handles.append(module.register_forward_pre_hook(hook))
            elif kind == 3:
                hook = lambda m, grads, outs: _scaled(grads, 1.5)  # noqa: E731
                handles.append(module.register_full_backward_hook(hook))
            else:
                for parameter in module.parameters(recurse=False):
                    hook = rng.choice(AFTER_ACCUMULATION)
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
        if rng.random() < share / 2:
            hook = lambda m, args, out: out * 1.5 if type(m) is nn.GELU else None  # noqa: E731
            handles.append(register_module_forward_hook(hook))
        return handles

    def change(self, rng):
        """Change some attributes, and parameters behind the back of their versions."""
        for module in self.modules():
            if rng.random() > 0.3 or isinstance(module, torch.jit.ScriptModule):
                continue
            if hasattr(module, "change"):
                module.change(rng)
            elif isinstance(module, nn.Dropout):
                module.p = rng.choice((0.0, 0.1, 0.5))
            elif isinstance(module, nn.LeakyReLU):
                module.negative_slope += 0.1
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.eps = rng.choice((1e-3, 1e-5))
                module.weight.data.mul_(1.1)
            elif isinstance(module, nn.Linear) and "bias" in module._parameters:
                module.bias.data.add_(0.1)


AFTER_ACCUMULATION = (
    lambda p: p.grad is None or p.grad.mul_(0.5),
    lambda p: p.grad is None or p.data.sub_(p.grad, alpha=0.01),
    lambda p: p.grad is None or setattr(p, "grad", p.grad * 2),
)


def _scaled(given, factor):
    if isinstance(given, tuple):
        return tuple(None if x is None else x * factor for x in given)
    return given * factor


def settings_of(rng):
    return {
        "min_tensor_bytes": rng.choice((0, 64, 1024)),
        "checking": rng.random() < 0.1,
        "host_memory_bytes": rng.choice((0, 8 * KIB, 64 * KIB * KIB, 64 * KIB * KIB)),
        "max_inflight_bytes": rng.choice((0, 0, KIB, None)),
        "prefetch_bytes": rng.choice((0, 0, KIB, None)),
        "policy": rng.choice((None, {"kind": "modules"}, {"kind": "modules"})),
    }


def recompute_of(rng, model):
    parts = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in PARTS]
    named = [name for name in parts if name.rpartition(".")[2].endswith(COMPUTES_ONLY)]
    patterns = rng.sample(named, min(len(named), rng.randint(1, 3)))
    return rng.choice(((), ("norm", "mlp_act"), ("norm", *patterns), tuple(patterns)))


@contextmanager
def opened(door, model, rng):
    """Yield what is around a step, and around a forward."""
    timing, seed, settings = rng.choice(TIMINGS), rng.randrange(100), settings_of(rng)
    if door in ("model", "modules"):
        settings["recompute"] = recompute_of(rng, model)
    if door in ("context", "model"):
        options = {
            "config": make_config(timing, seed=seed, **settings),
            "max_fwd_stash_size": rng.choice((1, 5, 20)),
        }
        if door == "context":
            context = OffloadActivations(**options)
        else:
            context = get_act_offloading_ctx_manager(model, warn_if_no_head=False, **options)
        yield nullcontext, lambda: context
        context.end_step()
        check_left(context.manager, model)
        context.close()
        return
    manager = make_manager(timing, seed=seed, **settings)
    if door == "modules":
        names = rng.choice((["layers.*"], ["**.parts.*"], ["layers.*", "**.parts.*"], ["**"]))
        names = names if any(len(layer.parts) for layer in model.layers) else ["layers.*"]
        with offload_modules(model, names, manager=manager):
            yield manager.step, nullcontext
    else:
        PipelineOffloadManager.instance = manager
        for module in model.modules():
            if isinstance(module, Segment):
                module.is_marked = rng.random() < 0.8
        try:
            yield manager.step, nullcontext
        finally:
            PipelineOffloadManager.instance = None
    check_left(manager, model)
    manager.close()


def take_step(model, rng, forwards):
    """Run some forwards and their backwards; return what has to be the same."""
    inputs, results, graphs = [], [], []
    counts = model.counts

    def forward():
        x = torch.randn(ROWS, WIDTH).requires_grad_(rng.random() < 0.9)
        inputs.append(x)
        outside = _any_mode(rng, counts, 0.15)
        with outside(), forwards():
            losses = model(x)
        results.extend(loss.detach() for loss in losses)
        return losses, x

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
        with _any_mode(rng, counts, 0.15)():
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
    results += [x.grad for x in inputs] + [p.grad for p in model.parameters()]
    results += [x.clone() for x in (*model.buffers(), *model.parameters())] + [torch.rand(1)]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad.clamp(-1, 1)
    return results


def attributes_of(model):
    return [
        (name, key, repr(value))
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if key[0] != "_" and isinstance(value, (bool, int, float, list, dict, tuple))
        if key not in ("is_marked", "ops") and (key != "counts" or not name)
    ]


def run(seed, door=None, around=nullcontext):
    """Return what each step gives, and at the end what raised if anything did.

    ``around`` is entered around each forward that is at no door.
    """
    rng, at_door = random.Random(seed), random.Random(~seed)
    torch.manual_seed(seed)
    model = Model(rng)
    results = []
    with ExitStack() as undo:
        handles = model.set_hooks(rng, 0.05)
        undo.callback(lambda: [handle.remove() for handle in handles])
        try:
            with opened(door, model, at_door) if door else nullcontext() as found:
                step, forwards = found or (nullcontext, around)
                handles += model.set_hooks(rng, 0.05)
                for _ in range(rng.randint(2, 3)):
                    with step():
                        result = take_step(model, rng, forwards)
                    results.append((result, attributes_of(model)))
        except RuntimeError as error:
            results.append(error)
    return results


def check_left(manager, model):
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(module, key, value.detach())  # else the model keeps a graph
    if any(manager.state_of().values()):
        gc.collect()
    assert_nothing_left(manager)


def check(seed):
    """Run a program without offload twice, and at one of the doors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, again = run(seed), run(seed)
        assert difference(expected, again) is None, "the program does not repeat itself"
        actual = run(seed, random.Random(seed).choice(("context", "model", "modules", "hand")))
    found = difference(expected, actual)
    if found is not None:
        error = actual[-1] if isinstance(actual[-1], RuntimeError) else None
        raise AssertionError(found) from error


def difference(expected, actual):
    """Return what differs, or None."""
    for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
        if isinstance(one, RuntimeError) or isinstance(other, RuntimeError):
            if type(other) is HazardError or not isinstance(one, RuntimeError):
                return f"step {number} raises"
            return None if isinstance(other, RuntimeError) else f"step {number} should raise: {one}"
        if one[1] != other[1]:
            return f"step {number}: attributes differ: {set(one[1]) ^ set(other[1])}"
        for index, (a, b) in enumerate(zip(one[0], other[0], strict=True)):
            if (a is None) != (b is None) or (a is not None and not same_bits(a, b)):
                return f"step {number}: result {index} of {len(one[0])} differs"
    return None


def same_bits(a, b):
    a, b = (x.detach().reshape(-1).contiguous() for x in (a, b))
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
