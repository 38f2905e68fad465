"""Whole-model offload: every model of the zoo to the bit, whatever copies do."""

from __future__ import annotations

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import zoo
from programs import KIB, TWO_TIMINGS, assert_nothing_left, assert_same, make_manager
from test_compile import Model
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_offload import OffloadConfig, offload_modules
from megatron_offload.engine import step as step_file
from megatron_offload.errors import InPlaceModificationError
from megatron_offload.frontends import whole_model
from megatron_offload.frontends.whole_model import (
    NoOpManager,
    OffloadActivations,
    get_act_offloading_ctx_manager,
)

ROOMY = {"max_inflight_bytes": None, "prefetch_bytes": None}
TIGHT = {"max_inflight_bytes": 0, "prefetch_bytes": 4096}
"""So tight that even these models have to move all they save."""


def make_offload(timing="late", *, max_fwd_stash_size=5, min_offload_size=0, **settings):
    settings = {**ROOMY, "min_tensor_bytes": min_offload_size, **settings}
    manager = make_manager(timing, **settings)
    return OffloadActivations(
        max_fwd_stash_size=max_fwd_stash_size, min_offload_size=min_offload_size, manager=manager
    )


def made(name, seed=1):
    """Return a model of the zoo, and its inputs."""
    model, inputs = zoo.make(name)
    return model, inputs(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("timing", TWO_TIMINGS)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_bit_is_the_same(name, timing):
    step = zoo.assert_exact(name, make_offload(timing, **TIGHT), order="FFFBFBBB")
    assert step.offloaded_bytes > 0
    assert step.reloaded_bytes > 0
    zoo.assert_exact(name, make_offload(timing), order="FFBB")


def taken_in_inference_mode(context):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    x = torch.randn(64, 32)  # which the program still holds
    with context:
        loss = model(x).square().mean()
    with torch.inference_mode():
        loss.backward()
    return [p.grad for p in model.parameters()]


def traced_inside(context):
    def step(x, w):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(((x @ w).sin() * x).square().sum(), w)[0]

    with context:
        traced = make_fx(step)(torch.randn(32, 32), torch.randn(32, 32))
    return [traced(torch.randn(32, 32), torch.randn(32, 32))]


def of_one_array_twice(context):
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    array = np.random.default_rng(0).normal(size=(64, 32)).astype("f4")
    losses = []
    for _ in range(3):
        with context:
            losses.append(model(torch.from_numpy(array)).square().mean())
    sum(losses).backward()
    return [p.grad for p in model.parameters()]


def of_what_is_expanded_to_one_element(context):
    x = torch.randn(1, 4, requires_grad=True)
    with context:
        loss = torch.distributions.Categorical(logits=x).log_prob(torch.tensor([2])).sum()
    return torch.autograd.grad(loss, x)


def with_backward_inside(context):
    model, x = made("transformer")
    with context:
        zoo.loss_of(model, x).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "settings", [TIGHT, {**TIGHT, "checking": True}, ROOMY], ids=["tight", "checked", "roomy"]
)
@pytest.mark.parametrize("program", [
    taken_in_inference_mode,
    traced_inside,
    of_one_array_twice,
    of_what_is_expanded_to_one_element,
    with_backward_inside,
])  # fmt: skip
def test_an_unusual_program_has_the_same_bits(program, settings):
    torch.manual_seed(1)
    expected, offload = program(contextlib.nullcontext()), make_offload(**settings)
    for _ in range(3):
        torch.manual_seed(1)
        assert_same(expected, program(offload))
    assert offload.end_step() or program is traced_inside
    assert_nothing_left(offload.manager)


def test_blocks_may_nest():
    model, x = made("views")
    expected = torch.autograd.grad(zoo.loss_of(model, x), list(model.parameters()))
    outer, inner = make_offload(), make_offload()
    for _ in range(3):
        with outer:
            y = x * 1.0
            with inner, inner:
                loss = zoo.loss_of(model, y)
        actual = torch.autograd.grad(loss, list(model.parameters()))
        del loss, y
        assert_same(expected, actual)
    for offload in (outer, inner):
        offload.end_step()
        assert_nothing_left(offload.manager)


@pytest.mark.parametrize("has_backward", [True, False])
def test_a_graph_that_is_kept_for_good_does_not_keep_the_step_from_ending(
    monkeypatch, has_backward
):
    monkeypatch.setattr(step_file, "_MOST_BEHIND", 3)
    offload = make_offload(**TIGHT)
    model, x = made("views", seed=9)

    def step(context):
        with context:
            loss = zoo.loss_of(model, x)
        return torch.autograd.grad(loss, list(model.parameters())) if has_backward else [loss]

    expected = step(contextlib.nullcontext())
    with offload:
        kept = zoo.loss_of(model, x)
    for number in range(20):
        assert_same(expected, step(offload))
        if number == 3:
            assert "still held by a graph: activations[chunk 0, group 0]" in str(offload.last_step)
    assert len(offload.manager.decisions.entered) == 1
    if has_backward:
        assert offload.manager.step_number > 10
        assert_same(expected, torch.autograd.grad(kept, list(model.parameters())))
    del kept
    offload.end_step()
    assert_nothing_left(offload.manager)


def test_threads_of_a_data_parallel_model_are_counted_and_said_once(caplog):
    class InThreads(nn.DataParallel):
        def forward(self, x):
            with ThreadPoolExecutor() as pool:
                return sum(pool.map(self.module, x.chunk(len(self.device_ids))))

    model = InThreads(nn.Linear(32, 32))
    model.device_ids = [0, 1]  # of a machine that has two
    config = OffloadConfig(policy="modules")
    offload = get_act_offloading_ctx_manager(model, warn_if_no_head=False, config=config)
    for _ in range(2):
        with offload:
            model(torch.ones(8, 32, requires_grad=True)).sum().backward()
    assert offload.last_step.num_hidden_groups == 4
    assert caplog.text.count("nn.DataParallel's threads") == 1


def test_what_is_reloaded_during_an_evaluation_is_no_tensor_of_inference_mode():
    offload = make_offload(max_inflight_bytes=0, prefetch_bytes=4 * KIB, recompute=())
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    x = torch.randn(8, 32, requires_grad=True)

    def step(context):
        losses = []
        for _ in range(2):
            with context:
                losses.append(model(x).square().mean())
        (grad,) = torch.autograd.grad(losses.pop(), x)
        with torch.inference_mode(), context:  # where groups are left, and others are reloaded
            model(x)
        (other,) = torch.autograd.grad(losses.pop(), x, create_graph=True)
        other.square().sum().backward()
        return [grad, other.detach(), *(p.grad.clone() for p in model.parameters())]

    for _ in range(3):
        model.zero_grad()
        expected = step(contextlib.nullcontext())
        model.zero_grad()
        assert_same(expected, step(offload))


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_may_get_its_parameters_in_its_first_forward(is_marked):
    lazy = nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(3)
    model, x = nn.Sequential(nn.Linear(32, 64), *lazy), torch.randn(8, 32)
    manager = make_manager()
    if is_marked:
        offload_modules(model, ["*"], manager=manager)
    else:
        offload = get_act_offloading_ctx_manager(model, warn_if_no_head=False, manager=manager)
    for _ in range(2):
        model.zero_grad()
        with manager.step() if is_marked else offload:
            loss = model(x).square().mean()
            loss.backward()
    assert manager.last_step.offloaded_bytes > 0
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    assert_same(expected, [p.grad for p in model.parameters()])


def fail(*_):
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("keeps_head", [False, True])
def test_an_error_in_forward_leaves_the_next_step_right_and_no_hooks(keeps_head):
    offload = make_offload()
    model, x = made("transformer")
    if keeps_head:
        offload = get_act_offloading_ctx_manager(model, True, manager=make_manager(**ROOMY))
    for broken in (model.output, model.output, model.layers[1].linear1, model.layers[0].norm1):
        handle = broken.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"), offload:
            model(x)
        handle.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        gc.collect()  # the exception's traceback held the graph
        zoo.assert_exact("transformer", offload, steps=1)


def test_a_context_that_is_left_inside_a_backward_leaves_the_next_step_right():
    offload = make_offload(**TIGHT)
    model, x = made("transformer")
    parameters = list(model.eval().parameters())
    expected = torch.autograd.grad(zoo.loss_of(model, x), parameters)
    for _ in range(2):
        offload.__enter__()
        loss = zoo.loss_of(model, x)
        loss.register_hook(lambda _: offload.__exit__())
        assert_same(expected, torch.autograd.grad(loss, parameters))
        del loss
    with offload:
        pass
    assert_nothing_left(offload.manager)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_noop_switches_surrounding_hooks_off_and_keeps_the_check():
    offload = make_offload()
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        with NoOpManager():
            y = x.exp()
            z = (y * y).sum()
        assert not offload.manager.decisions.groups()
    (grad,) = torch.autograd.grad(z, x, retain_graph=True)
    assert torch.equal(grad, torch.autograd.grad((x.exp() * x.exp()).sum(), x)[0])
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(InPlaceModificationError):
        z.backward()


def test_it_is_a_pair_of_saved_tensors_hooks():
    offload = OffloadActivations(manager=make_manager())
    assert isinstance(offload, torch.autograd.graph.saved_tensors_hooks)
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        packed = offload.pack_hook(y := x * 2)
        y.sin()
    assert torch.equal(offload.unpack_hook(packed), y)
    with torch.autograd.graph.saved_tensors_hooks(offload.pack_hook, offload.unpack_hook):
        z = x.sin()  # not entered: what is saved stays
    z.sum().backward()
    assert torch.equal(x.grad, x.cos())
    key, manager = torch._C.DispatchKey.ADInplaceOrView, make_manager(begins_chunk=True)
    chunk = manager.cur_forward_chunk()
    for pack in (offload.pack_hook, partial(chunk.pack, manager.start_group(chunk, "group"))):
        y = x * 2
        with offload, torch._C._SetExcludeDispatchKeyGuard(key, True):  # as selective checkpoints
            packed = pack(y)
        y.add_(1)
        with pytest.raises(InPlaceModificationError):
            packed.unpack()


@pytest.mark.by_default
def test_an_interrupt_as_a_context_begins_leaves_its_search_going_on(monkeypatch):
    net = Model()
    context = get_act_offloading_ctx_manager(net, warn_if_no_head=False)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_model, "patch_loss", interrupt)
    with pytest.raises(KeyboardInterrupt), context:
        pass
    monkeypatch.undo()
    for _ in range(5):
        with context:
            loss = net(torch.ones(4, 32)).sum()
        loss.backward()
    assert context.manager.tuner.is_converged
