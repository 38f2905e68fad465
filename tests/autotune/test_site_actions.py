"""What may be done with layers, of what was seen in them, and how much the link carries."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from layered_job import WIDTH, LayeredJob
from programs import make_manager
from torch import nn
from virtual_clock import Tick

from megatron_offload.autotune import layers
from megatron_offload.autotune.layers import LayerWatch, SiteTimes
from megatron_offload.model_map.sites import Site, sites_of_layers
from megatron_offload.model_map.watch import _Call

MIB = 1 << 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(1, 1)


LAYER = Layer()


def site(name, number=0):
    return Site(number, name, LAYER if name == "layer" else LAYER.mlp)


def test_what_a_layer_saves_is_copied_while_those_behind_it_run():
    times = SiteTimes({str(n): site("layer", n) for n in range(3)}, None)
    times._us = {"0": 10.0, "1": 20.0, "2": 40.0}
    one = 1.1 * 2.0 * 1e3
    found = times.link_bytes(2.0, range(3), is_pipeline=False)
    assert found == pytest.approx({0: 60 * one, 1: 40 * one, 2: 0})
    found = times.link_bytes(2.0, range(3), is_pipeline=True)
    assert found == pytest.approx({0: 3 * 70 * one, 1: 3 * 60 * one, 2: 3 * 40 * one})
    assert times.link_bytes(2.0, range(4), is_pipeline=False)[2] == pytest.approx(40 * one)


@pytest.mark.parametrize(("times", "share"), [(1.0, 0.85), (1.5, 1.275), (3.0, 1.5)])
def test_of_a_layer_no_more_is_offloaded_than_its_backward_reloads(times, share):
    job = LayeredJob(num_layers=3)
    for layer, slow in zip(job.net.layers, (2, 1, 1), strict=True):
        us = 50.0 * slow  # the host hasn't got ahead when the first layer runs
        layer.forward = lambda x, us=us: Tick.apply(
            x, job.backend.advance_compute, us, times * 50 / us
        )
    x = job.net.head.weight * 1
    timing = SiteTimes(sites_of_layers(job.net), job.backend)
    timing.scale = 7.0
    timing.begin()
    for layer in job.net.layers:
        x = layer(x)
    x = Tick.apply(x, job.backend.advance_compute, 1000.0)  # the loss
    timing.end()
    assert timing.copied_us() == pytest.approx({0: 1050, 1: 525, 2: 525}), "until backward comes"
    torch.autograd.grad(x.sum(), job.net.head.weight)
    assert timing.is_partial
    first_us = 350 * min(3.0, 0.85 * times)
    assert timing.copied_us() == pytest.approx({0: first_us, 1: 350 * share, 2: 350 * share})


def test_the_host_s_time_counts_where_layers_take_no_longer_than_to_be_launched(monkeypatch):
    job = LayeredJob(us_per_row=300.0)
    clock = count(step=1500)  # asked where a layer and its MLP begin, and where it ends
    monkeypatch.setattr(job.backend, "host_us", lambda: next(clock))
    timing = SiteTimes(sites_of_layers(job.net), job.backend)
    timing.begin()
    job.net(torch.ones(10, WIDTH))
    timing.end()
    assert timing.forward_us == 6 * 3000
    assert timing.host_share == 1.0
    timing.scale, timing.sizes = 7.0, [2.0, 1.0, 0.5]
    assert timing.host_share == pytest.approx(2 / 3), "the longest is slower than the host"
    timing.sizes = [1 + layers._LAYER_US / 4 / 3000]
    assert timing.host_share == pytest.approx(0.75)
    assert timing.exposed_us(100) == pytest.approx(75), "as a part of what rows do in a layer"
    assert timing.exposed_us(5000) == pytest.approx(5000 - layers._LAYER_US / 4)
    timing.holds_back = True
    assert timing.host_share == 0.0


def watched(names, sizes, savers):
    watch = LayerWatch({x: site(name) for x, name in names.items()}, lambda _: True, make_manager())
    watch.sizes, watch.made = sizes, {2: "mlp_act"}
    calls = {name: _Call(name) for name in names}
    around = {x: tuple(y for name, y in calls.items() if x.startswith(name)) for x in calls}
    watch.saves = [(around[path], key) for key, path in savers.items()]
    on_device = {"host_share": 0.0, "exposed_us": lambda _: 0.0, "copy_share": 0.03}
    backward = {"copied_us": lambda: {0: 1500.0}, "is_partial": False}
    return watch, SimpleNamespace(us=lambda _: 1000.0, **backward, **on_device)


def done(watch, times):
    """Return what may be done with the one layer, whether functions run again or not."""
    kinds = watch.actions(times, 100.0, [])
    return [action for ((_, actions),) in kinds for action in actions]


def test_what_functions_make_is_offloaded_or_made_again():
    names = {"0.l": "layer", "0.l.mlp": "mlp"}
    watch, times = watched(names, {1: 2 * MIB, 2: 4 * MIB}, dict.fromkeys((1, 2), "0.l.mlp"))
    actions = done(watch, times)
    found = {one.parts: (one.freed_bytes // MIB, one.copied_bytes // MIB) for one in actions}
    act = ("mlp_act", "recompute")
    assert found[("mlp", 1),] == (4, 4)
    assert found[("mlp", 2),] == (6, 6)
    assert found[act,] == (4, 0)
    assert found[act, ("mlp", 1)] == (6, 2)
    assert found[("layer", "recompute"),] == (6, 0)
    assert (act, ("layer", "recompute")) not in found
    _, ((_, again),) = watch.actions(times, 100.0, [])
    assert again[0].parts == (act,)
    assert (("layer", "recompute"),) in {one.parts for one in again}
    times.host_share, times.exposed_us = 1.0, float
    again = next(x for x in done(watch, times) if x.parts == (act,))
    assert again.us > next(x for x in actions if x.parts == (act,)).us + 100
    before = {one.parts: one.us for one in done(watch, times)}
    watch.saves += [(watch.saves[0][0], None)] * 50  # what is kept takes the host's time too
    after = {one.parts: one.us for one in done(watch, times)}
    assert after[("mlp", 1),] - before[("mlp", 1),] == pytest.approx(50 * layers._KEPT_US)
    watch.saves += [(watch.saves[0][0], 2)] * 10  # so are views of what is offloaded
    del watch.savers
    more = {one.parts: one.us for one in done(watch, times)}
    more_us = 10 * (layers._KEPT_US + layers._VIEW_US)
    assert more[("mlp", 1),] - after[("mlp", 1),] == pytest.approx(more_us)


def test_of_grouped_experts_the_activation_alone_is_recomputed_or_something_of_the_mlp_done():
    paths = "0.l", "0.l.mlp", "0.l.mlp.experts", "0.l.mlp.experts.linear_fc2"
    names = dict(zip(paths, ("layer", "mlp", "mlp.experts", "moe_act"), strict=True))
    sizes, savers = {1: 8 * MIB, 2: 4 * MIB, 3: 4 * MIB}, {1: paths[2], 2: paths[2], 3: paths[3]}
    watch, times = watched(names, sizes, savers)
    watch._inputs[paths[3]] = {3: 4 * MIB}
    actions = done(watch, times)
    found = {one.parts: one.freed_bytes // MIB for one in actions}
    rerun, act = ("moe_act", "recompute"), ("mlp_act", "recompute")
    assert (found[rerun,], found[act, rerun], found[act,]) == (8, 8, 4)
    assert all({*parts} <= {rerun, act} for parts in found if rerun in parts)
    times.is_partial = True
    assert not any(rerun in one.parts for one in done(watch, times))


def test_of_tensors_of_one_size_those_that_others_save_too_come_first():
    found = layers._offloads([(4, True, 1), (4, False, 1), (2, True, 1)], has_inner=False)
    assert [what for what, *_ in found] == ["all"], "a row for one might pick the other's"


def test_as_many_tensors_are_offloaded_of_each_call_of_a_site():
    found = layers._offloads([(8, True, 1)] * 3 + [(4, True, 2)] * 6, 3, has_inner=True)
    assert [*found] == [(1, 3, 3, 24), (2, 6, 9, 36), ("all", 9, 15, 48)]
