"""Steps small enough to work out by hand, and what holds for every step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from problems import plain_machine

from megatron_offload.core.trace import PIPELINE_WAIT, ByteCount
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import GroupWork, Job, RankSettings, StageWork
from megatron_offload.planning.schedule import make_schedule
from megatron_offload.planning.simulate import RELEASE, RELOAD, simulate

KB, MIB = 1000, 2**20
KINDS = {"compute": {"forward", "backward", "stall", "other"}, "d2h": {"d2h"}, "h2d": {"h2d"}}
FAST = plain_machine(1e6, p2p_latency_us=0.0, p2p_gbps=1e9)


def one_way(gbps):
    """A machine of one rank, whose directions don't disturb each other."""
    return FAST.model_copy(update={"d2h_gbps": gbps, "h2d_gbps": gbps})


def two_groups(gbps, num_bytes=100 * KB):
    """One rank, one microbatch, two groups: forwards of 100 us, backwards of 200."""
    groups = tuple(GroupWork(name, num_bytes, 100.0, 200.0) for name in ("first", "last"))
    return Job(make_schedule("gpipe", 1, 1), (StageWork(groups),), (KB,), one_way(gbps))


# The last group is needed at once and stays: with 100 kB in all it fits. The first is copied from
# 100 us on. It must be gone when the last is committed, at 200 us: both together exceed the total.
TIGHT = RankSettings(max_inflight_bytes=100 * KB, prefetch_bytes=0)


def test_a_slow_link_costs_exactly_what_does_not_hide():
    # 100 kB at 0.5 GB/s take 200 us: to the host from 100 to 300, where the release waits from 200
    # on. The last group's backward is 300 to 500; at its end the first is reloaded, until 700.
    simulation = simulate(two_groups(gbps=0.5), TIGHT)
    stall_us = simulation.ranks[0].stall_us
    assert stall_us == pytest.approx({RELEASE: 100, RELOAD: 200, PIPELINE_WAIT: 0})
    assert simulation.step_us == pytest.approx(600 + 300)


def test_temporaries_and_buffers_count_while_a_group_runs():
    work = GroupWork("g", 5, 1.0, 1.0, kept_bytes=7, forward_temp_bytes=20, backward_temp_bytes=30)
    job = Job(make_schedule("gpipe", 1, 1), (StageWork((work,), buffer_bytes=100),), (1000,), FAST)
    assert simulate(job).ranks[0].peak_device_bytes == 1000 + 5 + 7 + 30 + 100


def test_the_reserved_estimate_is_the_peak_and_what_mixed_sizes_waste_in_whole_segments():
    job = two_groups(gbps=1)
    assert simulate(job).ranks[0].peak_reserved_bytes == 2 * 1024**2


def stages(num_stages, num_groups, num_bytes=KB, forward_us=100.0, backward_us=200.0):
    work = GroupWork("g", num_bytes, forward_us, backward_us)
    return (StageWork((work,) * num_groups),) * num_stages


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_all_but_one_rank_s_forward_and_backward(name, num_ranks):
    job = Job(make_schedule(name, num_ranks, 8), stages(num_ranks, 4), (0,) * num_ranks, FAST)
    simulation = simulate(job)
    work_us = 8 * 4 * 300
    assert simulation.step_us == pytest.approx(work_us + (num_ranks - 1) * 4 * 300)
    assert all(rank.compute_us == pytest.approx(work_us) for rank in simulation.ranks)


def test_virtual_stages_divide_the_bubble():
    plain_us = 3 * 4 * 300
    interleaved = Job(make_schedule("interleaved", 4, 8, 2), stages(8, 2), (0,) * 4, FAST)
    work_us = 8 * 4 * 300
    assert simulate(interleaved).step_us - work_us == pytest.approx(plain_us / 2)


def test_ranks_of_a_node_share_it_and_those_of_two_do_not():
    work = (GroupWork("g", 100 * KB, 100.0, 200.0),) * 4
    schedule = make_schedule("gpipe", 2, 4)
    shared = FAST.model_copy(
        update={"d2h_gbps": 1.0, "h2d_gbps": 1.0, "node_gbps": 1.0, "gpus_per_node": 2}
    )
    job = Job(schedule, (StageWork(work),) * 2, (0, 0), shared)
    settings = RankSettings(max_inflight_bytes=200 * KB, prefetch_bytes=200 * KB)
    apart = replace(job, machine=shared.model_copy(update={"gpus_per_node": 1}))
    assert simulate(job, settings).step_us > 1.1 * simulate(apart, settings).step_us


def test_gpus_that_do_the_same_take_their_share_of_the_node():
    job = two_groups(gbps=0.5)
    node = job.machine.model_copy(update={"node_gbps": 0.5})
    twice = replace(job, machine=node, gpus_per_rank=2)
    assert (twice.ranks_per_node, replace(twice, gpus_per_rank=8).ranks_per_node) == (2, 1)
    slower = replace(job, machine=one_way(0.25))
    assert simulate(twice, TIGHT).step_us == pytest.approx(simulate(slower, TIGHT).step_us)


def random_step(seed):
    """Return a job whose memory is what is saved, and limits of its ranks."""
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 4)
    name = rng.choice(["1f1b", "gpipe", "interleaved"])
    num_virtual = rng.randint(1, 2) if name == "interleaved" else 1
    schedule = make_schedule(name, num_ranks, num_ranks * rng.randint(1, 3), num_virtual)

    def group(index):
        us = rng.choice([0.0 if index else 1.0, rng.uniform(100, 4000), rng.uniform(1000, 9000)])
        size = rng.choice([0, 1, rng.randint(1, 64)]) * rng.choice([MIB, 100_003])
        kept_bytes, is_marked = rng.randint(0, 9) * MIB, rng.random() < 0.8
        return GroupWork(f"part{index}", size, us, 2 * us, kept_bytes, is_marked=is_marked)

    stages = tuple(
        StageWork(tuple(map(group, range(rng.randint(1, 5)))), rng.randint(0, 9) * MIB)
        for _ in range(schedule.num_stages)
    )
    static_bytes = tuple(rng.randint(0, 500) * MIB for _ in range(num_ranks))
    machine = Machine(both_gbps=rng.uniform(5, 60), gpus_per_node=rng.randint(1, 4))
    limits = [None, 0, 50 * MIB, 150 * MIB]
    most, prefetch = rng.choice(limits), rng.choice(limits)
    settings = RankSettings(max_inflight_bytes=most, prefetch_bytes=prefetch)
    return Job(schedule, stages, static_bytes, machine), settings


@pytest.mark.parametrize("seed", range(40))
def test_what_holds_for_every_step(seed):
    job, settings = random_step(seed)
    without = simulate(job)
    simulation = simulate(job, settings, record=True)
    assert simulation == simulate(job, settings, record=True), "the same twice"
    step_us = pytest.approx(simulation.step_us, rel=1e-12)
    assert simulate(job, settings).step_us == step_us, "recorded or not"
    ranks = zip(simulation.ranks, without.ranks, job.static_bytes, strict=True)
    for rank, plain, static_bytes in ranks:
        assert rank.offloaded_bytes >= rank.reloaded_bytes
        assert rank.compute_us == pytest.approx(plain.compute_us)
        lost_us = sum(rank.stall_us.values())
        assert rank.end_us == pytest.approx(rank.compute_us + lost_us)
        spans = rank.trace.of("d2h")
        assert sum(span.num_bytes for span in spans) == rank.offloaded_bytes
        for stream in ("compute", "d2h", "h2d"):
            ends_us = 0.0
            for span in rank.trace.of(stream):
                assert span.kind in KINDS[stream]
                assert span.start_us >= ends_us - 1e-6
                ends_us = span.end_us
        saved = [c.value for c in rank.trace.counters if c.name == ByteCount.HELD]
        assert static_bytes + max(saved, default=0) == rank.peak_device_bytes
    assert simulation.step_us >= without.step_us - 1e-6


@pytest.mark.parametrize("seed", range(40))
def test_more_bandwidth_moves_the_same_and_is_not_slower(seed):
    # Of a rank alone it is a theorem: all that waits, waits for less. Ranks that share a node can
    # in theory delay one another by being early; it was not seen here.
    job, settings = random_step(seed)
    slow = simulate(job, settings)
    machine = job.machine
    names = ("d2h_gbps", "h2d_gbps", "both_gbps", "node_gbps")
    faster = machine.model_copy(update={name: 1.5 * getattr(machine, name) for name in names})
    fast = simulate(replace(job, machine=faster), settings)
    assert fast.step_us <= slow.step_us + 1e-6
    for one, two in zip(slow.ranks, fast.ranks, strict=True):
        assert one.copy_bytes == two.copy_bytes
        assert one.peak_device_bytes == two.peak_device_bytes
        assert one.peak_host_bytes == two.peak_host_bytes
