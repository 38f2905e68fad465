"""Ordinary programs that hooks of saved tensors get wrong where they don't take care."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from programs import in_group, make_manager

from megatron_offload.recompute.call_state import CallState, RandomStates, generators_of

SIZE = 64


class Precomputed(torch.autograd.Function):
    """Make a leaf's gradient in forward, as fused losses do, and return it as it was saved."""

    @staticmethod
    def forward(ctx, x, p, made):
        ctx.save_for_backward(made)
        return (x * 1).sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(SIZE), ctx.saved_tensors[0], None


class WriteToSaved(torch.autograd.Function):
    """Leave the gradient where the saved tensor was, as Megatron's loss does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum() * 1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.mul_(grad * 5)


def kept_graph(group):
    p, x = torch.rand(SIZE, requires_grad=True), torch.rand(SIZE, requires_grad=True)
    y = group(lambda x: Precomputed.apply(x, p, x.detach() * 2), x)
    for i in range(3):
        y.backward(retain_graph=i < 2)
    return [p.grad]


def read_again_in_backward(group):
    x, v, p = torch.rand(SIZE), *(torch.rand(SIZE, requires_grad=True) for _ in range(2))

    def halve(p):
        p.grad.mul_(0.5)

    def run(v):
        made = x * 3
        return Precomputed.apply(made * v, p, made)

    p.register_post_accumulate_grad_hook(halve)
    group(run, v).backward()
    return [v.grad, p.grad]


def read_after_backward(group):
    made, p = torch.rand(SIZE), torch.rand(SIZE, requires_grad=True)
    x = torch.rand(SIZE, requires_grad=True)
    group(lambda x: Precomputed.apply(x, p, made), x).backward()
    p.grad.zero_()
    return [made]


def two_readers_one_writes(group, size=SIZE, view=lambda y: y):
    x, w = torch.rand(SIZE, requires_grad=True), torch.rand(size, requires_grad=True)

    def run(x):
        y = x * 2
        return (view(y) * w).sum() + WriteToSaved.apply(y)

    group(run, x).backward()
    return [x.grad, w.grad]


def written_twice(group):
    x = torch.rand(SIZE, requires_grad=True)
    y = group(lambda x: WriteToSaved.apply(x * 2), x)
    y.backward(retain_graph=True)
    y.backward()
    return [x.grad]


def parts_with_counters_of_their_own(group):
    x, w, v = torch.rand(2, SIZE), torch.rand(2, SIZE, requires_grad=True), torch.rand(1, SIZE)
    v.requires_grad_()
    whole = (x * 1).mul_(2)
    part = whole.unsafe_chunk(2, 0)[1]
    log = group(lambda a: a * w, whole)
    part.mul_(3)
    del whole
    y = group(lambda a: a * v, part)
    del part
    y.sum().backward()
    return [v.grad, log]


def stale_view(group, gives=True):
    x = torch.linspace(-1, 1, SIZE).requires_grad_()
    scales = [torch.linspace(1, 2, SIZE) * 10**i for i in range(3)]
    b = x * 1.7
    v = b[:]
    b.mul_(2.3)

    def run(v, b):
        return (b * scales[0]).sum() + (b * scales[1]).sum() + (v * scales[2]).sum()

    if gives:
        run(group(lambda v: v, v), b).backward()
    else:
        group(lambda pair: run(*pair), (v, b)).backward()
    return [x.grad]


def stale_part(group):
    x = torch.rand(4, SIZE, requires_grad=True)
    h = x * 1
    part, _ = h.chunk(2)
    h.add_(1)
    group(lambda given: given[1] * given[1], (part, h)).sum().backward()
    return [x.grad]


def released_by_force(group):
    x, w, v = (torch.rand(SIZE, requires_grad=True) for _ in range(3))
    h = x * 1
    z = h * v  # saved in no group
    y = group(lambda h: h * w, h, forced=[h])
    (z + y).sum().backward()
    return [x.grad, w.grad, v.grad]


def outcome(program, group):
    torch.manual_seed(0)
    try:
        return [tensor.detach().clone() for tensor in program(group)]
    except RuntimeError as error:
        return str(error)[:80]


@pytest.mark.parametrize("program", [
    kept_graph,
    read_again_in_backward,
    read_after_backward,
    two_readers_one_writes,
    lambda group: two_readers_one_writes(group, SIZE // 2, lambda y: y[1::2]),
    written_twice,
    parts_with_counters_of_their_own,
    stale_view,
    lambda group: stale_view(group, gives=False),
    stale_part,
    released_by_force,
])  # fmt: skip
def test_a_program_ends_as_without_offload(program):
    manager = make_manager(max_inflight_bytes=0, prefetch_bytes=0)

    def group(run, x, forced=None):
        return in_group(manager, run, x, forced=forced)

    expected = outcome(program, lambda run, x, forced=None: run(x))
    with manager.step():
        found = outcome(program, group)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert all(map(torch.equal, expected, found)), (expected, found)


def test_a_copy_that_fails_is_tried_once():
    manager = make_manager()
    backend = manager.backend
    copies = [(torch.empty(4), torch.empty(8))]
    backend.d2h_stream._queue.append((backend.d2h_stream._clock, copies))
    with pytest.raises(RuntimeError, match="size"):
        backend.sync_copies()
    backend.sync_copies()


def test_a_graph_that_goes_runs_nothing_that_swallows_an_interrupt():
    manager = make_manager(max_inflight_bytes=0, prefetch_bytes=0, begins_chunk=True)
    x = torch.randn(SIZE, requires_grad=True)
    y = in_group(manager, lambda x: x.exp().sin(), x)
    called = []
    sys.setprofile(lambda frame, event, arg: event == "call" and called.append(frame.f_code))
    try:
        del y
    finally:
        sys.setprofile(None)
    ours = [code for code in called if "megatron_offload" in code.co_filename]
    assert ours == []
    assert manager.state_of()["host bytes"] == 0


class Tracker:
    """As Megatron-core's: by name a state, or a generator where it is safe for graphs."""

    def __init__(self):
        self.states_ = {"plain": torch.Generator().get_state(), "graph": torch.Generator()}

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def draw(self):
        generator = torch.Generator().set_state(self.states_["plain"])
        drawn = torch.rand(3, generator=generator), torch.rand(3, generator=self.states_["graph"])
        self.states_["plain"] = generator.get_state()
        return torch.cat([torch.rand(3), *drawn])


def test_the_host_and_the_tracker_draw_again_and_go_on_where_they_were(monkeypatch):
    home = types.SimpleNamespace(_CUDA_RNG_STATE_TRACKER=(tracker := Tracker()))
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", home)
    states = RandomStates(generators_of([]))
    assert states.are_current()
    first, generator = tracker.draw(), tracker.states_["graph"]
    assert not states.are_current()
    behind = RandomStates(generators_of([]))
    for _ in range(2):
        assert torch.equal(states.run(tracker.draw), first)
        assert behind.are_current()
        assert tracker.states_["graph"] is generator
    torch.rand(3, generator=generator)  # of the tracker alone counts too
    assert not behind.are_current()
    assert not torch.equal(tracker.draw(), first)


@pytest.mark.parametrize("backend", ["generic", "cuda"])
def test_a_call_runs_again_in_the_precision_that_it_had(backend):
    def found():
        kinds = [("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul")]
        return [torch._C._get_fp32_precision_getter(*kind) for kind in kinds]

    state, before = CallState(), found()
    try:
        torch._C._set_fp32_precision_setter(backend, "all", "tf32")
        now = found()
        assert now != before
        assert state.run(found) == before
        assert found() == now
    finally:
        for kind in ("generic", "cuda", "mkldnn"):
            for part in ("all", "matmul", "conv", "rnn") if kind != "generic" else ("all",):
                torch._C._set_fp32_precision_setter(kind, part, "none")
