"""Small training programs whose every order of forwards and backwards is given as data."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import get_args

import torch
from torch import nn

from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import CopyTiming, OffloadConfig, SimulatedConfig
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import StateError
from megatron_offload.recompute.recipes import recomputable

TIMINGS = get_args(CopyTiming)
TWO_TIMINGS = ("late", "random")
"""For what asks no question of order, as doors do; hazards are tried at all."""
KIB = 1024

MOVING = OffloadConfig(
    backend="simulated",
    host_memory_bytes="256MiB",
    max_inflight_bytes=0,
    prefetch_bytes=0,
    policy={"kind": "modules"},
)
"""Everything is offloaded, at once and back at its use."""


def make_config(timing="late", *, seed=0, **settings):
    plans = dict(settings.get("policy") or {}).get("kind") in ("auto", "memory_target")
    return OffloadConfig(
        backend="simulated",
        **{
            "simulated": SimulatedConfig(copy_timing=timing, seed=seed),
            "min_tensor_bytes": 0,
            "host_slab_bytes": 256 * KIB,
            "host_memory_bytes": 64 * KIB * KIB,
            **({} if plans else {"max_inflight_bytes": 0, "prefetch_bytes": 0}),
            **settings,
        },
    )


class Forgetful(SimulatedBackend):
    """Does nothing for some waits, as if their calls had been forgotten, and collects hazards."""

    def __init__(self, config, *, removed_waits=(), raises=False):
        super().__init__(config)
        self.hazards = []
        self._removed_waits = frozenset(removed_waits)
        self._raises = raises

    def wait(self, stream, event, why):
        if why not in self._removed_waits:
            super().wait(stream, event, why)

    def report(self, hazard):
        if self._raises:
            super().report(hazard)
        self.hazards.append(hazard)


class Capturing(SimulatedBackend):
    """Refuses inside `capture`, by a `StateError`, what no CUDA graph can be captured with.

    The work is done all the same, once. Both copy streams have to be joined at the end, which is
    seen where hazards are checked.
    """

    def __init__(self, config):
        super().__init__(config)
        self._graph = self._num_graphs = 0
        self._graphs = {}  # the one that each event was recorded in

    @contextmanager
    def capture(self):
        self.sync_copies()
        self._num_graphs += 1
        self._graph = self._num_graphs
        try:
            yield
        finally:
            self._graph = 0
        for stream in (self.d2h_stream, self.h2d_stream):
            if self._compute._clock[stream._index] < stream._clock[stream._index]:
                raise StateError(f"the capture has ended, and {stream} is not joined")

    def is_capturing(self):
        return self._graph > 0

    def _refuse(self, what):
        if self._graph:
            raise StateError(f"a graph is captured, which forbids to {what}")

    def record(self, stream):
        event = super().record(stream)
        self._graphs[event] = self._graph
        return event

    def order(self, stream, event):
        if self._graphs[event] != self._graph:
            raise StateError("an event of a capture is waited for outside, or the other way round")
        super().order(stream, event)

    def is_done(self, event):
        self._refuse("ask for an event")
        return super().is_done(event)

    def timestamp(self, stream):
        self._refuse("take times")
        return super().timestamp(stream)

    def trim_device(self):
        self._refuse("give memory back")
        super().trim_device()

    def empty_host(self, num_bytes):
        self._refuse("pin memory")
        return super().empty_host(num_bytes)


def make_manager(
    timing="late", *, seed=0, removed_waits=(), backend_type=None, begins_chunk=False, **settings
):
    config = make_config(timing, seed=seed, **settings)
    backend = (backend_type or SimulatedBackend)(config.simulated)
    if removed_waits:
        backend = Forgetful(config.simulated, removed_waits=removed_waits)
    manager = PipelineOffloadManager(config, backend=backend)
    if begins_chunk:
        manager.begin_chunk()
    return manager


def open_group(name="g", **settings):
    """Return a new manager, a chunk that it has begun, and a group of that."""
    manager = make_manager(**settings)
    chunk = manager.begin_chunk()
    return manager, chunk, manager.start_group(chunk, name)


def in_group(manager, run, x, name="g", forced=None, *, delay=False):
    """Return ``run(x)``, run as one group; without a manager, run as it is."""
    if manager is None:
        return run(x)
    x = start_group(manager, x, name)
    with manager:
        y = run(x)
    return commit_group(manager, y, name, forced, delay=delay)


class Block(nn.Module):
    """Norm, two linears and an activation, with a residual: a transformer layer's shape.

    Norm and activation may be recomputed, with dropout, each of what its group saves.
    """

    def __init__(self, width, recomputes):
        super().__init__()
        self.recomputes = recomputes
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x, manager):
        residual = x
        x = start_group(manager, x, "norm") if manager else x
        with manager or torch.enable_grad():
            y = self.make(manager, self.norm, x)
        y = y * y.mean(dim=-1, keepdim=True)  # several uses: the order of their sum must be kept
        y = start_group(manager, y, "mlp") if manager else y
        with manager or torch.enable_grad():
            y = self.fc2(self.make(manager, torch.nn.functional.gelu, self.fc1(y)))
        y = commit_group(manager, y, "mlp") if manager else y
        y = residual + y
        return commit_group(manager, y, "norm") if manager else y

    def make(self, manager, function, x):
        if not self.recomputes:
            return function(x)

        def drop_some(x):
            return nn.functional.dropout(function(x), 0.1)

        return recomputable(drop_some, x, manager=manager) if manager else drop_some(x)


def make_model(*, layers=3, width=32, seed=0, recomputes=False):
    torch.manual_seed(seed)
    return nn.ModuleList(Block(width, recomputes) for _ in range(layers))


def one_forward_one_backward(num_microbatches, depth):
    """Return the order in which a pipeline rank runs its microbatches: 1F1B with a warm-up."""
    order = [("F", m) for m in range(min(depth, num_microbatches))]
    for m in range(depth, num_microbatches):
        order += [("B", m - depth), ("F", m)]
    return order + [("B", m) for m in range(max(0, num_microbatches - depth), num_microbatches)]


ORDER = one_forward_one_backward(6, depth=3)


def forward(model, manager, *, grad=True, seed=1, rows=16):
    """Return the loss of one microbatch."""
    width = model[0].norm.normalized_shape[0]
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)
    if manager:
        manager.begin_chunk()
    for block in model:
        x = block(x, manager)
    return x.square().mean()


class Times(torch.autograd.Function):
    """Hands its first input on, and saves the others alone; backward multiplies by them."""

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        all_saved = ctx.saved_tensors
        for saved in all_saved:
            grad = grad * (saved if saved.shape == grad.shape else saved.sum())
        return grad, *[None] * len(all_saved)


class Keep(torch.autograd.Function):
    """Identity on its first input that saves whatever it is given, and hands it to ``seen``."""

    @staticmethod
    def forward(ctx, x, seen, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(ctx.saved_tensors)
        return (grad, None, *[None] * len(ctx.saved_tensors))


def save_in_group(manager, tensors, seen, name="group"):
    """Save ``tensors`` in one group; return the loss whose backward hands them to ``seen``."""
    x = torch.zeros(1, requires_grad=True)
    return in_group(manager, lambda x: Keep.apply(x, seen, *tensors), x, name)


def run_step(model, manager, order, *, rows=16, seed=1, inputs=None, place=None):
    """Run one training step and return its losses and all gradients.

    With ``place``, each forward and backward is within what it returns for it.
    """
    model.zero_grad()
    if inputs is None:
        shape = 1 + max(m for _, m in order), rows, model[0].norm.normalized_shape[0]
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(shape[1:], generator=generator) for _ in range(shape[0])]
    losses, graphs = {}, {}
    torch.manual_seed(seed)
    for action, microbatch in order:
        with place(action, microbatch) if place else nullcontext():
            if action == "B":
                graphs.pop(microbatch).backward()
                continue
            x = inputs[microbatch].clone().requires_grad_()
            if manager:
                manager.begin_chunk()
            for block in model:
                x = block(x, manager)
            graphs[microbatch] = x.float().square().mean()
            losses[microbatch] = graphs[microbatch].detach().clone()
    del x, graphs
    if manager:
        manager.reset()
    return [losses[m] for m in sorted(losses)] + [p.grad.clone() for p in model.parameters()]


def take_steps(
    net,
    context=None,
    lengths=(8, 8, 8),
    num_forwards=1,
    *,
    seed=1,
    meanwhile=None,
    backward=torch.Tensor.backward,
):
    """Return losses and gradients of steps of a net that takes tokens, and the random state.

    A step has some forwards of one length, and then their backwards. ``meanwhile`` is called with
    the net between both and after them, and with whether backward is to come.
    """
    torch.manual_seed(seed)
    found = []
    for length in lengths:
        losses = []
        for _ in range(num_forwards):
            with context or nullcontext():
                losses.append(net(torch.randint(50, (2, length))).square().mean())
        if meanwhile:
            meanwhile(net, True)
        for loss in losses[::-1]:
            backward(loss)
        if meanwhile:
            meanwhile(net, False)
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        found += [
            *(loss.detach() for loss in losses),
            *(getattr(g, "_local_tensor", g) for g in grads),
        ]
        net.zero_grad()
    return [*found, torch.get_rng_state()]


class StepsOf(nullcontext):
    """Is entered around forwards: ends the step of a manager that came before."""

    def __enter__(self):
        self.enter_result.reset()


def assert_same(expected, actual):
    assert len(expected) == len(actual)
    for index, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert torch.equal(a, b), f"result {index} of shape {tuple(a.shape)} differs"


def twice(loss):
    """Run a backward twice."""
    loss.backward(retain_graph=True)
    loss.backward()


def in_thread(function):
    """Return what a function returns in another thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(function).result()


def num_pending(backend):
    """Return how many copies a simulated device has queued and not run, both ways."""
    return len(backend.d2h_stream._queue) + len(backend.h2d_stream._queue)


def assert_nothing_left(manager):
    # On a device, backward's own thread may drop the last of a graph when the loop has gone on.
    deadline = time.monotonic() + 5
    while any((left := manager.state_of()).values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(left.values()), left


def check_steps(model, manager, order, num_steps=1, **given):
    """Take steps with a manager: each gives the bits of one without it, and leaves nothing."""
    expected = run_step(model, None, order, **given)
    for _ in range(num_steps):
        assert_same(expected, run_step(model, manager, order, **given))
        assert_nothing_left(manager)
