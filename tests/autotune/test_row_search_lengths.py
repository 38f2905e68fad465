"""Runs whose forwards differ in length or number find rows that keep their promise."""

from __future__ import annotations

import contextlib
from itertools import count

import layered_job
import pytest
import torch
from layered_job import (
    WIDTH,
    GradientCheckpointingLayer,
    LayeredJob,
    PlainLayer,
    TimedMlp,
    auto,
    found_job,
)
from virtual_clock import Tick

from megatron_offload.autotune import layers

pytestmark = pytest.mark.by_default


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


def test_of_forwards_of_several_lengths_in_a_step_the_first_is_looked_at():
    job = LayeredJob(1.0, policy=auto(6))
    while job.search._kind != "bare":
        step_of_several(job, (16, 4, 4))
    assert job.search._watched_tokens == 16
    assert len(job.search._times.tokens) == 3 * 4, "none was looked at in vain"


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


def test_steps_that_grow_for_ever_are_looked_at_three_times():
    job = LayeredJob(0.001, policy=auto(1))
    begun = []
    for length in (2, 8, 32, 128, 512):
        for _ in range(25):
            job.step(length)
        begun.append(job.search._num_begun)
        assert job.search.is_converged
    assert begun == [1, 2, 3, 3, 3]


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


@pytest.mark.parametrize("percent", [1, 20])
def test_a_forward_that_is_twice_as_long_finds_room(percent):
    job = found_job(0.001, policy=auto(percent))
    assert bool(job.manager.rows) == (percent == 20)
    job.capacity_bytes = 90_000
    job.step(32)
    assert job.steps[-1][2] < 90_000
    assert job.manager.rows
    job.step(16)


@pytest.mark.parametrize("shift", range(4))
def test_an_optimizer_s_step_counts_for_neither_kind_of_step(shift):
    job = LayeredJob(0.001, policy=auto(10))
    number = count(shift + 1)
    job.net.layers[0].requires_grad_(False)  # no gradient says where a backward ends
    while not job.search.is_converged:
        loss_of(job).backward()
        if next(number) % 4 == 0:
            job.backend.advance_compute(5000.0)
    first, *_ = job.search._own.tried.values()
    assert first[0].percent == pytest.approx(5.6, abs=2.0)
