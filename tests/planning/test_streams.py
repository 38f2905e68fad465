"""When streams do what a program says, op by op."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from problems import plain_machine

from megatron_offload.core.trace import PIPELINE_WAIT
from megatron_offload.errors import ConfigError
from megatron_offload.planning.job import GroupWork, Job, Machine, StageWork
from megatron_offload.planning.replay import OpKind, RankStep
from megatron_offload.planning.schedule import Pass, Schedule, make_schedule
from megatron_offload.planning.simulate import fair_rates, simulate, simulate_ranks

KB = 1000
MACHINE = plain_machine(1.0, p2p_latency_us=5.0, p2p_gbps=1.0)
JOB = Job(make_schedule("gpipe", 1, 1), (StageWork(()),), (0,), MACHINE)


def run(*ops, copy_bytes=(), machine=MACHINE):
    program = RankStep(copy_bytes=list(copy_bytes))
    for kind, argument in ops:
        program.kinds.append(kind)
        program.arguments.append(argument)
    return simulate_ranks(replace(JOB, machine=machine), [program]).ranks[0]


def test_a_rate_that_changes_on_the_way_counts_from_there_on():
    # Alone 1 GB/s, together half of it each: 50 kB alone, 100 kB of each together, then 50 alone.
    machine = MACHINE.model_copy(update={"both_gbps": 0.5})
    ops = [(OpKind.OFFLOAD, 0), (OpKind.COMPUTE, 50.0), (OpKind.RELOAD, 1), (OpKind.AWAIT, 0)]
    sizes = (150 * KB, 150 * KB)
    assert run(*ops, copy_bytes=sizes, machine=machine).end_us == pytest.approx(250)
    both = [*ops, (OpKind.AWAIT, 1)]
    assert run(*both, copy_bytes=sizes, machine=machine).end_us == pytest.approx(300)


def test_messages_take_their_latency_and_their_bytes_and_gradients_go_back_as_large():
    work = (GroupWork("g", 0, 100.0, 200.0),)
    stages = (StageWork(work, output_bytes=20 * KB), StageWork(work, output_bytes=999 * KB))
    job = Job(make_schedule("1f1b", 2, 1), stages, (0, 0), MACHINE)
    simulation = simulate(job)
    assert simulation.step_us == pytest.approx(600 + 2 * 25)
    assert simulation.ranks[0].stall_us[PIPELINE_WAIT] == pytest.approx(300 + 2 * 25)


def works(job, rank):
    """Return when a rank's forwards and backwards begin."""
    trace = simulate(job, record=True).ranks[rank].trace
    return [span.start_us for span in trace.of("compute") if span.kind != "stall"]


def test_who_sends_goes_on_at_once():
    slow = MACHINE.model_copy(update={"p2p_latency_us": 1000.0})
    stage = StageWork((GroupWork("g", 0, 100.0, 200.0),))
    job = Job(make_schedule("1f1b", 2, 4), (stage, stage), (0, 0), slow)
    assert works(job, 0)[:2] == [0, 100]
    assert works(job, 1)[:3] == [1100, 1200, 1400], "the second has come meanwhile"


def test_a_schedule_whose_ranks_wait_in_a_circle_is_refused():
    orders = (["F0", "B0", "F1", "B1"], ["F1", "B1", "F0", "B0"])
    ranks = tuple(
        tuple(Pass(stage, word[0], int(word[1])) for word in order)
        for stage, order in enumerate(orders)
    )
    stage = StageWork((GroupWork("g", 0, 100.0, 200.0),))
    job = Job(Schedule("any", 2, 2, ranks), (stage, stage), (0, 0), MACHINE)
    with pytest.raises(ConfigError, match="ranks 0, 1 wait for each other"):
        simulate(job)


@pytest.mark.parametrize(
    ("num_d2h", "num_h2d", "num_both", "gbps"),
    [
        *((1, 0, 0, 55.0), (0, 1, 0, 55.0), (0, 0, 1, 51.0), (4, 0, 0, 41.0), (0, 4, 0, 51.25)),
        (0, 0, 4, (30.75, 20.5)),  # the node's limit, of which more goes to the host
    ],
)
def test_a_host_with_four_h200s(num_d2h, num_h2d, num_both, gbps):
    rates = fair_rates(Machine(), 1, num_d2h, num_h2d, num_both)
    used = [rate for rate in rates if rate]
    assert [rate / 1e3 for rate in used] == pytest.approx(
        gbps if isinstance(gbps, tuple) else [gbps] * len(used)
    )


def test_two_gpus_of_a_host_share_its_sum_as_they_were_measured_to():
    # docs/benchmarks/h200/two_gpus_eight.txt: 50.9 to the host and 32.1 to the device.
    machine = Machine(node_gbps=166.0, gpus_per_node=2)
    assert fair_rates(machine, 1, 0, 0, 1)[2:] == (51e3, 51e3)
    assert fair_rates(machine, 1, 0, 0, 2)[2:] == pytest.approx((50.9e3, 32.1e3), rel=0.05)


def test_gpus_of_one_rank_count_each():
    assert fair_rates(Machine(), 4, 0, 0, 1) == fair_rates(Machine(), 1, 0, 0, 4)


@pytest.mark.parametrize("seed", range(20))
def test_no_limit_is_exceeded_and_every_copy_is_at_one(seed):
    rng = random.Random(seed)
    d2h, h2d, both, node = (rng.uniform(1, 100) for _ in range(4))
    node_d2h = rng.choice([None, rng.uniform(1, 200)])
    machine = Machine(
        d2h_gbps=d2h, h2d_gbps=h2d, both_gbps=both, node_gbps=node, node_d2h_gbps=node_d2h
    )
    machine = machine.model_copy(update={"node_d2h_share": rng.uniform(0.1, 0.9)})
    numbers = [rng.randint(0, 4) for _ in range(3)]
    rates = [rate / 1e3 for rate in fair_rates(machine, 1, *numbers)]
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
