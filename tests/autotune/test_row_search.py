"""Runs find rows by their own steps, on the virtual clock: promises and bits hold."""

from __future__ import annotations

import functools
import gc
import random
from unittest import mock
from weakref import ref

import pytest
import torch
import yaml
from layered_job import (
    BARE_US,
    FULL_BYTES,
    WIDTH,
    LayeredJob,
    PlainLayer,
    RandomLayer,
    actions,
    auto,
    found_job,
)

from megatron_offload import OffloadActivations, OffloadConfig, get_act_offloading_ctx_manager
from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.cli.report import write_page
from megatron_offload.config import OffloadConfig as Config
from megatron_offload.core.row_config import RowConfig
from megatron_offload.errors import ConfigError, StateError
from megatron_offload.observe.run_report import save_report
from megatron_offload.planning.found import read_frontier

pytestmark = pytest.mark.by_default


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
    assert "policy auto: some 20 to 80 steps are looked at, then what is offloaded and" in plan
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
