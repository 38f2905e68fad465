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
from programs import KIB, TIMINGS, assert_nothing_left, make_manager
from random_parts import COMPUTING, FUNCTIONS, HOOKS, MAY_RAISE, PARTS, ROWS, WIDTH, any_mode
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import (
    OffloadActivations,
    get_act_offloading_ctx_manager,
    group_commit,
    group_start,
    offload_modules,
)
from megatron_offload.autotune import layers, search_steps
from megatron_offload.backends.simulated import HostTimedBackend
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, HazardError

DOORS = ("context", "model", "modules", "hand", "rows", "search")
MORE_STEPS = 6
"""At the last of them: so many come before rows are followed."""


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
