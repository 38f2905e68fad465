"""The simulator against the engine itself, on the simulated device's virtual clock.

Both run the same random step: the engine with real tensors, streams and waits, the simulator with
nothing. They must agree on what is offloaded and in which order, on what is held, and on the times.
What stays is recorded in both: the simulator counts its boundaries.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import zip_longest

import pytest
import torch
from problems import plain_machine

from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.observer import Observer
from megatron_offload.observe.live_bytes import LiveActivationMeter
from megatron_offload.planning import job_rows
from megatron_offload.planning.job import GroupWork, Job, RankSettings, StageWork, UnitWork
from megatron_offload.planning.schedule import Pass, Schedule
from megatron_offload.planning.simulate import RELEASE, RELOAD, simulate
from megatron_offload.recompute.recipes import add_recipe

KIB = 1024
NUM_STEPS = 6
ROOMY_BYTES = 4096 * KIB
"""Slabs of the host pool, unless it is to be tight."""


class Work(torch.autograd.Function):
    """Saves its own and what is made of it and others, and takes virtual time.

    Backward needs what is saved before it begins, the own first.
    """

    @staticmethod
    def forward(ctx, x, manager, work, own, recompute):
        backend = manager.backend
        backend.advance_compute(work.forward_us)
        saved = [own[0]]
        for unit in work.units:

            def make(*parents, unit=unit):
                backend.advance_compute(unit.us * ctx.is_back)
                return torch.zeros(unit.num_bytes, dtype=torch.uint8)

            ctx.is_back = False
            made = make()
            ctx.is_back = True
            if unit.unit in recompute:
                parents = [own[name != work.name] for name in unit.parents]
                add_recipe(manager.recorded_chunk(), made, make, parents, unit=unit.unit)
            saved.append(made)
        ctx.save_for_backward(*saved)
        ctx.backend, ctx.work = backend, work
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        assert sum(saved.nbytes for saved in ctx.saved_tensors) == ctx.work.num_bytes
        ctx.backend.advance_compute(ctx.work.backward_us)
        return grad * 1.0, None, None, None, None


class Copies(Observer):
    """Notes the group of each copy, in steps as they are without it."""

    needs_groups = False

    def __init__(self):
        self.labels = {"d2h": [], "h2d": []}

    def copy_issued(self, direction, pairs, group):
        self.labels[direction].append(group.label)


@dataclass
class Seen:
    """What a step of the engine was."""

    step_us: float
    release_us: float
    reload_us: float
    d2h: list
    h2d: list
    num_late: int
    recomputed_bytes: int
    peak_host_bytes: int
    peak_saved_bytes: int


def lend_no_place_twice(pool):
    """Let no copy out wait until its place on the host was read: places are not simulated."""
    free = pool.free

    def forget(region, after, num_views=1):
        piece = region._piece
        free(region, after, num_views)
        if region._piece is None:
            pool._free[piece.num_bytes].remove(piece)
            pool._may_coalesce = False

    pool.free = forget


def run_engine(job, settings, recompute, host_slab_bytes):
    machine = job.machine
    config = OffloadConfig(
        backend="simulated",
        min_tensor_bytes=0,
        max_inflight_bytes=settings.max_inflight_bytes,
        prefetch_bytes=settings.prefetch_bytes,
        host_slab_bytes=host_slab_bytes,
        host_memory_bytes=64 * KIB * KIB,
        simulated=SimulatedConfig(d2h_gbps=machine.d2h_gbps, h2d_gbps=machine.h2d_gbps),
    )
    backend = SimulatedBackend(config.simulated)
    manager = PipelineOffloadManager(config, backend=backend)
    if host_slab_bytes == ROOMY_BYTES:
        lend_no_place_twice(manager.host_pool)
    meter = LiveActivationMeter()
    meter.needs_groups = False
    manager.observers.append(meter)
    passes = job.schedule.ranks[0]
    for _ in range(NUM_STEPS):
        began_us = backend.timestamp(backend.compute_stream())
        stall_us = dict(backend.stall_us)
        meter.reset_peak()
        copies = Copies()
        with manager.observed_by(copies):
            run_step(manager, job, passes, recompute)
    stats = manager.last_step
    lost = {wait.name: us - stall_us[wait] for wait, us in backend.stall_us.items()}
    seen = Seen(
        step_us=backend.timestamp(backend.compute_stream()) - began_us,
        release_us=lost["W2"],
        reload_us=lost["W4"],
        **copies.labels,
        num_late=stats.num_late_reloads,
        recomputed_bytes=stats.recomputed_bytes,
        peak_host_bytes=stats.peak_host_bytes,
        peak_saved_bytes=meter.peak_bytes,
    )
    manager.close()
    return seen


def run_step(manager, job, passes, recompute):
    graphs = {}
    with manager.step():
        for one in passes:
            if one.kind == "F":
                manager.begin_chunk(vp_stage=one.stage)
                own, groups = [], job.stages[one.stage].groups
                x = torch.ones(1, requires_grad=True) * 1.0
                for work, following in zip_longest(groups, groups[1:]):
                    num_bytes = work.num_bytes - sum(unit.num_bytes for unit in work.units)
                    own = [torch.zeros(num_bytes, dtype=torch.uint8), *own[:1]]
                    x = start_group(manager, x, work.name)
                    with manager:
                        y = Work.apply(x, manager, work, own, recompute)
                    units = () if following is None else following.units
                    if not any(work.name in unit.parents for unit in units):
                        own.clear()
                    x = commit_group(manager, y, work.name)
                graphs[one.stage, one.microbatch] = x
                del x, y, own
            else:
                graphs.pop((one.stage, one.microbatch)).sum().backward()


def random_units(rng, sizes, index):
    """Return what a group has of one or two units, made from its own or the group before's.

    What needs that group comes first: the simulator waits for it before it makes any.
    """
    own, before = f"g{index}", f"g{index - 1}"
    units = [
        UnitWork(rng.choice("ab"), rng.choice(sizes), rng.randint(1, 20), parents)
        for parents in rng.choices(
            [(), (own,), (own, before), (before,)], k=rng.choice([0, 1, 1, 2])
        )
        if index or before not in parents
    ]
    return tuple(sorted(units, key=lambda unit: before not in unit.parents))


def random_job(rng, *, with_units=False):
    """Return a step of one rank: chunks of one or two stages, in any order that can run."""
    num_stages, num_microbatches = rng.choice([1, 1, 2]), rng.randint(1, 8)
    sizes = [rng.randint(1, 8) * 4 * KIB for _ in range(3)]
    stages = tuple(
        StageWork(
            tuple(
                GroupWork(f"g{index}", rng.choice(sizes), rng.randint(1, 60), rng.randint(1, 90))
                for index in range(rng.randint(1, 6))
            )
        )
        for _ in range(num_stages)
    )
    if with_units:
        stages = tuple(
            StageWork(tuple(add_units(rng, sizes, *one) for one in enumerate(stage.groups)))
            for stage in stages
        )
    depth = rng.randint(1, num_microbatches)
    passes, open_ones = [], []
    for microbatch in range(num_microbatches):
        passes += [Pass(stage, "F", microbatch) for stage in range(num_stages)]
        open_ones.append(microbatch)
        if len(open_ones) >= depth:
            passes += backward_of(num_stages, open_ones.pop(0))
    for microbatch in open_ones:
        passes += backward_of(num_stages, microbatch)
    schedule = Schedule("any", num_stages, num_microbatches, (tuple(passes),))
    d2h_gbps, h2d_gbps = rng.choice([0.3, 1.0, 4.0]), rng.choice([0.3, 1.0, 4.0])
    machine = plain_machine(max(d2h_gbps, h2d_gbps), d2h_gbps=d2h_gbps, h2d_gbps=h2d_gbps)
    return Job(schedule, stages, (0,), machine)


def add_units(rng, sizes, index, group):
    units = random_units(rng, sizes, index)
    num_bytes = group.num_bytes + sum(unit.num_bytes for unit in units)
    return replace(group, num_bytes=num_bytes, units=units)


def backward_of(num_stages, microbatch):
    return [Pass(stage, "B", microbatch) for stage in reversed(range(num_stages))]


def random_settings(rng, room):
    limits = (rng.choice([None, 0, *sizes]) for sizes in ((16, 32, 64), (32, 64)))
    inflight_bytes, prefetch_bytes = (size and size * room * KIB for size in limits)
    return RankSettings(max_inflight_bytes=inflight_bytes, prefetch_bytes=prefetch_bytes)


def random_step(seed, *, with_units=False, room=1):
    rng = random.Random(seed)
    job = random_job(rng, with_units=with_units)
    recompute = frozenset(rng.choice(["", "a", "b", "ab"]) if with_units else "")
    return job, random_settings(rng, room), recompute


def both(seed, host_slab_bytes=ROOMY_BYTES, **options):
    job, settings, recompute = random_step(seed, **options)
    simulation = simulate(job_rows.with_units(job, recompute), settings, record=True)
    return run_engine(job, settings, recompute, host_slab_bytes), simulation, job


def assert_same_decisions(seen, rank, groups=()):
    assert [span.label for span in rank.trace.of("d2h")] == seen.d2h
    assert [span.label for span in rank.trace.of("h2d")] == seen.h2d
    assert rank.num_late == seen.num_late
    assert rank.peak_host_bytes == seen.peak_host_bytes
    units = ({*unit.parents} - {group.name} for group in groups for unit in group.units)
    if not any(units):  # else the forward itself still has what lies before
        assert rank.peak_device_bytes == seen.peak_saved_bytes


LATE = (616, 658, 792, 819, 829, 1001, 1195)  # a reload is late
EARLY = (91, 270, 452)  # backward is over before the window lets a source go


def check(seed, **options):
    seen, simulation, job = both(seed, **options)
    rank = simulation.ranks[0]
    groups = [group for stage in job.stages for group in stage.groups]
    assert_same_decisions(seen, rank, groups)
    assert rank.recomputed_bytes == seen.recomputed_bytes
    assert simulation.step_us == pytest.approx(seen.step_us, rel=1e-9)
    assert rank.stall_us[RELEASE] == pytest.approx(seen.release_us, abs=1e-6)
    assert rank.stall_us[RELOAD] == pytest.approx(seen.reload_us, abs=1e-6)


@pytest.mark.parametrize("seed", [*range(60), *LATE])
def test_the_simulator_does_what_the_engine_does_at_the_same_times(seed):
    check(seed)


def test_the_random_steps_move_stall_and_return():
    steps = [random_step(seed) for seed in (*range(60), *LATE)]
    ranks = [simulate(job, settings).ranks[0] for job, settings, _ in steps]
    assert sum(rank.num_late > 0 for rank in ranks) >= 3
    assert sum(0 < rank.reloaded_bytes < rank.offloaded_bytes for rank in ranks) >= 3
    for cause in (RELEASE, RELOAD):
        assert sum(rank.stall_us[cause] > 0 for rank in ranks) >= 15, cause


@pytest.mark.slow
def test_where_pinned_memory_is_tight_the_decisions_are_the_same():
    for seed in range(40):  # copies out wait for places in the pool, which is not simulated
        seen, simulation, _ = both(seed, 16 * KIB)
        assert_same_decisions(seen, simulation.ranks[0])
        assert simulation.step_us <= seen.step_us * (1 + 1e-9)


@pytest.mark.parametrize("seed", [*range(60), *EARLY])
@pytest.mark.parametrize("room", [1, 4])
def test_what_is_recomputed_is_simulated_too(seed, room):
    check(seed, with_units=True, room=room)
