"""What of layers may be offloaded or recomputed, as a search finds it."""

from __future__ import annotations

import json
import logging
import random
import time

import layered_job
import pytest
import torch
from layered_job import (
    WIDTH,
    GradientCheckpointingLayer,
    LayeredJob,
    PlainLayer,
    RandomLayer,
    TimedMlp,
    actions,
    auto,
    found_job,
    target,
)

from megatron_offload.autotune import layers
from megatron_offload.autotune.row_answers import RowAnswers
from megatron_offload.config import OffloadConfig as Config
from megatron_offload.planning.frontier import KEEP, Action

pytestmark = pytest.mark.by_default


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
    kinds = (all_ for kind in job.search._kinds for _, all_ in kind)
    found = {part for all_ in kinds for one in all_ for part in one.parts}
    assert ("attention", what) in found
    assert not any("cross_attention" in path for path in job.search._sites())
    assert job.manager.rows


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


def test_no_more_of_a_layer_is_offloaded_than_its_backward_can_reload():
    sizes = (1000 * number for number in (10, 14, 16, 19))
    offloads = [KEEP, *(Action((("layer", size),), size, 0.0, size) for size in sizes)]
    found = layers._actions_of([layers._SeenSite("layer", offloads, KEEP)], 15_000.0)
    assert [action.copied_bytes for action in found] == [0, 10_000, 14_000]


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


def test_nothing_is_recomputed_where_that_is_said():
    job = found_job(1.0, policy=auto(40), recompute=())
    assert {what for _, what in actions(job.manager.rows)} <= {"all", *range(1, 9)}
    assert job.manager.rows
    assert job.manager.last_step.recomputed_bytes == 0


@pytest.mark.parametrize("gbps", [0.001, 1.0])
def test_layers_that_no_library_lets_be_recomputed_are_offloaded_alone(gbps):
    job = found_job(gbps, layer=PlainLayer, policy=auto(40))
    assert all(what != "recompute" for _, what in actions(job.manager.rows))
    assert bool(actions(job.manager.rows)) == (gbps == 1.0)


def test_layers_have_the_numbers_of_their_list_and_are_planned_in_the_order_of_their_calls():
    job = LayeredJob(0.5, layer=PlainLayer, policy=auto(4))
    job.net.forward = lambda x: job.net.head(torch.nn.Sequential(*job.net.layers[::-1])(x))
    job.found()
    assert {row.layers for row in job.manager.rows} == {"1-5"}, "the first is called last"


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


def test_what_refuses_to_be_recomputed_at_each_call_is_not_planned():
    job = LayeredJob(0.001, num_layers=2, policy=auto(40))
    for layer in job.net.layers:
        layer.mlp.up.register_forward_hook(lambda *_: None)
    job.net.head = layered_job.TimedMlp(job)
    job.found()
    assert "nothing of what its layers save can be freed" in job.search.said
    assert "forward saves 12.00 KiB are outside layers or in compiled ones" in job.search.said


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
