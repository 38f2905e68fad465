"""Programs that call their layers otherwise than a search expects: it ends, and raises nothing."""

from __future__ import annotations

import gc
import random
from functools import partial

import pytest
import torch
from layered_job import WIDTH, GradientCheckpointingLayer, LayeredJob, auto
from programs import assert_same
from torch import nn

from megatron_offload import OffloadActivations, OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.autotune.model_steps import ModelSteps
from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.core.units import format_bytes
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError
from megatron_offload.frontends.modules import offload_modules

pytestmark = pytest.mark.by_default
ROWS = 16


def make_job(percent=40):
    return LayeredJob(0.001, policy=auto(percent))


def of_config(percent=200, **settings):
    """Return a configuration under which a search runs on a CPU."""
    simulated = {"host_time": True, "d2h_gbps": 5.0, "h2d_gbps": 5.0}
    given = {"policy": auto(percent), "min_tensor_bytes": 0, **settings}
    return OffloadConfig(backend="simulated", simulated=simulated, **given)


class Wrapped(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def wrap_mlps(job):
    for layer in job.net.layers:
        layer.mlp = Wrapped(layer.mlp)


CHANGES = {
    "another layer": lambda job: setattr(job.net.layers, "1", GradientCheckpointingLayer(job)),
    "other layers": lambda job: setattr(
        job.net, "layers", nn.ModuleList(GradientCheckpointingLayer(job) for _ in range(3))
    ),
    "a layer less": lambda job: job.net.layers.pop(-1),
    "wrapped parts": wrap_mlps,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("at", [1, 2, 3, 5, 9])
def test_a_model_may_change_while_it_is_looked_at(change, at):
    job = make_job()
    for number in range(80):
        if number == at:
            change(job)
            gc.collect()
        job.step()
    assert job.search.is_converged


class OfMapping(nn.Module):
    """Takes a batch in a mapping, or none, and returns a mapping."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, batch=None):
        x = torch.ones(ROWS, WIDTH) if batch is None else batch["x"]
        return {"loss": self.inner(x).square().mean()}


class Writes(nn.Module):
    """Layers return views: they are written to, or are stale as their bases have been."""

    def __init__(self, is_stale):
        super().__init__()
        self.layers, self.is_stale = nn.ModuleList(OfMapping().inner for _ in range(3)), is_stale
        for layer in self.layers if is_stale else ():
            layer.register_forward_hook(lambda layer, args, output: self.write(output * 1.7))

    def write(self, whole):
        view = whole[:]
        whole.mul_(2.3)
        return view, whole

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            if self.is_stale:  # gradients of three uses, whose sum depends on their order
                y = y[1] * 0.3 + y[1].sin() * 1e2 + y[0].cos() * 1e4
            y += x
            x = y
        return {"loss": x.sum()}


@pytest.mark.parametrize(("make", "num_forwards", "given"), [
    *((OfMapping, number, [{"x": torch.ones(ROWS, WIDTH)}]) for number in (1, 3)),
    *((OfMapping, number, []) for number in (1, 3)),
    *((partial(Writes, is_stale), 1, [torch.ones(1, 2, WIDTH)]) for is_stale in (False, True)),
])  # fmt: skip
def test_a_search_ends_whatever_layers_are_given_and_return(make, num_forwards, given):
    net = make()
    expected = torch.autograd.grad(net(*given)["loss"], net.parameters())
    context = get_act_offloading_ctx_manager(net, config=of_config(), warn_if_no_head=False)
    search = context.manager.tuner
    for _ in range(80):
        losses = []
        for _ in range(num_forwards):
            with context:
                losses.append(net(*given)["loss"])
        while losses:
            assert_same(expected, torch.autograd.grad(losses.pop(0), net.parameters()))
    assert search.is_converged
    assert search._clock.most_pending == num_forwards
    assert "aren't called" not in search.said


def test_steps_of_nothing_are_no_steps():
    job, draw = LayeredJob(0.01, policy=auto(40)), random.Random(0)
    for _ in range(60):
        job.step(draw.choice((0, 16)))
    assert job.search.is_converged
    assert job.search.plan is not None


def test_a_forward_that_returns_nothing_has_not_failed():
    net = OfMapping()
    forward, losses = net.forward, []
    net.forward = lambda x: losses.append(forward(x)["loss"])
    manager = PipelineOffloadManager(of_config())
    offload_modules(net, "inner.*", manager=manager)
    for _ in range(80):
        with manager.step():
            net({"x": torch.ones(ROWS, WIDTH)})
            losses.pop().backward()
    assert manager.tuner.is_converged


def test_a_layer_that_is_all_layers_of_a_model_is_one_forward():
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH)] * 4)
    steps = ModelSteps([net[0]], lambda: None, lambda tokens: None)
    for number in (1, 2):
        steps.enter()
        net(torch.ones(ROWS, WIDTH))
        steps.leave()
        net(torch.ones(ROWS, WIDTH))
        assert steps.tokens == [ROWS] * number
        assert steps.num_pending == number


@pytest.mark.parametrize("is_called", [True, False])
def test_what_two_forwards_of_one_context_save_is_said_once(is_called):
    job = make_job()
    forward = job.net if is_called else job.net.forward
    while not job.search.is_converged:
        with job.offload:
            loss = sum(forward(torch.randn(ROWS, WIDTH)).square().sum() for _ in range(2))
        loss.backward()
    assert f"of {format_bytes(job.search._saved_bytes, 2)} saved" in job.search.said


def test_a_tower_that_is_not_called_is_no_matter_for_the_steps():
    job = make_job()
    towers = nn.ModuleDict({"a": nn.ModuleList(GradientCheckpointingLayer(job) for _ in range(3))})
    job.net._modules = {"tower": towers, **job.net._modules}
    job.search.close()
    job.manager.tuner = None
    job.offload = job.context()
    job.found()
    assert {row.layers for row in job.manager.rows} == {"0-5"}


def test_where_what_is_looked_at_is_called_no_more_the_search_ends(caplog):
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    context = OffloadActivations(config=of_config(201))
    for _ in range(80):
        with context:
            loss = nn.MSELoss()(torch.ones(ROWS, WIDTH) @ weight, torch.zeros(ROWS, WIDTH))
        loss.backward()
    assert context.manager.tuner.is_converged
    assert "the layers that it has aren't called" in caplog.text
    assert context.manager.rests


def test_marks_that_are_removed_leave_no_search():
    job = make_job()
    job.search.close()
    manager = job.manager
    manager.tuner = None
    marked = offload_modules(job.net, "layers.*", manager=manager)
    search = manager.tuner
    inner = offload_modules(job.net, "layers.*.mlp", manager=manager)
    assert manager.tuner is search
    for _ in range(6):
        with manager.step():
            job.net(torch.ones(ROWS, WIDTH)).sum().backward()
    inner.remove()
    assert manager.tuner is search
    marked.remove()
    assert manager.tuner is None
    assert not manager.rests
    assert not any(len(part._forward_pre_hooks) for part in job.net.layers[0].modules())


def test_a_context_behind_another_looks_at_its_own_model(caplog):
    config = of_config(202)
    with OffloadActivations(config=config):
        (torch.ones(ROWS, WIDTH, requires_grad=True) @ torch.ones(WIDTH, 3)).exp().sum().backward()
    assert caplog.text.count("no module was called") == 1
    for _ in range(2):  # the second model comes when the first is gone
        job = make_job()
        job.us_per_row = 0.0
        context = OffloadActivations(config=config)
        with context:
            pass  # an empty batch
        with context:
            loss = job.net(torch.ones(ROWS, WIDTH)).sum()
        loss.backward()
        assert isinstance(context.manager.tuner, RowSearch)
        assert context.manager.tuner.is_of(job.net)
        del job, loss, context
        gc.collect()
    assert caplog.text.count("no module was called") == 1
    assert "policy 'auto' looks for rows" not in caplog.text


def test_a_row_of_the_whole_model_stands_alone_and_needs_no_model():
    whole = {"site": "model", "offload": "all"}
    for other in ({"site": "mlp", "offload": "all"}, {"site": "layer", "recompute": True}):
        with pytest.raises(ConfigError, match="leaves no other row"):
            OffloadConfig(rows=[whole, other])
    context = OffloadActivations(config=OffloadConfig(rows=[whole], backend="simulated"))
    with context:
        x = torch.ones(1024, 512, requires_grad=True)
        loss = x.sin().cos().exp().sum()
    loss.backward()
    context.end_step()
    assert context.last_step.offloaded_bytes > 0


def test_a_device_of_unknown_size_is_not_taken_to_be_full():
    net = LayeredJob().net
    manager = PipelineOffloadManager(of_config(recompute="layer"))
    context = get_act_offloading_ctx_manager(net, manager=manager, min_offload_size=0)
    for layer in net.layers:
        layer.job[0].us_per_row = 0.0
    for _ in range(60):
        with context:
            loss = net(torch.ones(ROWS, WIDTH)).sum()
        loss.backward()
    assert "unasked" not in manager.tuner.said


def test_a_pattern_is_no_kind_that_a_search_may_recompute():
    with pytest.raises(ConfigError, match=r"'\*\*\.norm' names modules; 'rows' do that"):
        of_config(recompute=("norm", "**.norm"))


def test_of_two_lists_that_a_forward_calls_the_first_counts():
    job = make_job()
    job.search.close()
    job.net.behind = nn.ModuleList(GradientCheckpointingLayer(job) for _ in range(3))
    first, second = job.net.layers, job.net.behind

    def forward(x):
        for layer in (*first, *second):
            x = layer(x)
        return job.net.head(x)

    job.net.forward = forward
    job.manager.tuner = None
    job.offload = job.context()
    job.found()
    assert job.search._clock.most_pending == 1
    assert job.search._bare_tokens == ROWS
