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
from programs import KIB, TIMINGS, assert_nothing_left, make_config, make_manager
from strange_parts import FOREIGN, FUNCTIONS, HOOKS, MAY_RAISE, MODES, PARTS, ROWS, WIDTH
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
    group_commit,
    group_start,
    offload_modules,
)
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import HazardError

DOORS = ("context", "model", "modules", "hand")
COMPUTES_ONLY = ("norm", "gelu", "silu", "leaky", "mish", "block", "asks_grad", "linear", "dropout")
"""Ends of the names of modules that a pattern may name."""


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
        hooks = rng.choice(FOREIGN)
        self.foreign = lambda: hooks(counts)

    def _one_more(self, rng, earlier):
        if rng.random() < 0.02:
            return rng.choice(MAY_RAISE)
        if rng.random() < 0.6:
            return rng.choice(list(FUNCTIONS.values()))
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
            y = (y[0] if isinstance(y, tuple) else y).float()
            x = y if y.shape == x.shape else y.reshape(x.shape)
        return x if self.inner is None else self.inner(x)


def any_mode(rng, counts, share=0.15):
    mode = rng.choice(MODES)
    return (lambda: mode(counts)) if rng.random() < share else nullcontext


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
            if not isinstance(module, torch.jit.ScriptModule) and "parametrizations" not in name
            if type(module) not in (Model, nn.ModuleList, nn.ModuleDict) and rng.random() < 0.06
        ]

    def change(self, rng):
        """Change some attributes, and parameters behind the back of their versions."""
        for module in self.modules():
            if rng.random() > 0.3 or isinstance(module, torch.jit.ScriptModule):
                continue
            if hasattr(module, "change"):
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

    def let_go(self):
        """Keep no graph by an attribute."""
        for module in self.modules():
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    setattr(module, key, value.detach())


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
    names = (name for name, _ in model.named_modules() if name.rpartition(".")[2] in PARTS)
    named = [name for name in names if name.endswith(COMPUTES_ONLY)]
    patterns = rng.sample(named, min(len(named), rng.randint(1, 3)))
    return rng.choice(((), ("norm", "mlp_act"), ("norm", *patterns), tuple(patterns)))


@contextmanager
def opened(door, model, rng):
    """Yield what is around a step, and around a forward."""
    timing, seed, settings = rng.choice(TIMINGS), rng.randrange(100), settings_of(rng)
    if door in ("model", "modules"):
        settings["recompute"] = recompute_of(rng, model)
    if door in ("context", "model"):
        most, config = rng.choice((1, 5, 20)), make_config(timing, seed=seed, **settings)
        options = {"max_fwd_stash_size": most, "config": config}
        if door == "context":
            context = OffloadActivations(**options)
        else:
            context = get_act_offloading_ctx_manager(model, warn_if_no_head=False, **options)
        manager = context.manager
        yield nullcontext, lambda: context
        context.end_step()
    else:
        manager = make_manager(timing, seed=seed, **settings)
        names = rng.choice((["layers.*"], ["layers.**"], ["layers.*", "**.inner"]))
        names = names if any(layer.inner for layer in model.layers) else names[:1]
        if door == "modules":
            with offload_modules(model, names, manager=manager):
                yield manager.step, nullcontext
        else:
            PipelineOffloadManager.instance = manager
            for module in model.modules():
                module._is_marked = rng.random() < 0.8
            try:
                yield manager.step, nullcontext
            finally:
                PipelineOffloadManager.instance = None
    if any(manager.state_of().values()):
        gc.collect()
    assert_nothing_left(manager)
    manager.close()


def take_step(model, rng, forwards):
    """Run some forwards and their backwards; return what has to be the same."""
    inputs, results, graphs = [], [], []

    def forward():
        x = torch.randn(ROWS, WIDTH).requires_grad_(rng.random() < 0.9)
        inputs.append(x)
        with any_mode(rng, model.counts)(), forwards():
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
    model.let_go()
    results += [x.grad for x in (*inputs, *model.parameters())]
    results += [x.clone() for x in (*model.buffers(), *model.parameters())] + [torch.rand(1)]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad.clamp(-1, 1)
    return results


def attributes_of(model):
    plain = (bool, int, float, list, dict, tuple)
    return [
        (name, key, repr(value))
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if key[0] != "_" and isinstance(value, plain)
    ]


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
                for _ in range(rng.randint(2, 3)):
                    with step():
                        result = take_step(model, rng, forwards)
                    results.append((result, attributes_of(model)))
        except RuntimeError as error:
            results.append(error)
    return results


def check(seed):
    """Run a program without offload twice, and at one of the doors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, again = run(seed), run(seed)
        assert difference(expected, again) is None, "the program does not repeat itself"
        actual = run(seed, DOORS[seed % len(DOORS)])
    found = difference(expected, actual)
    if found is not None:
        error = actual[-1] if isinstance(actual[-1], RuntimeError) else None
        raise AssertionError(found) from error


def difference(expected, actual):
    """Return what differs, or None."""
    for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
        if isinstance(one, RuntimeError) or isinstance(other, RuntimeError):
            if isinstance(other, HazardError) or not isinstance(one, RuntimeError):
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
