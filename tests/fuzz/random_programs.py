"""Random training programs: schedules x groups x streams x aliasing x exceptions x copy timings.

A program is built from one seed alone and can be run with a manager or without. Both runs draw the
same numbers, so losses and gradients must be bitwise equal.
"""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from programs import KIB, TIMINGS, assert_nothing_left, make_manager
from random_parts import ROWS, SIMPLE, WIDTH
from traps import InjectedError, RaiseInBackward, broken_backend

from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.recompute.recipes import recomputable

RECIPES = [
    lambda x, weight: F.layer_norm(x, (WIDTH,), weight[0]),
    lambda x, weight: F.dropout(F.gelu(x * weight[1]), 0.3),
    lambda x, weight: (x + weight[2]).cos(),
    lambda x, weight: (x * weight[:ROWS]).t(),
]


@dataclass
class Remade:
    """Up to three functions in a row, each of what the one before made, and a use of all."""

    functions: list
    uses: list

    def __call__(self, s, x):
        result = x
        for function, is_used in zip(self.functions, self.uses, strict=True):
            y = recomputable(function, x, s.weight)
            x = y.reshape(ROWS, WIDTH)
            if is_used:
                result = result * y.exp().reshape(ROWS, WIDTH) + x.sum()
        return result + F.linear(x, s.weight)


@dataclass
class Segment:
    """Operations, and groups around some of them; a group may end after later segments began."""

    ops: list
    group: str | None = None
    commit_late: bool = False
    inner: list[Segment] = field(default_factory=list)
    residual: bool = False
    as_tuple: bool = False
    holds: bool = False
    """Whether the program itself keeps its result for a while, as a schedule keeps inputs."""
    hops: bool = False
    """Whether it runs on the other stream than what is around it, where the program has two."""


def make_segment(rng, depth=0):
    group = rng.choice([None, "a", "b", "c"])
    segment = Segment(
        ops=[(rng.choice(SIMPLE), rng.randrange(4)) for _ in range(rng.randint(1, 3))],
        group=group,
        commit_late=rng.random() < 0.3,
        as_tuple=rng.random() < 0.2,
        residual=rng.random() < 0.4,
        holds=rng.random() < 0.25,
    )
    if depth < 2:
        segment.inner = [make_segment(rng, depth + 1) for _ in range(rng.choice([0, 0, 1, 2]))]
    return segment


def add_recipes(rng, segments):
    for segment in segments:
        if rng.random() < 0.4:
            functions = rng.choices(RECIPES, k=rng.randint(1, 3))
            recomputed = Remade(functions, [rng.random() < 0.6 for _ in functions])
            segment.ops.insert(rng.randint(0, len(segment.ops)), (recomputed, rng.randrange(4)))
        add_recipes(rng, segment.inner)


def add_hops(rng, segments):
    for segment in segments:
        segment.hops = rng.random() < 0.3
        add_hops(rng, segment.inner)


class Streams:
    """Which of two streams a program computes on; where it goes on, it waits for what it needs."""

    def __init__(self, rng, backend):
        self._rng = rng
        self._backend = backend
        self._both = backend.compute_stream(), backend.side_stream

    def any(self, *, needs_both):
        """Return a context on one of them, which is behind all of the other if that is needed."""
        here = self._rng.choice(self._both)
        return self._on(here) if needs_both else self._backend.computing_on(here)

    def other(self):
        """Return a context on the one that is not current."""
        one, two = self._both
        return self._on(two if self._backend.compute_stream() is one else one, goes_back=True)

    @contextmanager
    def _on(self, here, *, goes_back=False):
        before = self._backend.compute_stream()
        for stream in self._both:
            here.wait_event(stream.record_event())
        with self._backend.computing_on(here):
            yield
        if goes_back:
            before.wait_event(here.record_event())


def make_schedule(rng):
    """Return the actions of one step; every backward or drop comes after its forward."""
    num_microbatches = rng.randint(1, 5)
    actions, pending, started = [], [], 0
    while started < num_microbatches or pending:
        if started < num_microbatches and (not pending or rng.random() < 0.5):
            actions.append(("forward", started))
            pending.append(started)
            started += 1
        else:
            which = rng.choice([0, 0, -1, rng.randrange(len(pending))])
            microbatch = pending.pop(which)
            kind = rng.choice(["backward"] * 8 + ["drop", "twice"])
            actions.append((kind, microbatch))
        if rng.random() < 0.08:
            actions.append(("evaluate", 100 + started))
    if rng.random() < 0.15:
        where = rng.randrange(len(actions) + 1)
        kind = rng.choice(["raise in forward", "raise in group", "raise in backward"])
        actions.insert(where, (kind, 200))
    return actions


class Program:
    """Everything that a seed decides."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.seed = seed
        self.segments = [make_segment(rng) for _ in range(rng.randint(1, 4))]
        self.steps = [make_schedule(rng) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.6:  # what is learned in one step is used in the next
            self.steps += [self.steps[0]] * rng.choice([2, 2, 5])
        sizes = [0, 1 * KIB, 4 * KIB, 16 * KIB, None]
        self.settings = {
            "timing": rng.choice(TIMINGS),
            "max_inflight_bytes": rng.choice(sizes),
            "prefetch_bytes": rng.choice(sizes),
            "min_tensor_bytes": rng.choice([0, 0, 500]),
            "host_memory_bytes": rng.choice([0, 2 * KIB, 8 * KIB, 1024 * KIB, 1024 * KIB]),
            "host_slab_bytes": rng.choice([4 * KIB, 64 * KIB]),
            "fraction": rng.choice([1.0, 1.0, 0.5, 0.0]),
            "checking": rng.random() < 0.2,
        }
        add_recipes(random.Random(~seed), self.segments)
        on_streams = random.Random(seed * 2 + 1)
        self.has_streams = on_streams.random() < 0.5
        add_hops(on_streams, self.segments)
        self._streams = None
        self._held = []
        # The first weight always learns, so that every loss has a gradient.
        self.trains = [index == 0 or rng.random() < 0.8 for index in range(4)]
        self.inputs_need_grad = rng.random() < 0.7
        self.aborts = rng.random() < 0.5
        """Whether who catches an error tells the manager."""
        self.fault = None
        if rng.random() < 0.2:
            self.fault = rng.randrange(len(self.steps)), rng.randrange(150), rng.random() < 0.5

    def automatic_groups(self):
        """Return what runs this program without its marks."""
        rng = random.Random(-self.seed - 1)
        share = rng.choice([None, None, 0.5])
        return AutomaticGroups(
            make_manager(seed=self.seed, **self.settings),
            "all",
            max_inflight_tensors=rng.choice([None, 0, 1, 3, 20]),
            should_offload=None if share is None else lambda num_bytes: rng.random() < share,
        )

    def run(self, manager, groups=None):
        """Run all steps; return each whole step's losses and gradients, by its number.

        Args:
            manager: gets the marks; None runs without.
            groups: is entered around every forward instead of the marks.
        """
        generator = torch.Generator().manual_seed(self.seed)
        weights = [
            torch.nn.Parameter(
                torch.randn(WIDTH, WIDTH, generator=generator) * 0.2, requires_grad=trains
            )
            for trains in self.trains
        ]
        results = {}
        serving = groups.manager if groups else manager
        PipelineOffloadManager.instance = serving
        self._streams = None
        if serving and self.has_streams:
            self._streams = Streams(random.Random(self.seed), serving.backend)
        for number, actions in enumerate(self.steps):
            for weight in weights:
                weight.grad = None
            try:
                with self._broken_backend(serving, number):
                    losses = self._run_step(manager, weights, actions, number, groups)
                    if manager:
                        manager.reset()
            except InjectedError:
                if serving and self.aborts:
                    serving.abort()
                continue
            if groups:
                groups.end_step_if_over()
                assert not groups._forwards
            if serving:
                assert_nothing_left(serving)
            grads = [None if w.grad is None else w.grad.clone() for w in weights]
            results[number] = losses, grads
        PipelineOffloadManager.instance = None
        return results

    def _broken_backend(self, manager, number):
        """Let one call of the backend in one step raise, before or after it has done its work."""
        if manager is None or self.fault is None or self.fault[0] != number:
            return nullcontext()
        _, at, after = self.fault
        return broken_backend(manager.backend, at, after=after)

    def _run_step(self, manager, weights, actions, number, groups=None):
        graphs, losses = {}, []

        def forward(**options):
            if groups is None:
                return self._forward(manager, weights, **options)
            groups.begin()
            has_failed = True
            try:
                loss = self._forward(manager, weights, **options)
                has_failed = False
            finally:
                groups.end(has_failed=has_failed)
            return loss

        def take(kind, microbatch):
            if kind == "forward":
                graphs[microbatch] = forward()
                losses.append(graphs[microbatch].detach().clone())
            elif kind == "evaluate":
                with torch.no_grad():
                    losses.append(forward())
            elif kind == "backward":
                graphs.pop(microbatch).backward()
                del self._held[::2]
            elif kind == "twice":
                graphs[microbatch].backward(retain_graph=True)
                graphs.pop(microbatch).backward()
            elif kind == "drop":
                del graphs[microbatch]
            elif kind == "raise in backward":
                RaiseInBackward.apply(forward()).backward()
            else:
                forward(fail=kind)

        self._held.clear()
        for kind, microbatch in actions:
            torch.manual_seed(self.seed * 1000 + number * 100 + microbatch)
            with self._place(kind):
                take(kind, microbatch)
        return losses

    def _place(self, kind):
        """Return a context on the stream that an action is queued on."""
        if self._streams is None:
            return nullcontext()
        return self._streams.any(needs_both=kind not in ("forward", "evaluate", "drop"))

    def _forward(self, manager, weights, fail=None):
        x = torch.randn(ROWS, WIDTH).requires_grad_(self.inputs_need_grad)
        if manager:
            manager.begin_chunk()
        late = []
        for segment in self.segments:
            x = self._run_segment(manager, weights, segment, x, late)
        if fail == "raise in group" and manager:
            x = start_group(manager, x, "failing")
            with manager:
                raise InjectedError
        if fail:
            raise InjectedError
        for name in reversed(late):
            x = commit_group(manager, x, name) if manager else x
        return (x * weights[0][0]).square().mean()

    def _run_segment(self, manager, weights, segment, x, late):
        with self._streams.other() if self._streams and segment.hops else nullcontext():
            return self._run_here(manager, weights, segment, x, late)

    def _run_here(self, manager, weights, segment, x, late):
        residual = x
        grouped = manager is not None and segment.group is not None
        if grouped:
            given = start_group(manager, (x, None) if segment.as_tuple else x, segment.group)
            x = given[0] if segment.as_tuple else given
            manager.__enter__()
        try:
            for op, index in segment.ops:
                # Values stay tame: what is compared is bits, and NaN would hide them.
                made = op(SimpleNamespace(weight=weights[index], number=index), x)
                x = torch.tanh(made.reshape(x.shape))
                if segment.holds:
                    self._held.append(x.detach())
            for inner in segment.inner:
                x = self._run_segment(manager, weights, inner, x, late)
        finally:
            if grouped:
                manager.__exit__()
        if segment.residual:
            x = x + residual
        if not grouped:
            return x
        if segment.commit_late:
            late.append(segment.group)
            return x
        return commit_group(manager, [x], segment.group)[0]


def check(seed):
    """Run the program of ``seed`` without offload, with its marks, and without them."""
    program = Program(seed)
    expected = program.run(None)
    manager = make_manager(seed=seed, **program.settings)
    compare(program, expected, program.run(manager))
    manager.close()
    groups = program.automatic_groups()
    compare(program, expected, program.run(None, groups))
    groups.manager.close()
    return manager


def compare(program, expected, actual):
    """Compare every bit of the steps that were not to fail."""
    broken = {program.fault[0]} if program.fault else set()
    assert expected.keys() - broken <= actual.keys() <= expected.keys()
    for step, (losses, grads) in actual.items():
        for index, (a, b) in enumerate(zip(expected[step][0], losses, strict=True)):
            assert torch.equal(a, b), f"step {step}: loss {index} differs"
        for index, (a, b) in enumerate(zip(expected[step][1], grads, strict=True)):
            same = a is b is None or (a is not None and b is not None and torch.equal(a, b))
            assert same, f"step {step}: gradient {index} differs"
