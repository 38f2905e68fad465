"""Runs whose steps differ as programs' do: a plan comes soon, keeps its promise, and remains.

Lengths that are drawn anew, grow, or come by turns; smaller last batches; several microbatches of
different lengths before an optimizer's step; evaluation in between, and generation before training;
noise; host memory that is ready late. Each step's bits are compared.
"""

from __future__ import annotations

import random

import pytest
import torch
from layered_job import WIDTH, LayeredJob, auto

from megatron_offload.backends.simulated import SimulatedBackend

LIMIT = 20


def lengths_of(draw):
    """Return a function of a step's number: how long it is."""
    low, high = sorted(draw.sample(range(4, 49), 2))
    return draw.choice(
        (
            lambda _: high,
            lambda _: draw.randint(low, high),
            lambda number: low if number % 2 else high,
            lambda number: low + (high - low) * min(number, 40) // 40,
            lambda number: max(1, high // 3) if number % 9 == 8 else high,
            lambda number: max(4, int(high * draw.paretovariate(3) / 2)),
        )
    )


class Sequence:
    """One program, drawn from a seed."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.length_of = lengths_of(self.draw)
        self.num_microbatches = self.draw.choice((1, 1, 2, 5))
        self.evaluates = self.draw.random() < 0.5
        self.noise = self.draw.choice((0.0, 0.02, 0.05))
        gbps = self.draw.choice((0.001, 0.01, 0.1))
        self.job = LayeredJob(gbps, policy=auto(LIMIT), num_layers=6)
        if self.draw.random() < 0.5:
            self.generate()

    def generate(self):
        with torch.no_grad(), self.job.offload:
            for length in range(1, 60, 7):
                self.job.net(torch.ones(length, WIDTH))

    def step(self, number):
        """Take the steps of some microbatches; return their time, and what they take bare."""
        took_us = bare_us = 0.0
        for _ in range(self.num_microbatches):
            length = self.length_of(number)
            self.job.us_per_row = 10.0 * (1 + self.draw.gauss(0, self.noise))
            bare_us += length * 6 * 3 * self.job.us_per_row
            took_us += self.job.step(length)
        self.job.backend.advance_compute(3000.0)  # the optimizer's
        if self.evaluates and number % 10 == 9:
            self.generate()
        return took_us, bare_us


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(50))
def test_a_plan_is_followed_soon_keeps_its_promise_and_remains(seed, monkeypatch):
    program, asked, is_late = Sequence(seed), iter(range(1000)), seed % 3 > 0
    is_ready = property(lambda _: next(asked) > 20 * (seed % 3))
    monkeypatch.setattr(SimulatedBackend, "is_host_prepared", is_ready)
    job, search = program.job, program.job.search
    first = None
    for number in range(60):
        program.step(number)
        if search.plan is not None and first is None:
            first = len(job.steps)
        if search.is_converged:
            break
    assert search.is_converged
    assert first is not None
    assert first <= 20 + 20 * is_late
    assert len(job.steps) <= 40 + 20 * is_late
    rows, pinned_bytes = job.manager.rows, job.manager.host_pool.stats.slab_bytes_total
    times = [program.step(number) for number in range(number, number + 40)]
    slowdown = 100 * (sum(took for took, _ in times) / sum(bare for _, bare in times) - 1)
    found = search._own.tried[search._own.place][0]
    assert found.percent <= LIMIT
    assert found.low - 4 <= slowdown <= max(LIMIT, found.high + 2), "fewer long forwards may come"
    assert rows, "some of six layers pays at this limit"
    assert job.manager.rows == rows
    assert search is job.search
    grown_bytes = job.manager.host_pool.stats.slab_bytes_total - pinned_bytes
    assert grown_bytes <= 2 * job.manager.host_pool.slab_bytes
