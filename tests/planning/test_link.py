"""How copies share a node: as four H200s were seen to, fairly, and never beyond a limit."""

from __future__ import annotations

import random

import pytest

from megatron_offload.core.machine import Machine
from megatron_offload.planning.link import FairShare


@pytest.mark.parametrize(
    ("num_d2h", "num_h2d", "num_both", "gbps"),
    [(1, 0, 0, 55.0), (0, 1, 0, 55.0), (0, 0, 1, 51.0), (4, 0, 0, 41.0), (0, 4, 0, 51.25)],
)
def test_a_host_with_four_h200s(num_d2h, num_h2d, num_both, gbps):
    rates = FairShare(Machine()).rates(num_d2h, num_h2d, num_both)
    used = [rate for rate in rates if rate]
    assert used == pytest.approx([gbps * 1e3] * len(used))


def test_four_that_copy_both_ways_are_bound_by_the_node():
    assert FairShare(Machine()).rates(0, 0, 4) == pytest.approx((0, 0, 25625.0, 25625.0))


def test_what_one_copy_may_not_use_the_others_get():
    machine = Machine(d2h_gbps=10, h2d_gbps=50, both_gbps=50, node_gbps=45, node_d2h_gbps=None)
    assert FairShare(machine).rates(1, 1, 0) == pytest.approx((10_000, 35_000, 0, 0))


def test_gpus_of_one_rank_count_each():
    assert FairShare(Machine(), 4).rates(0, 0, 1) == FairShare(Machine()).rates(0, 0, 4)


@pytest.mark.parametrize("seed", range(50))
def test_no_limit_is_exceeded_and_every_copy_is_at_one(seed):
    rng = random.Random(seed)
    d2h, h2d, both, node = (rng.uniform(1, 100) for _ in range(4))
    node_d2h = rng.choice([None, rng.uniform(1, 200)])
    machine = Machine(
        d2h_gbps=d2h, h2d_gbps=h2d, both_gbps=both, node_gbps=node, node_d2h_gbps=node_d2h
    )
    numbers = [rng.randint(0, 4) for _ in range(3)]
    rates = [rate / 1e3 for rate in FairShare(machine).rates(*numbers)]
    numbers.append(numbers[2])
    own = [d2h, h2d, min(both, d2h), min(both, h2d)]
    total = sum(rate * number for rate, number in zip(rates, numbers, strict=True))
    out = rates[0] * numbers[0] + rates[2] * numbers[2]
    close = 1 + 1e-9
    assert total <= node * close
    assert out <= (node_d2h or total) * close
    for kind, number in enumerate(numbers):
        assert rates[kind] <= own[kind] * close
        assert (rates[kind] > 0) == (number > 0)
        is_bound = (
            rates[kind] * close >= own[kind]
            or total * close >= node
            or (kind in (0, 2) and node_d2h is not None and out * close >= node_d2h)
        )
        assert is_bound or not number
