"""Runs that find rows by their own steps, on the virtual clock: promises and bits hold."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import math
import random
import time
from unittest import mock
from weakref import ref

import layered_job
import pytest
import torch
import yaml
from layered_job import (
    WIDTH,
    GradientCheckpointingLayer,
    LayeredJob,
    PlainLayer,
    RandomLayer,
    TimedMlp,
    auto,
)
from virtual_clock import Tick

from megatron_offload import OffloadActivations, OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.autotune import layers
from megatron_offload.autotune.row_answers import RowAnswers, in_short
from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.backends.base import DeviceMemory
from megatron_offload.cli.report import write_page
from megatron_offload.config import OffloadConfig as Config
from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import ConfigError, StateError
from megatron_offload.observe.run_report import save_report
from megatron_offload.planning.found import read_frontier
from megatron_offload.planning.frontier import KEEP, Action

pytestmark = pytest.mark.by_default

BARE_US = 16 * 10.0 * 6 * 3
FULL_BYTES = 79872
"""What a step of 16 rows takes at its peak without offload."""


def target(num_bytes):
    return {"kind": "memory_target", "memory_target": num_bytes}


def found_job(*given, lengths=(16,), **settings):
    """Return a job that has found its rows."""
    job = LayeredJob(*given, **settings)
    job.found(lengths)
    return job


def actions(rows):
    return {(row.site, row.offload or "recompute") for row in rows}


@pytest.mark.parametrize(("gbps", "percent"), [(1.0, 1), (1.0, 20), (0.001, 20), (0.01, 40)])
def test_what_is_found_frees_memory_and_costs_no_more_than_it_may(gbps, percent, caplog):
    job = LayeredJob(gbps, policy=auto(percent))
    search = job.found()
    _, took_us, peak_bytes = job.steps[-1]
    slowdown = 100 * (took_us / BARE_US - 1)
    assert slowdown <= percent
    assert peak_bytes < 0.8 * FULL_BYTES
    found = search._own.tried[search._own.place][0]
    assert found.low - 0.1 <= slowdown <= found.high + 0.1
    assert ("layer", "recompute") in actions(job.manager.rows) or gbps == 1.0
    plan, text = caplog.messages
    assert "policy auto: some 20 to 50 steps are looked at, then rows cost at most" in plan
    assert text == f"megatron-offload: auto: {search.said}"
    rows = search.said.partition("rows: ")[2].partition(" free")[0]
    assert Config(rows=rows).rows == job.manager.rows, "what it says can be pasted"


def test_what_is_found_is_left_for_the_command_with_the_row_of_a_loss(tmp_path, prints):
    job = LayeredJob(0.001, policy=auto(20))
    job.search.loss_is_by_rows = lambda: True
    search = job.found()
    assert search.said.startswith("rows: [{layers: all, site: loss, by_rows: true}, {layers: ")
    save_report(job.manager, tmp_path / "run")
    page = write_page(tmp_path / "run").read_text()
    assert page.index('id="plan"') < page.index('id="memory"'), "plans are the first picture"
    assert "<dt>Memory of the plan</dt>" in page
    rows = prints("plan", "--from", tmp_path / "run").splitlines()[-1]
    assert Config(**yaml.safe_load(rows)).rows[1:] == job.manager.rows
    assert rows.removesuffix("]") in search.said


def test_a_search_that_goes_on_or_found_nothing_leaves_no_plan_as_followed(tmp_path):
    job = LayeredJob(0.001, policy=auto(20))
    job.step()
    with pytest.raises(StateError, match="goes on"):
        job.search.save(tmp_path)
    job.found().save(tmp_path)
    assert read_frontier(tmp_path).stages[0].followed > 0
    job.search._stop("an interrupt has ended the search", "")
    job.search.save(tmp_path)
    found = read_frontier(tmp_path)
    assert found.stages[0].followed == 0
    assert found.said == job.search.said.removeprefix("megatron-offload: ")
    other = LayeredJob(0.001, policy=auto(20)).search
    other._stop("it has ended before there was a plan", "")
    other.save(tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ConfigError, match=r"holds no frontier\.json"):
        read_frontier(tmp_path)


def test_where_nothing_pays_no_hook_is_left_and_it_is_said_once(caplog):
    job = found_job(0.001, policy=auto(1))
    _, text = caplog.messages
    assert "nothing is offloaded or recomputed: the least that frees anything" in text
    with job.offload:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert job.manager.rows == ()
    for _ in range(9):
        assert job.step() == BARE_US
    assert job.manager.host_pool.stats.slab_bytes_total == 0


class RoutedMlp(torch.nn.Module):
    """One whose routing no rerun repeats, and whose experts' it does."""

    def __init__(self, job):
        super().__init__()
        self.experts = TimedMlp(job)

    def forward(self, x):
        return self.experts(x) * random.random()


class RoutedLayer(GradientCheckpointingLayer):
    mlp_type = RoutedMlp


class AttentiveLayer(GradientCheckpointingLayer):
    """Has a second attention that does nothing, as Megatron's layers have."""

    def __init__(self, job):
        super().__init__(job)
        self.self_attention, self.cross_attention = TimedMlp(job), torch.nn.Identity()

    def forward(self, x):
        return super().forward(x + self.cross_attention(self.self_attention(x)))


@pytest.mark.parametrize(("gbps", "what"), [(1.0, 2), (0.001, "recompute")])
def test_a_part_that_saves_nothing_is_no_matter(gbps, what):
    job = found_job(gbps, layer=AttentiveLayer, policy=target("1KiB"))
    kinds = (all_ for kind in job.search._kinds for all_ in kind.values())
    found = {part for all_ in kinds for one in all_ for part in one.parts}
    assert ("attention", what) in found
    assert not any("cross_attention" in path for path in job.search._sites())
    assert job.manager.rows


class IdleLayer(AttentiveLayer):
    """Its attention saves nothing in this step, as experts don't that get no tokens."""

    def forward(self, x):
        with torch.no_grad():
            around = self.self_attention(x)
        return GradientCheckpointingLayer.forward(self, x + self.cross_attention(around))


def test_ranks_are_of_one_stage_whatever_their_layers_save():
    stages = {
        LayeredJob(0.001, layer=x, policy=auto(40)).found()._stage
        for x in (AttentiveLayer, IdleLayer)
    }
    assert len(stages) == 1


def test_experts_are_recomputed_where_their_routing_can_not_be():
    job = found_job(0.001, policy=auto(40), layer=RoutedLayer)
    assert actions(job.manager.rows) == {("mlp.experts", "recompute")}


@pytest.mark.parametrize("is_host_bound", [False, True])
@pytest.mark.parametrize("part_us", [0.0, 1000.0])
def test_large_parts_are_groups_of_their_own_where_the_host_has_time_for_them(
    is_host_bound, part_us, monkeypatch
):
    monkeypatch.setattr(layers, "_PART_US", part_us)
    monkeypatch.setattr(layers.SiteTimes, "host_share", float(is_host_bound))
    monkeypatch.setattr(layers.SiteTimes, "exposed_us", lambda *_: 0.0)
    job = found_job(1.0, policy=auto(1), layer=PlainLayer)
    found = actions(job.manager.rows)
    whole, parts = ("mlp", "all"), {("mlp.up", "all"), ("mlp.down", "all")}
    has_parts = not is_host_bound and not part_us
    assert (whole in found) is has_parts
    assert found.isdisjoint(parts) is not has_parts
    assert job.manager.last_step.by_name.keys() == {site for site, _ in found}


@pytest.mark.parametrize("lengths", [(16, 16, 4, 16, 4, 16), (16, 16, 4, 4, 4, 4, 4, 4, 4)])
def test_what_is_planned_holds_for_long_forwards_whichever_is_looked_at(lengths):
    first_tried = []
    for shorts in ((), lengths):
        job = LayeredJob(1.0, policy=auto(6))
        for length in shorts:
            job.step(length)
        first_tried.append(next(iter(job.found()._own.tried)))
    assert first_tried[0] == first_tried[1] > 0
    is_soon = lengths.count(4) <= 3
    assert job.search._watched_tokens == (16 if is_soon else 4)


def test_no_more_of_a_layer_is_offloaded_than_its_backward_can_reload():
    sizes = (1000 * number for number in (10, 14, 16, 19))
    offloads = [KEEP, *(Action((("layer", size),), size, 0.0, size) for size in sizes)]
    found = layers._actions_of([layers._SeenSite("layer", offloads, KEEP)], 15_000.0)
    assert [action.copied_bytes for action in found] == [0, 10_000, 14_000]


def test_of_forwards_of_several_lengths_in_a_step_the_first_is_looked_at():
    job = LayeredJob(1.0, policy=auto(6))
    while job.search._kind != "bare":
        step_of_several(job, (16, 4, 4))
    assert job.search._watched_tokens == 16
    assert len(job.search._times.tokens) == 3 * 4, "none was looked at in vain"


def test_lengths_that_are_drawn_anew_are_one_program():
    job, lengths = LayeredJob(0.001, policy=auto(20)), (8, 16, 24, 40)
    search = job.found(lengths)
    rows, num_steps = search.plan.rows(), len(job.steps)
    job.step(40)
    longest_bytes, took_us, bare_us = job.peak_bytes, 0.0, 0.0
    for length in (8, 40, 64, 3, 24, 16):
        own_us = length * 10.0 * 6 * 3
        is_long = length >= search.plan.min_tokens
        assert (job.step(length) > own_us) == is_long, "others take nothing"
        if length in lengths:
            assert job.peak_bytes <= longest_bytes, "and need no more than the longest has left"
            took_us, bare_us = took_us + job.steps[-1][1], bare_us + own_us
    assert 8 < search.plan.min_tokens <= 40
    assert 10 < 100 * (took_us / bare_us - 1) <= 20
    assert num_steps < 80
    assert job.manager.rows == rows


class TupleLayer(GradientCheckpointingLayer):
    def forward(self, pair):
        return super().forward(pair[0])


class SquareMlp(TimedMlp):
    """Takes time by the square of its rows."""

    def forward(self, x):
        (job,) = self.job
        x = Tick.apply(x, job.backend.advance_compute, job.us_per_row * len(x) ** 2)
        return super().forward(x)


class SquareLayer(GradientCheckpointingLayer):
    mlp_type = SquareMlp


class TupleNet(layered_job.LayeredNet):
    def forward(self, x):
        for layer in self.layers:
            x = layer((x, None))
        return self.head(x)


class GrowingNet(layered_job.LayeredNet):
    """Gives all layers but the first three times as many rows."""

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x if layer is not self.layers[1] else x.repeat(3, 1))
        return self.head(x)


LENGTHS = [40, 8, 8, 24, 8, 8, 40, 24, 8, 8]


@pytest.mark.parametrize("kind", ["plain", "square", "tuple", "growing"])
def test_what_is_said_holds_whatever_lengths_do_to_time(kind, monkeypatch):
    layer = {"square": SquareLayer, "tuple": TupleLayer}.get(kind, GradientCheckpointingLayer)
    net = {"tuple": TupleNet, "growing": GrowingNet}.get(kind, layered_job.LayeredNet)
    monkeypatch.setattr(layered_job, "LayeredNet", net)
    job = LayeredJob(0.001, policy=auto(20), layer=layer)
    search = job.found(LENGTHS)
    took_us = sum(job.step(length) for length in LENGTHS)
    assert job.manager.rows
    assert any(row.min_tokens for row in job.manager.rows) == (kind != "growing")
    found = search._own.tried[search._own.place][0]
    job.offload.close()
    job.offload = contextlib.nullcontext()
    bare_us = sum(job.step(length) for length in LENGTHS)
    slowdown = 100 * (took_us / bare_us - 1)
    assert slowdown == pytest.approx(found.percent, abs=4), "steps so far were of other lengths"


def test_where_long_forwards_are_too_rare_to_be_measured_plans_are_for_all():
    job = LayeredJob(0.001, policy=auto(20))
    for number in range(120):
        job.step(200 if number == 5 else 8)
    assert job.search.is_converged
    assert {row.min_tokens for row in job.manager.rows} == {0}
    assert "None" not in job.search.said


def loss_of(job, length=16):
    with job.offload:
        return job.net(torch.randn(length, WIDTH)).square().sum()


def step_of_several(job, lengths):
    """Take forwards one after the other, and then their backwards."""
    sum([loss_of(job, length) for length in lengths]).backward()


def test_several_forwards_before_their_backwards_all_have_rows():
    job = found_job(0.001, policy=auto(20), lengths=LENGTHS)
    assert job.search.plan.min_tokens > 8
    for _ in range(2):
        step_of_several(job, [8] * 4)
    assert {row.min_tokens for row in job.manager.rows} == {0}


def test_plans_are_for_all_forwards_where_several_come_before_their_backwards():
    job = LayeredJob(0.001, policy=auto(20))
    for _ in range(60):
        step_of_several(job, (40, 8, 24))
    assert job.search.is_converged
    assert job.manager.rows
    assert {plan.min_tokens for plan in job.search._own.plans} == {0}


def test_a_context_that_is_made_anew_for_each_step_measures_what_it_follows():
    job = LayeredJob(0.001, policy=auto(20))
    while not job.search.is_converged:
        job.offload = job.context()
        job.step(48)
    for _ in range(3):
        job.offload = job.context()
        took_us = job.step(48)
    assert job.manager.rows
    slowdown = 100 * (took_us / (48 * 180.0) - 1)
    assert 5 < slowdown <= 20
    assert f"takes {slowdown:+.1f} %" in job.search.said


def test_much_longer_steps_are_looked_at_where_nothing_was_found_before(monkeypatch):
    monkeypatch.setattr(layers, "_LEAST_BYTES", 1 << 14)
    job = found_job(1.0, policy=auto(20), layer=PlainLayer, lengths=(2,))
    assert not job.manager.rows
    assert "tensors smaller than 1 MiB" in job.search.said
    for _ in range(60):
        job.step(7)
    assert job.search.is_converged, "not by so little"
    job.step(128)
    assert job.search.is_converged
    for _ in range(60):
        job.step(128)
    assert job.search.is_converged
    assert job.manager.rows
    for length in (300, 600, 1200, 2400):
        job.step(length)
        assert job.search.is_converged


def test_the_ranks_of_a_large_job_are_answered_at_once():
    """128 layers over 16 stages, each of 64 ranks, and a hundred actions a layer."""
    answers = RowAnswers(Config(policy=auto(3)).policy)
    said = []
    for rank in range(1024):
        stage = rank % 16
        actions = tuple(
            Action((("mlp", number + 1), ("attention", stage + 1)), number << 26, number**1.2)
            for number in range(100)
        )
        layers_of_stage = range(8 * stage, 8 * stage + 8)
        has = {
            "kinds": [[(list(layers_of_stage), (KEEP, *actions))]] if rank < 16 else None,
            "link_bytes": [(number, 2e9) for number in layers_of_stage],
            "num_inflight": 16.0 - stage,
            "bare_bytes": 1 << 36,
        }
        said.append({"stage": str(stage), "bare_us": 5000.0, "has": has})
    began_s = time.thread_time()
    phase, _, plans = json.loads(answers(list(map(json.dumps, said))))
    assert phase == "trying"
    assert len(plans) == 16
    assert all(freed_bytes for _, freed_bytes, *_ in plans.values())
    heard = [{"stage": one["stage"], "target_bytes": None, "refused": []} for one in said]
    heard.append({"stage": "of a rank that came too late", "target_bytes": None, "refused": []})
    phase, _, plans = json.loads(answers(list(map(json.dumps, heard))))
    assert phase == "measuring"
    assert plans.keys() == {str(stage) for stage in range(16)}
    assert time.thread_time() - began_s < 5


def test_layers_that_are_alike_are_said_once():
    action = Action((("mlp", "recompute"), ("attention", 2)), 1, 0.5, 3)
    kinds = [dict.fromkeys(range(1000), (KEEP, action)) | {7: (KEEP,)}]
    ((usual, other),) = in_short(kinds)
    assert (len(usual[0]), other[0]) == (999, [7])
    has = {"kinds": in_short(kinds), "link_bytes": [(number, math.inf) for number in range(1000)]}
    answers = RowAnswers(Config(policy=auto(3)).policy)
    has |= {"num_inflight": 1.0, "bare_bytes": 1 << 30}
    answers([json.dumps({"stage": "0", "bare_us": 1e6, "has": has})])
    assert answers.choice.stages["0"].kinds == kinds


def test_a_job_without_room_to_look_at_its_layers_keeps_what_there_is_room_for():
    job = LayeredJob(policy=auto(3))
    search = RowSearch([job.net], job.manager, mock.Mock())
    search._search = search._agree(refusal="they are too large")
    search._take_next()
    assert "only what the device has no room for is offloaded: they are too large" in search.said
    assert job.manager.learner.is_open


def test_another_model_behind_the_first_steps_lets_the_search_begin_anew():
    job = LayeredJob(policy=auto(3))
    search = RowSearch([job.net], job.manager, mock.Mock())
    search.forward_begins(job.net)
    search(job.manager)
    assert search._clock is not None
    other = LayeredJob(policy=auto(3)).net
    search.add(other)
    assert search._clock is None
    assert search.is_of(other)
    assert {path.partition(".")[0] for path in search._sites()} == {"0", "1"}


def test_nothing_is_recomputed_where_that_is_said():
    job = found_job(1.0, policy=auto(40), recompute=())
    assert {what for _, what in actions(job.manager.rows)} <= {"all", *range(1, 9)}
    assert job.manager.rows
    assert job.manager.last_step.recomputed_bytes == 0


def test_a_step_of_a_manager_s_own_has_no_forward_of_a_teacher():
    job = LayeredJob(policy=auto(3))
    search, teacher = RowSearch([job.net], job.manager, mock.Mock()), object()
    for _ in range(3):
        search.forward_begins(job.net)
        search.forward_ends(has_failed=False)
        with torch.no_grad():
            search.forward_begins(teacher)
            search.forward_ends(has_failed=False)
    assert search._trained == {id(job.net)}


def test_steps_that_grow_for_ever_are_looked_at_three_times():
    job = LayeredJob(0.001, policy=auto(1))
    begun = []
    for length in (2, 8, 32, 128, 512):
        for _ in range(25):
            job.step(length)
        begun.append(job.search._num_begun)
        assert job.search.is_converged
    assert begun == [1, 2, 3, 3, 3]


def test_rows_of_which_nothing_leaves_are_not_followed():
    job = found_job(1.0, policy=auto(20), layer=PlainLayer, num_layers=2)
    assert "needed again at once" in job.search.said
    assert not job.manager.rows


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_target_is_kept(share):
    job = found_job(0.01, policy=target(int(share * FULL_BYTES)))
    job.manager.backend.trim_device()
    job.step()
    _, took_us, peak_bytes = job.steps[-1]
    assert peak_bytes <= share * FULL_BYTES
    assert took_us < 1.34 * BARE_US, "less than all layers recomputed"


def test_a_target_that_can_not_be_kept_ends_with_the_most_that_can_be_freed():
    job = LayeredJob(0.001, policy=target("1KiB"))
    search = job.found()
    assert {row.layers for row in job.manager.rows} == {"0-5"}
    assert "1.00 KiB is wanted" in search.said


def test_a_target_above_what_is_needed_changes_nothing():
    job = LayeredJob(policy=target(10 * FULL_BYTES))
    assert "all fits" in job.found().said


@pytest.mark.parametrize("capacity_bytes", [60_000, 70_000, 80_000])
def test_a_device_without_room_for_all_gets_through_the_first_steps(capacity_bytes):
    job = found_job(0.01, capacity_bytes)
    for _ in range(3):
        job.step()
    assert job.manager.rows, "no step without them would fit"
    assert job.num_ooms == 0


def test_where_memory_runs_out_later_more_is_freed():
    job = LayeredJob(0.001, policy=auto(10))
    search = job.found()
    before = search.plan.freed_bytes
    job.capacity_bytes = 30_000
    with pytest.raises(torch.OutOfMemoryError):
        job.step()
    job.capacity_bytes = None
    job.step()
    assert search.plan.freed_bytes > before
    assert job.steps[-1][2] < job.steps[-2][2]


def test_where_memory_runs_out_in_a_short_forward_it_has_rows_too():
    job = LayeredJob(0.001, policy=auto(10))
    search = job.found((8, 16, 24, 40))
    assert search.plan.min_tokens > 8
    search._own.place = len(search._own.plans) - 1  # none frees more
    job.capacity_bytes = 20_000
    with pytest.raises(torch.OutOfMemoryError):
        job.step(8)
    job.capacity_bytes = None
    job.step(8)
    assert {row.min_tokens for row in job.manager.rows} == {0}
    assert job.manager.last_step.recomputed_bytes > 0


@pytest.mark.parametrize("gbps", [0.001, 1.0])
def test_layers_that_no_library_lets_be_recomputed_are_offloaded_alone(gbps):
    job = found_job(gbps, layer=PlainLayer, policy=auto(40))
    assert all(what != "recompute" for _, what in actions(job.manager.rows))
    assert bool(actions(job.manager.rows)) == (gbps == 1.0)


def test_a_layer_that_can_not_run_again_is_seen_before_anything_is_dropped(caplog):
    caplog.set_level(logging.INFO, logger="megatron_offload")
    job = found_job(0.001, layer=RandomLayer, policy=auto(40))
    assert "it draws random numbers of Python or numpy" in caplog.text
    assert ("layer", "recompute") not in actions(job.manager.rows)
    assert actions(job.manager.rows) == {("mlp", "recompute")}, "what it draws is not in there"


class Stale(GradientCheckpointingLayer):
    """Multiplies by something that changes behind its forward."""

    factor = 1.0

    def forward(self, x):
        made = super().forward(x) * Stale.factor
        Stale.factor += 0.5
        return made


def test_a_layer_with_other_bits_when_it_runs_again_is_kept(caplog):
    caplog.set_level(logging.INFO, logger="megatron_offload")
    job = LayeredJob(0.001, layer=Stale, policy=auto(40))

    def step():
        Stale.factor = 1.0
        with job.offload:
            loss = job.net(torch.ones(16, WIDTH)).sum()
        loss.backward()
        del loss

    while not job.search.is_converged:
        step()
    assert "it can't run again with the same bits" in caplog.text
    assert ("layer", "recompute") not in actions(job.manager.rows)


def test_a_context_for_the_same_model_goes_on_and_for_another_begins_anew():
    torch.manual_seed(0)
    config = OffloadConfig(backend="simulated")
    job = LayeredJob(num_layers=2)
    make = get_act_offloading_ctx_manager
    one = make(job.net, config=config, warn_if_no_head=False)
    manager, search = one.manager, one.manager.tuner
    assert isinstance(search, RowSearch)
    del one
    gc.collect()
    assert make(job.net, config=config).manager.tuner is search
    gc.collect()
    other = make(LayeredJob(num_layers=3).net, config=config)
    assert other.manager.tuner is not search
    assert isinstance(other.manager.tuner, RowSearch)
    del other
    gc.collect()
    assert make(job.net, config=config).manager is manager


@pytest.mark.parametrize(
    "settings", [{"recompute": "layer"}, {"policy": {"kind": "modules"}}, {"enabled": False}]
)
def test_what_says_itself_what_moves_looks_for_no_rows(settings):
    job = LayeredJob(**{"policy": None, **settings})
    assert job.search is None
    job.step()


@pytest.mark.parametrize(("gbps", "percent", "moves"), [(1.0, 3, True), (1e-4, 3, False)])
def test_of_a_model_without_layers_all_is_offloaded_or_nothing(gbps, percent, moves, caplog):
    job = LayeredJob(gbps, layer=PlainLayer, policy=auto(percent))
    inner, job.net.layers = [*job.net.layers], torch.nn.ModuleList()
    for number, layer in enumerate(inner):
        setattr(job.net, f"block{number}", layer)
    job.net.forward = lambda x: job.net.head(functools.reduce(lambda y, f: f(y), inner, x))
    job.manager.tuner = None
    job.offload = job.context()
    job.found()
    whole = RowConfig(site="model", offload="all")
    assert (whole in job.search.plan.rows() if job.search.plan else False) == moves
    assert (job.manager.last_step.offloaded_bytes > 0) == moves
    assert job.manager.rests != moves
    job.step()
    assert job.steps[-1][1] <= (1 + percent / 100) * BARE_US
    if moves:
        rows = job.search.said.partition("rows: ")[2].partition(" free")[0]
        assert Config(rows=rows).rows == (whole,)


@pytest.mark.parametrize("percent", [1, 20])
def test_a_forward_that_is_twice_as_long_finds_room(percent):
    job = found_job(0.001, policy=auto(percent))
    assert bool(job.manager.rows) == (percent == 20)
    job.capacity_bytes = 90_000
    job.step(32)
    assert job.steps[-1][2] < 90_000
    assert job.manager.rows
    job.step(16)


def test_a_context_that_is_not_given_the_model_finds_it_in_the_first_forward():
    job = LayeredJob(0.001, policy=auto(20))
    job.manager.tuner = None
    job.offload = OffloadActivations(manager=job.manager, min_offload_size=0)
    assert job.search is None
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    job.step()
    assert isinstance(job.search, RowSearch)
    job.found()
    assert actions(job.manager.rows) == {("layer", "recompute")}
    assert not hooks


def test_a_context_in_which_no_module_runs_leaves_no_hook_and_says_so(caplog):
    job = LayeredJob(0.001, policy=auto(20))
    job.manager.tuner = None
    offload = OffloadActivations(manager=job.manager)
    with offload:
        torch.ones(3, requires_grad=True).exp().sum().backward()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert "no module was called inside the context" in caplog.text
    assert job.manager.rests


def test_forwards_of_another_model_in_the_same_context_are_no_steps():
    job = LayeredJob(0.001, policy=auto(20))
    other = torch.nn.Linear(3, 3)
    for _ in range(60):
        with job.offload:
            loss = other(torch.ones(2, 3)).sum()
            job.backend.advance_compute(random.random() * 9000)
        loss.backward()
        job.step()
    assert job.search.is_converged
    assert actions(job.manager.rows) == {("layer", "recompute")}
    found = job.search._own.tried[job.search._own.place][0]
    assert found.high - found.low < 0.1


def _several(job):
    """Two forwards before their backwards."""
    for loss in [loss_of(job), loss_of(job)]:
        loss.backward()


def _late(job):
    """A backward behind the next forward."""
    before, job.late = getattr(job, "late", None), loss_of(job)
    if before is not None:
        before.backward()


def _accumulating(job):
    """An optimizer's step behind each fourth."""
    job.number = getattr(job, "number", 0) + 1
    loss_of(job).backward()
    if job.number % 4 == 0:
        job.backend.advance_compute(5000.0)


@pytest.mark.parametrize("step", [_several, _late, _accumulating])
def test_what_is_said_is_what_it_costs_however_a_program_steps(step):
    job = LayeredJob(0.001, policy=auto(20))

    def us(number=32):
        began_us = job.now()
        for _ in range(number):
            step(job)
        return job.now() - began_us

    for _ in range(2000):
        if not job.search.is_converged:
            step(job)
    assert job.search.is_converged
    with_rows_us = us()
    job.manager.disable_offload()
    bare_us = us()
    optimizer_us = 8 * 5000.0 if step is _accumulating else 0.0
    percent = 100 * ((with_rows_us - optimizer_us) / (bare_us - optimizer_us) - 1)
    assert 5 < percent <= 20
    found = job.search._own.tried[job.search._own.place][0]
    assert found.low - 1 <= percent <= found.high + 1


def test_an_interrupt_ends_the_search():
    job = LayeredJob(0.001, policy=auto(20))
    for _ in range(5):
        job.step()
    job.search._search.close()
    job.step()
    assert job.search.is_converged
    assert "an interrupt has ended the search" in job.search.said


def test_a_model_that_loses_layers_ends_it_too():
    job = LayeredJob(0.001, policy=auto(40))
    while job.search._kind != "rows":
        job.step()
    job.net.layers = job.net.layers[:3]
    while not job.search.is_converged:
        job.step()
    assert "the model has changed" in job.search.said
    assert job.manager.rows == ()


def test_what_refuses_to_be_recomputed_at_each_call_is_not_planned():
    job = LayeredJob(0.001, num_layers=2, policy=auto(40))
    for layer in job.net.layers:
        layer.mlp.up.register_forward_hook(lambda *_: None)
    job.net.head = layered_job.TimedMlp(job)
    job.found()
    assert "nothing of what its layers save can be freed" in job.search.said
    said = "forward saves 12.00 KiB are outside layers, such as logits and copies, which a loss by"
    assert said in job.search.said


def test_what_is_saved_in_compiled_layers_is_said_and_no_loss_by_rows_that_there_is():
    job = LayeredJob(0.001, num_layers=2, policy=auto(40))
    for layer in job.net.layers:
        layer.compile(backend="eager")
    job.search.loss_is_by_rows = lambda: True
    job.found()
    assert "are outside layers, or inside compiled ones, where no row reaches. " in job.search.said


def test_a_model_is_not_held():
    config = OffloadConfig(backend="simulated")
    job = LayeredJob(num_layers=2)
    net, context = job.net, get_act_offloading_ctx_manager(job.net, config=config)
    with context:
        loss = net(torch.ones(4, WIDTH)).sum()
    loss.backward()
    weight = ref(net.layers[0].mlp.up.weight)
    del context, net, job, loss
    gc.collect()
    assert weight() is None


def test_a_target_is_not_left_for_what_an_evaluation_has_reserved(monkeypatch):
    job = found_job(0.01, policy=target(int(0.7 * FULL_BYTES)))
    rows = job.manager.rows
    for _ in range(4):
        with torch.no_grad(), job.offload:
            job.meter.observe(torch.zeros(100_000))
        job.step()
    assert job.manager.rows == rows


@pytest.mark.parametrize(("limit", "layers"), [(10, {"0"}), (3, set())])
def test_where_steps_differ_too_much_only_what_is_predicted_to_cost_little_is_followed(
    limit, layers
):
    job = LayeredJob(0.001, policy=auto(limit))
    draw = random.Random(1)
    while not job.search.is_converged:
        job.us_per_row = draw.uniform(1.0, 300.0)
        job.step()
    assert "steps differ too much to see" in job.search.said
    assert {row.layers for row in job.manager.rows} == layers
    assert len(job.search._answers.choice._tried) == 1


def test_a_plan_that_is_not_measured_is_tried_all_the_same():
    job = LayeredJob(0.001, layer=RandomLayer, policy={**auto(60), "measured_plans": 0})
    search = job.found()
    assert "is predicted to take" in search.said
    assert actions(job.manager.rows) == {("mlp", "recompute")}
    assert not search._own.tried
    job = found_job(0.001, layer=RandomLayer, policy={**auto(50), "measured_plans": 0})
    assert {row.layers for row in job.manager.rows} == {"0-4"}, "six tenths of it are trusted"


def test_inputs_of_checkpointed_layers_are_offloaded_for_good():
    job = LayeredJob(1.0, policy=auto(40))
    job.net.is_checkpointed = True
    for _ in range(30):
        job.step()
        job.offload = job.context()
    assert job.search.is_converged
    assert actions(job.search.plan.rows()) == {("model", "all")}
    job.step()
    assert job.manager.last_step.offloaded_bytes > 0


def test_layers_of_a_tower_that_is_not_called_are_no_matter():
    job = LayeredJob(0.001, policy=auto(40))
    job.net.tower = torch.nn.ModuleList(GradientCheckpointingLayer(job) for _ in range(3))
    job.offload = job.context()
    job.found()
    assert actions(job.manager.rows) == {("layer", "recompute")}
    assert {row.layers for row in job.manager.rows} == {"0-5"}


def test_where_memory_is_not_known_a_target_is_said_to_be_none():
    job = LayeredJob(policy=target("1KiB"))
    job.backend.memory = DeviceMemory
    assert "so no target can be kept" in job.found().said


@pytest.mark.parametrize("shift", range(4))
def test_an_optimizer_s_step_counts_for_neither_kind_of_step(shift):
    job = LayeredJob(0.001, policy=auto(10))
    job.number = shift
    job.net.layers[0].requires_grad_(False)  # no gradient says where a backward ends
    while not job.search.is_converged:
        _accumulating(job)
    first, *_ = job.search._own.tried.values()
    assert first[0].percent == pytest.approx(5.6, abs=2.0)
