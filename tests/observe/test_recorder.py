"""A recorded step: exact times and bytes, nothing changed, and a profile that plans."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from programs import (
    KIB,
    TIMINGS,
    Times,
    assert_nothing_left,
    assert_same,
    in_group,
    make_config,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)
from torch import nn
from traps import InjectedError
from virtual_clock import RUN, VirtualJob

from megatron_offload.backends.base import DeviceMemory
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.core.machine import Machine
from megatron_offload.core.profile import GroupKey, GroupTimes, RunShape
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, StateError
from megatron_offload.frontends.whole_model import OffloadActivations
from megatron_offload.observe.live_bytes import LiveActivationMeter
from megatron_offload.observe.recorder import profile_step
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.planning.files import save_profile
from megatron_offload.planning.job import GroupWork, Job, StageWork
from megatron_offload.planning.profiled_job import (
    job_from_profiles,
    job_of,
    measured_peak_bytes,
    schedule_of,
)
from megatron_offload.planning.schedule import PassKind, make_schedule
from megatron_offload.planning.simulate import simulate
from megatron_offload.recompute.recipes import recomputable

pytestmark = pytest.mark.usefixtures("quick_collections")

ORDER = one_forward_one_backward(4, depth=2)
A0, B0, A1, B1 = (GroupKey(chunk, order) for chunk in (0, 1) for order in (0, 1))


class Work(torch.autograd.Function):
    """Identity that saves so many bytes, and takes virtual time: once forward, twice backward."""

    @staticmethod
    def forward(ctx, x, backend, num_bytes, us):
        backend.advance_compute(us)
        if num_bytes:
            ctx.save_for_backward(torch.zeros(num_bytes, dtype=torch.uint8))
        ctx.backend, ctx.us = backend, us
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        assert all(saved.sum() == 0 for saved in ctx.saved_tensors)
        ctx.backend.advance_compute(2 * ctx.us)
        return grad * 1.0, None, None, None


class Program:
    """Two microbatches through groups a and b, with work before, between and behind them."""

    def __init__(self, *, metered=True, backend_type=SimulatedBackend, **settings):
        config = make_config(**settings)
        self.backend = backend_type(config.simulated)
        self.manager = PipelineOffloadManager(config, backend=self.backend)
        if metered:
            self.meter = LiveActivationMeter()
            self.manager.observers.append(self.meter)

    def group(self, x, name, *works):
        def run(x):
            for num_bytes, us in works:
                x = Work.apply(x, self.backend, num_bytes, us)
            return x

        return in_group(self.manager, run, x, name)

    def forward(self):
        self.manager.begin_chunk()
        x = Work.apply(torch.ones(1, requires_grad=True), self.backend, 0, 30)
        x = self.group(x, "a", (600, 60), (400, 40))
        x = Work.apply(x, self.backend, 0, 10)
        x = self.group(x, "b", (2000, 50))
        return Work.apply(x, self.backend, 0, 5)

    def step(self):
        with self.manager.step():
            first, second = self.forward(), self.forward()
            first.backward()
            del first
            second.backward()


def test_times_are_those_of_the_program():
    program = Program()
    with profile_step(program.manager, moves=False) as recorded:
        program.step()
        program.step()  # the first alone counts
    profile = recorded.profile
    assert [(group.key, group.name) for group in profile.groups] == [
        *((A0, "a"), (B0, "b")),
        *((A1, "a"), (B1, "b")),
    ]
    assert profile.backward_order == (B0, A0, B1, A1)
    assert profile.times == (
        GroupTimes(30, 130, 520, 720),
        GroupTimes(140, 190, 400, 500),
        GroupTimes(225, 325, 910, 1110),
        GroupTimes(335, 385, 790, 890),
    )
    assert profile.step_us == 1170


def peaks(recorded):
    return recorded.profile.peak_allocated_bytes, recorded.profile.peak_reserved_bytes


def test_what_events_themselves_take_is_no_work():
    def recorded(event_us):
        job = VirtualJob(10.0).warmed_up()
        backend, timestamp = job.backend, job.backend.timestamp

        def taking_time(stream):
            if stream is backend.compute_stream():
                backend.advance_compute(event_us)
            return timestamp(stream)

        backend.timestamp = taking_time
        with profile_step(job.manager) as recorded:
            job.step()
        return recorded.profile

    free, dear = recorded(0.0), recorded(2.0)
    began_us = dear.times[0].started_us
    assert began_us == 4.0, "the two of which the recorder sees what they take"
    for one, other in zip(dear.times, free.times, strict=True):
        assert [us - began_us for us in one] == pytest.approx([*other])
    assert dear.step_us - began_us == pytest.approx(free.step_us)


def test_memory_is_the_most_that_was_alive_at_a_boundary():
    program = Program()
    with profile_step(program.manager, moves=False) as recorded:
        program.step()
    assert peaks(recorded) == (6000, 6000)
    assert program.meter.peak_bytes == 6000  # as if nobody had looked
    program = Program(metered=False)
    with profile_step(program.manager, moves=False) as recorded:
        program.step()
    assert peaks(recorded) == (0, 0)


class Telling(SimulatedBackend):
    """A device that tells of its memory, which grows with what is computed."""

    def __init__(self, config):
        super().__init__(config)
        self.current, self.num_trims = 100, 0

    def memory(self):
        return DeviceMemory(self.current, 2 * self.current)

    def trim_device(self):
        self.num_trims += 1

    def advance_compute(self, us):
        super().advance_compute(us)
        self.current += int(us)


def test_a_device_that_tells_of_its_memory_is_asked():
    program = Program(backend_type=Telling)
    with profile_step(program.manager, moves=False) as recorded:
        program.step()
        program.backend.current = 7000  # of an optimizer, say
    assert peaks(recorded) == (100 + 1170, 2 * (100 + 1170))


def test_what_a_step_without_offload_reserved_besides_is_given_back():
    program = Program(backend_type=Telling)
    with contextlib.suppress(InjectedError), profile_step(program.manager, moves=False):
        raise InjectedError
    assert program.backend.num_trims == 1
    with profile_step(program.manager):
        program.step()
    assert program.backend.num_trims == 1


@pytest.mark.parametrize("num_before", range(4))
def test_a_step_that_is_to_move_nothing_moves_and_teaches_nothing(num_before):
    expected = run_step(make_model(), None, ORDER)
    settings = {"prefetch_bytes": 8 * 1024, "host_slab_bytes": 16 * 1024}
    profiled, other = (make_manager(**settings) for _ in range(2))
    model = make_model()
    for number in range(6):
        if number == num_before:
            learned, num_copies = profiled.last_profile, profiled.backend.num_copies
            with profile_step(profiled, moves=False) as recorded:
                assert_same(expected, run_step(model, profiled, ORDER))
            assert profiled.last_profile is learned
            assert profiled.backend.num_copies == num_copies
            assert recorded.profile.offloaded_bytes == 0
            by_name = profiled.last_step.by_name.values()
            (reason,) = {reason for group in by_name for reason in group.kept_bytes_by_reason}
            assert reason == "the step is profiled without offload"
            assert_nothing_left(profiled)
        for manager in (profiled, other):
            assert_same(expected, run_step(model, manager, ORDER))
        assert profiled.last_step == other.last_step
        pinned = {each.host_pool.stats.slab_bytes_total for each in (profiled, other)}
        assert len(pinned) == 1
    assert profiled.last_step.offloaded_bytes > 0


def test_a_step_that_moves_is_recorded_as_it_is():
    manager = make_manager()
    model = make_model()
    for _ in range(4):
        run_step(model, manager, ORDER)
    stats, learned = manager.last_step, manager.last_profile
    with profile_step(manager) as recorded:
        run_step(model, manager, ORDER)
    assert manager.last_step == stats
    assert recorded.profile.offloaded_bytes == stats.offloaded_bytes > 0
    with profile_step(manager, moves=False) as resident:
        run_step(model, manager, ORDER)
    for profile in (recorded.profile, resident.profile):
        assert profile.backward_order == learned.backward_order
        assert [(g.key, g.name, g.num_bytes) for g in profile.groups] == [
            (g.key, g.name, g.num_bytes) for g in learned.groups
        ]
        # The input of each microbatch, which its graph keeps for the gradient.
        kept = [group for group in profile.groups if group.externally_referenced_bytes]
        assert [(g.name, g.externally_referenced_bytes) for g in kept] == [
            ("norm", 16 * 32 * 4)
        ] * 4


def test_nested_groups_lie_within_one_another():
    manager = make_manager()
    with profile_step(manager, moves=False) as recorded:
        run_step(make_model(), manager, ORDER)
    profile = recorded.profile
    times = {group.key: times for group, times in zip(profile.groups, profile.times, strict=True)}
    assert {group.name for group in profile.groups} == {"mlp", "norm"}
    for key, inner in times.items():
        if key.order % 2:
            outer = times[GroupKey(key.chunk, key.order - 1)]
            assert outer.started_us <= inner.started_us
            assert inner.committed_us <= outer.committed_us
            assert outer.backward_us <= inner.backward_us
            assert inner.done_us <= outer.done_us


def test_a_recorded_step_can_be_simulated():
    program = Program()
    with profile_step(program.manager, moves=False) as recorded:
        program.step()
    assert measured_peak_bytes(recorded.profile) == 6000
    pytest.importorskip("simpy")
    profile = recorded.profile
    job = job_of([profile], schedule_of([profile]), Machine())
    assert simulate(job).ranks[0].peak_reserved_bytes == 6000
    with profile_step(program.manager) as moved:
        program.step()
    with pytest.raises(ConfigError, match="moved 6000 bytes, which its memory doesn't count"):
        measured_peak_bytes(replace(moved.profile, counts_what_moved=False))


def test_what_is_recomputed_counts_as_gone_in_a_step_that_recomputes_it():
    program = Program(host_memory_bytes=0)
    manager = program.manager

    def run(x):
        base = torch.ones(250)
        return Times.apply(Times.apply(x, base), recomputable(torch.neg, base, manager=manager))

    def step():
        x = torch.ones(250, requires_grad=True)
        with manager.step():
            manager.begin_chunk()
            for _ in range(2):
                x = in_group(manager, run, x, "a")
            x.sum().backward()

    step()
    with profile_step(manager) as recorded:
        step()
    assert manager.last_step.recomputed_bytes == 2000
    assert peaks(recorded) == (3000, 3000)  # of the first group one tensor, both of the second


def test_what_the_allocator_can_not_use_is_kept_what_it_was(monkeypatch):
    program = Program(max_inflight_bytes=0, prefetch_bytes=0)
    meter, most = program.meter, []

    def memory():
        most.append(meter.live_bytes)
        return DeviceMemory(meter.live_bytes, max(most) + 500)

    monkeypatch.setattr(program.backend, "memory", memory)
    for _ in range(3):
        program.step()
    for moves in (True, False):
        most.clear()
        with profile_step(program.manager, moves=moves) as recorded:
            program.step()
        assert (recorded.profile.offloaded_bytes > 0) == moves
        assert peaks(recorded) == (6000, 6500)
        assert measured_peak_bytes(recorded.profile) == 6500


@pytest.mark.sampled(2)
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("limits", [(12, 24), (12, None), (0, 0), (12, 0)])
def test_memory_is_reported_as_if_nothing_had_moved(limits, timing):
    model = make_model()
    inflight_bytes, prefetch_bytes = (kib if kib is None else kib * KIB for kib in limits)
    config = make_config(timing, max_inflight_bytes=inflight_bytes, prefetch_bytes=prefetch_bytes)
    simulated = config.simulated.model_copy(update={"host_time": True})
    manager = PipelineOffloadManager(config.model_copy(update={"simulated": simulated}))
    manager.observers.append(LiveActivationMeter(model.parameters()))
    order = one_forward_one_backward(6, depth=3)
    for _ in range(3):
        run_step(model, manager, order)
    with profile_step(manager, moves=False) as stayed:
        run_step(model, manager, order)
    run_step(model, manager, order)
    with profile_step(manager) as moved:
        run_step(model, manager, order)
    assert moved.profile.offloaded_bytes > 100 * KIB
    assert moved.profile.counts_what_moved
    assert moved.profile == stayed.profile
    assert peaks(moved) == peaks(stayed)


def test_passes_without_a_backward_never_count():
    program = Program()
    with profile_step(program.manager, moves=False) as recorded:
        with torch.no_grad():
            program.forward()
        program.forward()  # an evaluation that left grad on
        begun_us = program.backend.timestamp(program.backend.compute_stream())
        program.step()
    behind_us = 5  # what the evaluation did behind its last group
    profile = recorded.profile
    assert begun_us == 2 * 195
    assert profile.times[0] == GroupTimes(*(t + behind_us for t in (30, 130, 520, 720)))
    assert len(profile.times) == 4


def test_a_graph_of_an_earlier_step_takes_its_time_and_is_no_group_of_this_one():
    program = Program()
    with program.manager.step():
        old = program.forward()
        program.forward().backward()
    with profile_step(program.manager, moves=False) as recorded, program.manager.step():
        program.manager.begin_chunk()
        x = program.group(torch.ones(1, requires_grad=True) * 1, "a", (100, 10))
        old.backward()
        x.backward()
    profile = recorded.profile
    assert [(g.name, g.num_bytes, g.externally_referenced_bytes) for g in profile.groups] == [
        ("a", 100, 0)
    ]
    assert profile.backward_order == (A0,)
    assert profile.times[0].backward_us - profile.times[0].committed_us >= 390


@pytest.mark.parametrize(
    ("at_once", "times"),
    [(True, [(0, 10, 10, 30), (30, 40, 40, 65)]), (False, [(0, 10, 20, 40), (10, 20, 40, 65)])],
)
def test_a_start_without_a_gradient_is_left_where_the_next_boundary_is(at_once, times):
    program = Program()
    manager = program.manager
    outputs = []

    def run(x):
        return Work.apply(x.requires_grad_(), program.backend, 100, 10)

    with profile_step(manager, moves=False) as recorded, manager.step():
        for _ in range(2):
            manager.begin_chunk()
            outputs.append(in_group(manager, run, torch.ones(1), "first"))
            if at_once:
                outputs.pop().backward()
        while outputs:
            outputs.pop(0).backward()
        program.backend.advance_compute(5)
    assert recorded.profile.times == tuple(GroupTimes(*each) for each in times)


def test_a_commit_that_is_put_off_ends_the_forward_where_it_is_called():
    program = Program()
    manager = program.manager
    with profile_step(manager, moves=False) as recorded, manager.step():
        manager.begin_chunk()
        x = torch.ones(1, requires_grad=True) * 1
        x = in_group(manager, lambda x: Work.apply(x, program.backend, 100, 10), x, "a", delay=True)
        x = Work.apply(x, program.backend, 0, 7)
        manager.flush_delayed_groups()
        x.backward()
    assert recorded.profile.times == (GroupTimes(0, 10, 31, 51),)
    assert recorded.profile.groups[0].num_bytes == 100


def test_a_graph_that_is_gone_through_twice_is_entered_at_first_and_left_at_last(tmp_path):
    program = Program()
    with profile_step(program.manager, moves=False) as recorded, program.manager.step():
        output = program.forward()
        output.backward(retain_graph=True)
        output.backward()
    profile = recorded.profile
    assert profile.backward_order == (B0, A0)
    assert profile.backward_at_bytes == (3000, 5000)
    # The first backward takes 10, 100, 20, 200 and 60.
    assert profile.times[1] == GroupTimes(140, 190, 205, 195 + 390 + 110)
    save_profile(profile, tmp_path / "profile.json")


def stage(number):
    works = (
        *(("embedding", 0, 13.0), ("attention", 1000 + number, 100.0), ("residual", 0, 3.0)),
        *(("mlp", 4000, 150.0 + number), ("head", 0, 4.0)),
    )
    return StageWork(
        tuple(
            GroupWork(name, num_bytes, us, 2 * us, is_marked=num_bytes > 0)
            for name, num_bytes, us in works
        ),
        output_bytes=2000,
    )


def record_rank(job, rank):
    """Record the engine itself at one rank's work, which waits for the others as is simulated."""
    trace = simulate(job, record=True).ranks[rank].trace
    spans = [span for span in trace.of("compute") if span.kind != "stall"]
    program = Program()
    backend, compute = program.backend, program.backend.compute_stream()
    schedule = job.schedule
    shape = RunShape(schedule.num_microbatches, rank, schedule.num_ranks)
    graphs = {}
    with profile_step(program.manager, run=shape, moves=False) as recorded, program.manager.step():
        for one in schedule.ranks[rank]:
            groups = job.stages[one.stage].groups
            begins_us = spans[0].start_us
            del spans[: len(groups)]
            backend.advance_compute(max(0.0, begins_us - backend.timestamp(compute)))
            if one.kind is PassKind.BACKWARD:
                graphs.pop((one.stage, one.microbatch)).backward()
                continue
            program.manager.begin_chunk(vp_stage=one.stage)
            x = torch.ones(1, requires_grad=True)
            for work in groups:
                if work.is_marked:
                    x = program.group(x, work.name, (work.num_bytes, work.forward_us))
                else:
                    x = Work.apply(x, backend, 0, work.forward_us)
            graphs[one.stage, one.microbatch] = x
            del x
    return recorded.profile


@pytest.mark.parametrize(
    "schedule", [make_schedule("1f1b", 2, 6), make_schedule("interleaved", 2, 4, 2)]
)
def test_a_simulation_from_recorded_profiles_is_the_step_that_was_recorded(schedule):
    stages = tuple(stage(number) for number in range(schedule.num_stages))
    machine = Machine(p2p_latency_us=7.0, p2p_gbps=1.0)
    job = Job(schedule, stages, (0,) * schedule.num_ranks, machine)
    profiles = [record_rank(job, rank) for rank in range(schedule.num_ranks)]
    again = job_from_profiles(profiles, schedule, machine)
    again = replace(again, static_bytes=job.static_bytes)
    simulated = simulate(again)
    measured_us = max(profile.step_us for profile in profiles)
    assert measured_us == pytest.approx(simulate(job).step_us)
    assert simulated.step_us == pytest.approx(measured_us, rel=0.02)
    for rank, profile in zip(simulated.ranks, profiles, strict=True):
        assert rank.peak_device_bytes == measured_peak_bytes(profile)


@pytest.mark.sampled
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("at", range(1, 9))
def test_an_error_anywhere_leaves_the_manager_whole(at, moves):
    program = Program()
    manager = program.manager
    program.step()
    observers, found = list(manager.observers), vars(manager).copy()
    program.step()
    stats = manager.last_step
    advance, num_calls = program.backend.advance_compute, 0

    def fail_at(us):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2 * at:
            raise InjectedError
        advance(us)

    program.backend.advance_compute = fail_at
    with pytest.raises(InjectedError), profile_step(manager, moves=moves) as recorded:
        program.step()
    del program.backend.advance_compute
    with pytest.raises(StateError, match="has not come to its end"):
        _ = recorded.profile
    assert vars(manager).keys() == found.keys()
    assert manager.observers == observers
    assert_nothing_left(manager)
    program.step()
    assert manager.last_step.offloaded_bytes == stats.offloaded_bytes > 0
    with profile_step(manager, moves=False) as recorded:
        program.step()


def test_a_step_that_failed_and_was_tried_again_inside_counts_alone():
    program = Program()
    with profile_step(program.manager, moves=False) as recorded:
        with contextlib.suppress(InjectedError), program.manager.step():
            program.forward()
            raise InjectedError
        program.step()
    assert [group.num_bytes for group in recorded.profile.groups] == [1000, 2000] * 2
    assert recorded.profile.times[0].committed_us - recorded.profile.times[0].started_us == 100


def test_a_step_whose_layers_are_all_recomputed_is_a_profile_of_no_group():
    manager = make_manager()
    with profile_step(manager) as recorded, manager.step():
        torch.ones(2, requires_grad=True).square().sum().backward()
    assert (recorded.profile.groups, recorded.profile.run) == ((), RunShape())


def test_what_is_no_whole_step_is_refused():
    program = Program()
    with pytest.raises(StateError, match="no step with a backward has ended"):
        with profile_step(program.manager):
            program.forward().backward()
    with pytest.raises(StateError, match="in the middle of a step"):
        with profile_step(program.manager):
            program.manager.reset()


@pytest.mark.parametrize("moves", [True, False])
def test_several_watch_one_step_and_each_sees_what_it_would_see_alone(moves):
    alone, together = Program(), Program()
    with profile_step(alone.manager, moves=moves) as recorded:
        alone.step()
    with (
        trace_step(together.manager) as trace,
        profile_step(together.manager, moves=moves) as again,
        trace_step(together.manager) as inner,
    ):
        together.step()
    assert again.profile == recorded.profile
    assert trace == inner
    assert (trace.num_bytes["d2h"] > 0) == moves


def test_groups_without_marks_are_recorded_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    offload = OffloadActivations(config=make_config(prefetch_bytes=1024))
    for tensor in model.parameters():
        offload.manager.mark_not_offload(tensor)
    x = torch.ones(16, 64)

    def step():
        with offload:
            y = model(x).sum()
        y.backward()
        del y
        assert offload.end_step()

    step()
    with profile_step(offload.manager, moves=False) as recorded:
        step()
    profile = recorded.profile
    assert profile.offloaded_bytes == 0
    assert sum(g.num_bytes for g in profile.groups) > 0
    assert len(profile.times) == len(profile.groups) == len(profile.backward_order)


# What a step takes on the device's clock, what of it is waiting, and what it reserves.


SLOW = 0.05
"""A bandwidth that compute has to wait for, in GB/s."""

COMPUTE_US = 6 * 4 * 2 * 60.0
"""6 microbatches of 4 blocks of 2 groups, 20 us forward and 40 us backward each."""


@pytest.mark.parametrize("gbps", [10.0, SLOW])
def test_a_profile_of_a_step_that_moved_is_that_of_one_that_did_not(gbps):
    job = VirtualJob(gbps).warmed_up()
    with profile_step(job.manager, run=RUN) as moved:
        job.step()
    with profile_step(job.manager, run=RUN, moves=False) as bare:
        job.step()
    profile = moved.profile
    assert profile.offloaded_bytes > 0
    assert (profile.d2h_gbps, profile.h2d_gbps) == (pytest.approx(gbps), pytest.approx(gbps))
    assert (profile.waited_us > 0) == (gbps == SLOW)
    assert bare.profile.waited_us == 0.0
    assert profile.step_us == pytest.approx(bare.profile.step_us) == pytest.approx(COMPUTE_US)
    for times, expected in zip(profile.times, bare.profile.times, strict=True):
        assert tuple(times) == pytest.approx(tuple(expected))


# What groups save counts once, moved or not, and what something else keeps is reported apart.


def offload(manager, tensors, name):
    """Save ``tensors`` in one group; return its loss."""
    x = torch.zeros(1, requires_grad=True)
    return in_group(manager, lambda x: Times.apply(x, *tensors), x, name)


def record(manager, step, *, moves=False):
    with profile_step(manager, moves=moves) as recorded:
        manager.begin_chunk()
        step()
        manager.reset()
    return [(g.name, g.num_bytes, g.externally_referenced_bytes) for g in recorded.profile.groups]


@pytest.mark.parametrize("moves", [True, False])
def test_what_two_groups_share_counts_in_the_first(moves):
    manager = make_manager()

    def step():
        shared = torch.ones(1024)
        loss = offload(manager, [shared], "first")
        loss = loss + offload(manager, [shared, torch.ones(512)], "second")
        del shared
        loss.backward()

    found = record(manager, step, moves=moves)
    assert found == [("first", 4 * KIB, 0), ("second", 2 * KIB, 0)]
    if moves:
        assert found == [(g.name, g.num_bytes, 0) for g in manager.last_profile.groups]


def test_of_a_storage_that_is_saved_in_parts_each_group_counts_its_own():
    manager = make_manager()

    def step():
        both = torch.ones(2048)
        loss = offload(manager, [both[:1024]], "first")
        loss = loss + offload(manager, [both], "second")
        del both  # what is let go before backward can be freed
        loss.backward()

    assert record(manager, step) == [("first", 4 * KIB, 0), ("second", 4 * KIB, 0)]


@pytest.mark.parametrize("moves", [True, False])
def test_what_the_program_keeps_can_not_be_freed(moves):
    manager = make_manager(prefetch_bytes=0)

    def step():
        kept = torch.ones(1024)
        loss = offload(manager, [kept, torch.ones(512)], "group")
        loss = loss + offload(manager, [torch.ones(256)], "behind")
        loss.backward()
        assert float(kept.sum()) == 1024

    for _ in range(2):
        found = record(manager, step, moves=moves)
        assert found == [("group", 2 * KIB, 4 * KIB), ("behind", KIB, 0)]


def test_who_lets_go_before_the_last_group_that_shares_it_keeps_nothing():
    manager = make_manager()

    def step():
        kept = [torch.ones(1024)]
        loss = offload(manager, kept, "first")
        between = torch.zeros(1, requires_grad=True) * 1
        between.register_hook(lambda grad: kept.clear())
        loss = loss + between
        (loss + offload(manager, kept, "second")).backward()

    assert record(manager, step) == [("first", 4 * KIB, 0), ("second", 0, 0)]


def test_a_buffer_is_kept_by_its_module():
    manager = make_manager()
    module = nn.Module()
    module.register_buffer("table", torch.ones(1024))
    module.nothing = nn.Parameter(torch.ones(1))
    module.register_buffer("absent", None)

    def step():
        other = torch.ones(256)
        offload(manager, [module.table, other], "group").backward()

    assert record(manager, step) == [("group", 0, 5 * KIB)]
