"""Whole-model offload: every model of the zoo to the bit, whatever copies do."""

from __future__ import annotations

import contextlib
import gc
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import zoo
from programs import KIB, TWO_TIMINGS, assert_nothing_left, assert_same, make_config, make_manager
from test_compile import Model
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_offload import OffloadConfig, offload_modules
from megatron_offload.core.group import GroupState
from megatron_offload.engine import step as step_file
from megatron_offload.errors import (
    ConfigError,
    InPlaceModificationError,
    IntegrationError,
    StateError,
)
from megatron_offload.frontends import whole_model
from megatron_offload.frontends.whole_model import (
    NoOpManager,
    OffloadActivations,
    get_act_offloading_ctx_manager,
)
from megatron_offload.memory.host_pool import HostPool

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


@pytest.mark.parametrize("stash", [1, 2, 50])
def test_the_stash_bounds_the_tensors_in_flight(stash, monkeypatch):
    offload = make_offload(max_fwd_stash_size=stash)
    most, commit = [], offload.manager.commit

    def watched(group):
        commit(group)
        most.append(sum(count for _, count, _ in offload.manager.window._entries))

    monkeypatch.setattr(offload.manager, "commit", watched)
    zoo.assert_exact("transformer", offload)
    assert 0 < max(most) <= stash


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


def with_two_backwards(context):
    model, x = made("transformer")
    with context:
        loss = zoo.loss_of(model, x)
    first = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    return [*first, *torch.autograd.grad(loss, [*model.parameters()])]


@pytest.mark.parametrize(
    "settings", [TIGHT, {**TIGHT, "checking": True}, ROOMY], ids=["tight", "checked", "roomy"]
)
@pytest.mark.parametrize("program", [
    taken_in_inference_mode,
    traced_inside,
    of_one_array_twice,
    of_what_is_expanded_to_one_element,
    with_backward_inside,
    with_two_backwards,
])  # fmt: skip
def test_an_unusual_program_has_the_same_bits(program, settings):
    torch.manual_seed(1)
    expected, offload = program(contextlib.nullcontext()), make_offload(**settings)
    for _ in range(3):
        torch.manual_seed(1)
        assert_same(expected, program(offload))
    assert offload.end_step() or program is traced_inside
    assert_nothing_left(offload.manager)


def test_a_model_may_have_a_sparse_buffer():
    model = nn.Linear(4, 4)
    model.register_buffer("neighbours", torch.eye(4).to_sparse())
    with get_act_offloading_ctx_manager(model, warn_if_no_head=False):
        loss = torch.sparse.mm(model.neighbours, model(torch.ones(4, 4))).sum()
    loss.backward()
    assert model.weight.grad is not None


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


def test_an_evaluation_and_a_dropped_graph_change_nothing():
    offload = make_offload()
    model, x = made("transformer")
    for _ in range(3):
        with offload, torch.no_grad():
            zoo.loss_of(model, x)
        with offload:
            dropped = zoo.loss_of(model, x)
        del dropped
        zoo.assert_exact("transformer", offload, steps=1)


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


@pytest.mark.parametrize("settings", [{}, {"checking": True}], ids=str)
def test_a_default_device_is_the_program_s_own_affair(settings):
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 3)), torch.randn(8, 32)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with torch.device("meta"):
        offload = make_offload(max_inflight_bytes=0, prefetch_bytes=0, **settings)
        for _ in range(3):
            with offload:
                loss = model(x).square().mean()
            assert_same(expected, torch.autograd.grad(loss, list(model.parameters())))
    del loss
    offload.end_step()
    assert offload.last_step.reloaded_bytes > 0


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


def test_an_error_in_backward_leaves_the_next_step_right():
    offload = make_offload()
    model, inputs = zoo.make("transformer")
    for _ in range(2):
        with offload:
            x = model.embedding(inputs(torch.Generator().manual_seed(9)))
            for layer in model.layers:
                x = layer(x)
                x.register_hook(fail)
            loss = model.output(x).square().mean()
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
        del x, loss
        zoo.assert_exact("transformer", offload, steps=1)


def test_large_tensors_move_one_by_one_and_small_ones_together():
    offload = make_offload(max_fwd_stash_size=50)
    x = torch.ones(1 << 18, requires_grad=True)
    with offload:
        y = x
        for _ in range(3):
            y = y.exp()  # 1 MiB each
        z = y[:100]
        for _ in range(3):
            z = z.exp()
    groups = list(offload.manager.decisions.groups())
    assert [len(group.references) for group in groups] == [1, 1, 1, 3]
    z.sum().backward()


@pytest.mark.parametrize("most", [1000, 5])
def test_a_long_forward_has_few_groups_and_they_are_those_of_every_step(most):
    offload = make_offload(max_fwd_stash_size=most)
    offload.manager.tuner = None
    x = torch.ones(1 << 18, requires_grad=True)
    sizes = []
    for _ in range(3):
        with offload:
            y = x
            for _ in range(160):
                y = y.mul(0.1).exp()  # of 1 MiB each, one is saved
        y.sum().backward()
        del y
        groups = offload.manager.decisions.groups()
        sizes.append([len(group.references) for group in groups])
        assert offload.end_step()
    assert sizes[0] == sizes[1] == sizes[2]
    assert sizes[0] == sorted(sizes[0][:-1]) + sizes[0][-1:]
    assert sum(sizes[0]) == 160
    assert (sizes[0][0], max(sizes[0])) == (1, min(5, most // 2))
    offload.close()


class Branches(torch.nn.Module):
    """A norm whose output several others save."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(256)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(256, 64) for _ in range(5))

    def forward(self, x):
        y = self.norm(x)
        return x + torch.cat([branch(y).exp() for branch in self.branches[:4]], dim=1)


def test_the_groups_are_the_same_whatever_is_recomputed():
    model = torch.nn.Sequential(*(Branches() for _ in range(4)))
    found = []
    for units in ((), ("norm",)):
        config = make_config("eager", recompute=units, policy={"kind": "modules"}, **TIGHT)
        offload = get_act_offloading_ctx_manager(model, config=config, warn_if_no_head=False)
        with offload:
            y = model(torch.ones(1024, 256))
        y.sum().backward()
        del y
        groups = offload.manager.decisions.groups()
        found.append([(group.key, len(group.references)) for group in groups])
        assert offload.end_step()
        assert (offload.last_step.by_name["activations"].recomputed_bytes > 0) is bool(units)
        offload.close()
    assert found[0] == found[1]
    assert len(found[0]) > 8


def test_what_is_recomputed_in_a_backward_inside_the_block_is_kept():
    model, x = made("reentrant")
    x.requires_grad_()
    offload = make_offload(**TIGHT)
    with offload:
        loss = zoo.loss_of(model, x)
        before = sum(len(group.blocks()) for group in offload.manager.decisions.groups())
        loss.backward()
        after = sum(len(group.references) for group in offload.manager.decisions.groups())
    assert before == after > 0


def test_a_forward_that_fails_copies_nothing_more():
    offload = make_offload(max_fwd_stash_size=50, **TIGHT)
    x = torch.ones(100, requires_grad=True)

    def forward():
        kept.append(x.exp().exp())
        raise ZeroDivisionError

    kept = []
    with pytest.raises(ZeroDivisionError), offload:
        forward()
    assert offload.manager.window.num_inflight == 0
    assert "activations" not in offload.manager.transfers.stats.by_name


def test_the_arguments_reach_the_engine():
    offload = OffloadActivations(
        use_pin_memory=False,
        use_streams=False,
        min_offload_size=77,
        config=OffloadConfig(host_memory_bytes="1MiB"),
    )
    config = offload.manager.config
    assert (config.pin_memory, config.copy_streams) == (False, False)
    assert config.host_memory_bytes == 1 << 20
    with offload:
        pass
    offload.close()
    offload.close()


def test_on_the_compute_stream_nothing_has_to_be_held_for_copies():
    offload = OffloadActivations(
        use_streams=False,
        min_offload_size=0,
        manager=make_manager("eager", copy_streams=False, **ROOMY),
    )
    x = torch.ones(100, requires_grad=True)
    with offload:
        y = x
        for index in range(4):
            y = y.exp()
            assert offload.manager.window.num_inflight == 0
            assert offload.manager.host_pool.alone.peak()[0] == 400 * index, "all but the last"
    y.sum().backward()


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


@pytest.mark.usefixtures("no_collector")
def test_noop_keeps_no_graph_alive():
    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad

    with NoOpManager():
        y = Watched.apply(torch.randn(8, requires_grad=True))
    reference = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
    del y
    assert reference.expired()


class Wrapped(nn.Module):
    def __init__(self, **inner):
        super().__init__()
        for name, module in inner.items():
            setattr(self, name, module)

    def forward(self, *args):
        return next(iter(self.children()))(*args)


HEADS = {
    "torchtune": lambda: zoo.make("transformer")[0],
    "wrapped": lambda: Wrapped(module=Wrapped(_orig_mod=zoo.make("transformer")[0])),
    "adapters": lambda: Wrapped(base_model=Wrapped(model=zoo.make("transformer")[0])),
    "classifier": lambda: zoo.make("residual")[0],
    "head": lambda: zoo.make("lstm")[0],
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_kept_on_the_device(name, recwarn):
    model = HEADS[name]()
    heads = ("output", "classifier", "head")
    head = next(m for n, m in model.named_modules() if n.split(".")[-1] in heads)
    is_image = name == "classifier"
    inputs = torch.randn(3, 3, 12, 12) if is_image else torch.randint(0, 40, (3, 12))
    context = get_act_offloading_ctx_manager(
        model, True, min_offload_size=0, manager=make_manager(**ROOMY)
    )
    assert isinstance(context, OffloadActivations)
    assert not [w for w in recwarn if "output head" in str(w.message)]
    counts = []
    head.register_forward_pre_hook(lambda *_: counts.append(num_tensors(context)), prepend=True)
    head.register_forward_hook(lambda *_: counts.append(num_tensors(context)))
    with context:
        model(inputs).square().mean().backward()
    assert counts[0] == counts[1] > 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def num_tensors(context):
    return sum(len(group.references) for group in context.manager.decisions.groups())


def test_a_model_without_a_head_warns_unless_it_is_expected_or_off(recwarn):
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="no output head was found"):
        get_act_offloading_ctx_manager(model, True, manager=make_manager())
    context = get_act_offloading_ctx_manager(model, warn_if_no_head=False, manager=make_manager())
    assert isinstance(context, OffloadActivations)
    assert isinstance(get_act_offloading_ctx_manager(model, False), contextlib.nullcontext)
    assert not recwarn


def test_a_context_that_does_nothing_can_be_asked_and_refuses_what_no_context_takes():
    model = nn.Linear(3, 3)
    with get_act_offloading_ctx_manager(model, False, config=OffloadConfig()) as entered:
        model(torch.ones(2, 3)).sum().backward()
    off = get_act_offloading_ctx_manager(model, False)
    assert entered is None
    assert off.last_step.offloaded_bytes == 0
    assert off.last_step.metrics()
    assert off.describe() == "nothing is offloaded: it is switched off"
    assert not off.end_step()
    off.close()
    with pytest.raises(TypeError, match="bogus"):
        get_act_offloading_ctx_manager(model, False, bogus=3)
    for make in (OffloadActivations, partial(get_act_offloading_ctx_manager, model)):
        with pytest.raises(TypeError, match=r"'min_size'; did you mean 'min_offload_size'\?$"):
            make(min_size=3)
    for other, said in ((None, "a NoneType"), ([1], "a list"), (nn.Linear, "the class")):
        with pytest.raises(ConfigError, match=f"nn.Module, and was given as {said}"):
            get_act_offloading_ctx_manager(other)
    with pytest.raises(ConfigError, match="enable_activation_offloading is True or False"):
        get_act_offloading_ctx_manager(model, OffloadConfig(enabled=False))


def test_a_closed_context_says_so_when_it_is_entered():
    offload = OffloadActivations()
    offload.close()
    with pytest.raises(StateError, match=r"close\(\) has given the memory .* make a new one"):
        offload.__enter__()
    with OffloadActivations():
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_cuda_device_that_is_not_there_is_reported():
    with pytest.raises(IntegrationError, match="needs a CUDA device and torch sees none"):
        OffloadActivations(config=OffloadConfig(backend="cuda"))


def test_little_host_memory_is_reported_once_and_counted(caplog):
    offload = make_offload(**TIGHT, host_memory_bytes=8 * KIB, host_slab_bytes=4 * KIB)
    assert zoo.assert_exact("transformer", offload).num_refused_blocks > 0
    told = [r for r in caplog.records if "host memory" in r.message]
    assert len(told) == 1


def test_buffers_of_the_model_are_kept():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model.register_buffer("table", torch.randn(32, 32))
    with pytest.warns(UserWarning, match="no output head"):
        context = get_act_offloading_ctx_manager(
            model, True, min_offload_size=0, manager=make_manager(**ROOMY)
        )
    x = torch.randn(32, 32, requires_grad=True)
    with context:
        (x * model.table).sum().backward()
    assert context.manager.transfers.stats.by_name["activations"].offloaded_bytes <= 0


def test_groups_are_left_when_their_tensors_are_gone():
    offload = make_offload()
    with offload:
        loss = zoo.loss_of(*made("transformer"))
    groups = list(offload.manager.decisions.groups())
    loss.backward()
    left = [group for group in groups if group.state is GroupState.DONE]
    assert len(left) >= len(groups) - 1, "all but the last are left while backward runs"


# A context for each step, which is how it is documented where the name comes from.


@pytest.fixture
def no_collector():
    whole_model._idle.clear()
    whole_model._allocated.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    whole_model._idle.clear()
    whole_model._allocated.clear()


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def slab_bytes():
    pools = [one for one in gc.get_objects() if type(one) is HostPool]
    return sum(pool.stats.slab_bytes_total for pool in pools)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_named", [False, True])
def test_a_context_for_each_step_takes_no_more_memory(is_named):
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.ones(256, 64)
    config = OffloadConfig(host_slab_bytes="8MiB", max_inflight_bytes=0, prefetch_bytes=0)
    slabs, resident = [], []
    for step in range(50):
        context = OffloadActivations(config=config)
        with context if is_named else OffloadActivations(config=config):
            loss = net(x).square().sum()
        loss.backward()
        del loss
        resident.append(resident_bytes())
        if step in (2, 25, 49):
            slabs.append(slab_bytes())
    assert context.manager.last_step.offloaded_bytes > 0
    assert len(set(slabs)) == 1
    assert max(resident[2:]) - resident[2] < 8 << 20


def test_a_context_says_nothing_of_the_steps_of_one_before():
    x = torch.ones(256, 64)
    for size in (64, 32):  # of another model, in the memory of the first
        offload, net = OffloadActivations(config=make_config()), nn.Linear(64, size)
        assert offload.last_step.offloaded_bytes == 0
        with offload:
            loss = net(x).sigmoid().sum()
        loss.backward()
        assert 0 < offload.last_step.offloaded_bytes <= 256 * (64 + size) * 4
        del offload


@pytest.mark.usefixtures("no_collector")
def test_a_context_for_each_step_goes_on_with_what_was_learned():
    config = OffloadConfig(max_inflight_bytes=0, prefetch_bytes="64KiB")
    model, inputs = zoo.make("transformer")
    generator = torch.Generator().manual_seed(1)
    late, managers = [], set()
    for _ in range(4):
        with OffloadActivations(min_offload_size=0, config=config):
            loss = zoo.loss_of(model, inputs(generator))
        loss.backward()
        del loss
        context = OffloadActivations(min_offload_size=0, config=config)
        assert context.end_step()
        late.append(context.last_step.num_late_reloads)
        managers.add(id(context.manager))
        del context
    assert late == [0, 0, 0, 0], "reloads run ahead of backward in the first step too"
    assert len(managers) == 1


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_bit_is_the_same_with_a_context_for_each_forward(name):
    config = make_config("late", **TIGHT)

    def context(model):
        return OffloadActivations(min_offload_size=0, config=config)

    order = "FFFBFBBB"
    assert_same(zoo.expected(name, order=order), zoo.train(name, context, order=order))
    (groups,) = whole_model._allocated.values()
    assert groups.end_step_if_over()
    assert groups.manager.last_step.offloaded_bytes > 0
    assert_nothing_left(groups.manager)


@pytest.mark.usefixtures("no_collector")
def test_contexts_that_exist_together_share_nothing():
    first, second = OffloadActivations(), OffloadActivations()
    assert first.manager is not second.manager
    other = []
    thread = threading.Thread(target=lambda: other.append(OffloadActivations().manager))
    left = first.manager
    del first
    thread.start()
    thread.join()
    assert other[0] is not left
    assert OffloadActivations(max_fwd_stash_size=6).manager is not left
    assert OffloadActivations(config=OffloadConfig(fraction=0.5)).manager is not left
    assert OffloadActivations().manager is left


@pytest.mark.usefixtures("no_collector")
def test_what_was_closed_or_changed_by_hand_is_nobody_s_next():
    closed = OffloadActivations()
    closed.close()
    closed.close()
    changed = OffloadActivations()
    changed.manager.configure(OffloadConfig(fraction=0.5))
    managers = {closed.manager, changed.manager}
    off = OffloadActivations()
    off.manager.disable_offload()
    switched = off.manager
    del closed, changed, off
    first, second = OffloadActivations(), OffloadActivations()
    assert not {first.manager, second.manager} & managers
    assert first.manager is switched
    assert first.manager.do_offload


@pytest.mark.usefixtures("no_collector")
def test_other_settings_get_the_memory_that_nobody_uses():
    x = torch.ones(64, 64, requires_grad=True)
    config = OffloadConfig(host_slab_bytes="1MiB", max_inflight_bytes=0, prefetch_bytes=0)
    with OffloadActivations(config=config) as context:
        y = x.exp().exp().sum()
    pool = context.manager.host_pool
    del context
    OffloadActivations(config=config.model_copy(update={"fraction": 0.5}))
    assert pool.stats.slab_bytes_total > 0  # the graph is there yet
    y.backward()
    del y
    OffloadActivations(max_fwd_stash_size=7, config=config)
    assert pool.stats.slab_bytes_total == 0


@pytest.mark.usefixtures("no_collector")
def test_a_manager_without_owners_gives_its_memory_back():
    before = slab_bytes()
    for _ in range(3):
        offload = make_offload(**TIGHT)
        with offload:
            loss = torch.ones(64, 64, requires_grad=True).exp().exp().sum()
        loss.backward()
        del loss
        assert offload.end_step()
        assert slab_bytes() > before
        del offload
        assert slab_bytes() == before


def test_the_head_is_hooked_once():
    model, _ = zoo.make("transformer")
    for _ in range(3):
        get_act_offloading_ctx_manager(model)
    assert len(model.output._forward_pre_hooks) == len(model.output._forward_hooks) == 1


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


class MixesThree(torch.autograd.Function):
    """Saves three views of one storage, as attention does."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q + k * v

    @staticmethod
    def backward(ctx, grad):
        _, k, v = ctx.saved_tensors
        return grad, grad * v, grad * k


def test_views_that_lie_in_each_other_are_copied_once_and_leave():
    linear = nn.Linear(512, 3 * 512, bias=False)

    def layer(x):
        return MixesThree.apply(*linear(x).view(1024, 8, 3, 64).unbind(2)).reshape(1024, 512)

    def gradient(offload):
        linear.zero_grad()
        x = torch.ones(1024, 512, requires_grad=True)
        with offload:
            y = layer(layer(x * 1.0))
        y.sum().backward()
        return x.grad, linear.weight.grad

    offload = make_offload(min_offload_size=1024, **TIGHT)
    expected = gradient(contextlib.nullcontext())
    for _ in range(4):
        assert_same(expected, gradient(offload))
    assert offload.end_step()
    step = offload.last_step
    assert step.offloaded_bytes == 2 * (1 + 3) * 1024 * 512 * 4  # each layer's input and views
    # The last views are asked back while the forward still has them: they never left.
    assert step.externally_referenced_bytes == 3 * 1024 * 512 * 4


AUTO = {"kind": "auto", "measured_plans": 3}
ONE = {"kind": "auto", "measured_plans": 1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"policy": "modules"}, {"kind": "modules"}),
        ({"policy": "auto"}, {**AUTO, "most_slowdown_percent": 3.0}),
        ({"most_slowdown_percent": 5}, {**AUTO, "most_slowdown_percent": 5.0}),
        ({"policy": ONE, "most_slowdown_percent": 2}, {**ONE, "most_slowdown_percent": 2.0}),
        ({"memory_target": "22GiB"}, {**AUTO, "kind": "memory_target", "memory_target": 22 << 30}),
    ],
)
def test_a_policy_can_be_given_as_arguments(given, expected):
    context = OffloadActivations(config=OffloadConfig(backend="simulated"), **given)
    assert context.manager.config.policy.model_dump() == expected
    assert context.manager.config.backend == "simulated"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_fwd_stash_size": 0}, "max_fwd_stash_size must be at least 1"),
        ({"min_offload_size": -1}, "min_offload_size can't be negative"),
        ({"config": OffloadConfig(), "manager": make_manager()}, "not both"),
        ({"config": {"fraction": 0.5}}, "as an OffloadConfig, not as a dict; OffloadConfig"),
        ({"use_pin_memory": OffloadConfig()}, "use_pin_memory is True or False, not of type Off"),
        ({"use_streams": nn.Linear(1, 1)}, "use_streams is True or False, not of type Linear"),
        ({"policy": "auto", "memory_target": "1GiB"}, "'policy.memory_target' of kind 'auto'"),
        ({"most_slowdown_percent": 1, "memory_target": "1GiB"}, "slowdown_percent' of kind 'mem"),
        ({"policy": {"memory_target": "1GiB"}, "memory_target": "2GiB"}, "says it too"),
        ({"policy": "modules", "config": OffloadConfig(policy="auto")}, "config's policy and the"),
        ({"memory_target": "1GiB", "config": OffloadConfig(rows=[])}, "config's rows and the arg"),
        ({"policy": "auto", "manager": make_manager()}, "a manager is given"),
        ({"policy": 5}, "there is no kind '5'"),
        ({"most_slowdown_percent": True}, "a number is wanted .got True"),
        ({"policy": "module"}, "'modules'"),
        ({"most_slowdown_percent": -1}, "most_slowdown_percent"),
    ],
)
def test_arguments_of_another_type_or_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        OffloadActivations(**given)


@pytest.mark.parametrize(
    "what", [{"site": "mlp", "offload": "all"}, {"site": "mlp", "recompute": True}]
)
def test_of_two_contexts_for_one_model_each_frees_memory_in_its_own_forwards(what):
    model, x = Model(), torch.randn(8, 32)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    contexts = [
        get_act_offloading_ctx_manager(
            model, config=make_config(rows=[what]), min_offload_size=0, warn_if_no_head=False
        )
        for _ in range(2)
    ]
    for number in range(6):
        context = contexts[number % 2]
        with context:
            loss = model(x).square().sum()
        assert_same(expected, torch.autograd.grad(loss, list(model.parameters())))
        del loss
        assert context.end_step()
        step = context.last_step
        assert step.offloaded_bytes + step.recomputed_bytes > 0


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
