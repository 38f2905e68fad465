"""Each door that finds what to offload keeps its promise, on the virtual clock."""

from __future__ import annotations

import time

import pytest
import torch
from layered_job import WIDTH, LayeredJob, actions, auto
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from virtual_clock import Tick

from megatron_offload.autotune import layers, search_steps
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.frontends.modules import offload_modules
from megatron_offload.integrations.torch_pipelining import offload_pipeline

pytestmark = pytest.mark.by_default
ROWS = 16
BARE_US = ROWS * 10.0 * 6 * 3


def make_job(gbps, percent=3, **settings):
    """Return a job whose model no door has been given."""
    job = LayeredJob(gbps, policy=auto(percent), **settings)
    job.search.close()
    job.manager.tuner = None
    return job


def gradients(net):
    found = [x.grad.clone() for x in net.parameters()]
    net.zero_grad()
    return found


@pytest.mark.parametrize(("gbps", "moves"), [(1.0, True), (0.0001, False)])
def test_marked_modules_are_offloaded_if_that_keeps_the_promise(gbps, moves):
    job, x = make_job(gbps), torch.randn(ROWS, WIDTH)

    def step():
        began_us = job.now()
        with job.manager.step():
            job.net(x).square().sum().backward()
        return job.now() - began_us, gradients(job.net)

    with offload_modules(job.net, "layers.*", manager=job.manager):
        _, expected = step()
        for _ in range(60):
            took_us, found = step()
            assert all(map(torch.equal, found, expected))
        assert job.search.is_converged
        assert (job.manager.last_step.offloaded_bytes > 0) == moves
        assert job.manager.rests != moves
        assert took_us <= 1.03 * BARE_US


@pytest.mark.parametrize(("gbps", "percent"), [(0.1, 3), (0.001, 40)])
def test_the_stage_of_a_pipeline_has_rows(one_rank, gbps, percent):
    job = make_job(gbps, percent)
    stage = PipelineStage(job.net, 0, 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, t: (y - t).square().mean())
    x, target = torch.randn(2 * ROWS, WIDTH), torch.randn(2 * ROWS, 3)

    def step():
        began_us = job.now()
        schedule.step(x, target=target)
        return job.now() - began_us, gradients(job.net)

    bare_us, expected = step()
    with offload_pipeline(schedule, manager=job.manager):
        for _ in range(90):
            took_us, found = step()
            assert all(map(torch.equal, found, expected))
        assert job.search.is_converged
        assert job.manager.rows
        assert {row.site for row in job.manager.rows} <= {"layer", "mlp"}
        assert took_us <= (1 + percent / 100) * bare_us
    assert not job.net.layers[0]._forward_hooks


def test_a_plan_for_replays_is_of_what_the_device_takes_and_not_of_a_slow_host(monkeypatch):
    paused = []
    monkeypatch.setattr(SimulatedBackend, "pause", lambda backend: paused.append(backend))
    monkeypatch.setattr(SimulatedBackend, "host_us", lambda *_: time.perf_counter() * 1e9)
    job = LayeredJob(0.1, policy=auto(3), whole_step_graph=True)
    search = job.found()
    assert paused, "the device was behind the host while it was timed"
    assert not search._own.tried
    assert "is predicted to take" in search.said
    assert job.manager.rows
    assert len(job.steps) < 12, "no step of a plan was measured"


def test_parts_of_a_layer_without_mlp_are_named_from_the_layer(monkeypatch):
    class Block(torch.nn.Module):
        def __init__(self, job):
            super().__init__()
            self.inner, self.job = torch.nn.Linear(WIDTH, WIDTH), (job,)

        def forward(self, x):
            (job,) = self.job
            x = Tick.apply(x, job.backend.advance_compute, job.us_per_row * len(x))
            return job.note(self.inner(job.note(x.sin())).sigmoid())

    job = LayeredJob(1.0, layer=Block, policy=auto(3))
    job.found()
    assert actions(job.search.plan.rows()) == {("model", "all")}, "layers' rows free less than half"
    monkeypatch.setattr(search_steps, "_LARGE_SHARE", 0.0)
    monkeypatch.setattr(layers, "_PART_US", 0.0)
    job = LayeredJob(1.0, layer=Block, policy=auto(3))
    assert "rows" in job.found().said
    assert {row.site for row in job.manager.rows} == {"layer", "inner"}
    assert job.manager.last_step.offloaded_bytes > 0


def test_a_plan_is_tried_once_its_memory_is_ready_and_the_allocator_is_left_alone(monkeypatch):
    ready_in, trims = iter([False] * 9), []
    ready = property(lambda _: next(ready_in, True))
    monkeypatch.setattr(SimulatedBackend, "is_host_prepared", ready)
    job = LayeredJob(0.1, policy=auto(3))
    monkeypatch.setattr(job.backend, "trim_device", lambda: trims.append(job.search._kind))
    kinds = []
    while not job.search.is_converged:
        job.step()
        kinds.append(job.search._kind)
    assert kinds[: kinds.index("trying")].count("bare") == 9
    assert job.manager.rows
    # At the end: until then steps without rows need that memory.
    assert trims == ["rows"]


@pytest.mark.parametrize(("num_short", "last"), [(1, 16), (29, 4)])
def test_the_device_s_memory_is_given_back_as_a_long_forward_ends(num_short, last, monkeypatch):
    job, trims = LayeredJob(0.1, policy=auto(3)), []
    monkeypatch.setattr(job.backend, "trim_device", lambda: trims.append(job.meter.live_bytes))
    while not job.search.is_converged:
        job.step(4 if job.search._kind == "rows" else 16)
    assert job.manager.rows
    for _ in range(num_short):
        job.step(4)
    assert not trims, "what a long step needs would be had anew, which takes a step long"
    for _ in range(2):
        job.step(last)
    assert trims == [pytest.approx(job.peak_bytes, rel=0.2)], "once, with all of it in use"


def test_more_memory_is_made_ready_where_a_longer_forward_comes_meanwhile(monkeypatch):
    job = LayeredJob(0.1, policy=auto(3), host_slab_bytes=1 << 15)
    asked, left = [], [0]

    def prepare(_, number):
        asked.append(number)
        left[0] = 2

    def is_ready(_):
        left[0] -= 1
        return left[0] < 0

    monkeypatch.setattr(job.backend, "prepare_host", prepare)
    monkeypatch.setattr(SimulatedBackend, "is_host_prepared", property(is_ready))
    while job.search._kind != "trying":
        job.step(16 if not asked else 64)
    assert len(asked) > 1
    assert asked[1] > 2 * asked[0], "nothing was pinned in between"


@pytest.mark.parametrize(("size", "is_ready"), [(1 << 10, True), (1 << 40, False)])
def test_only_memory_that_tensors_fit_into_is_made_ready(size, is_ready, monkeypatch):
    monkeypatch.setattr(layers.LayerWatch, "sizes_in_layers", [size])
    job = LayeredJob(0.1, policy=auto(3))
    asked = []
    monkeypatch.setattr(job.backend, "prepare_host", lambda _, number: asked.append(number))
    job.found()
    assert any(asked) == is_ready


def test_copies_take_more_of_a_replay_and_less_of_its_link():
    job = LayeredJob(0.1)
    sites = {"layer": layers.Site(0, "layer", job.net.layers[0])}
    found = []
    for holds_back in (False, True):
        times = layers.SiteTimes(sites, job.backend, holds_back=holds_back)
        times._us = {"layer": 1000.0}
        found.append((times.link_bytes(10.0, [0], is_pipeline=True)[0], times.copy_share))
    (eager, eager_share), (replay, replay_share) = found
    assert 0 < replay < eager / 2
    assert replay_share > 5 * eager_share
