"""Runs that find by their own steps what to offload, on the virtual clock: promises hold."""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext

import pytest
import torch
from programs import KIB, make_config, run_step
from virtual_clock import ORDER, OpenJob, VirtualJob

from megatron_offload import OffloadActivations, get_act_offloading_ctx_manager
from megatron_offload.autotune import loop as loop_module
from megatron_offload.autotune import search
from megatron_offload.autotune.loop import MeasuredLoop, tune
from megatron_offload.backends.base import DeviceMemory
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.engine import automatic, host_clock
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.measure import StepTimer
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.files import PLANS, load_plan, save_plan

pytestmark = [pytest.mark.by_default, pytest.mark.usefixtures("few_candidates")]

TARGET = 110 * KIB
"""Something over half of what the step takes without offload."""

COMPUTE_US = 2880.0
AUTO = {"kind": "auto"}


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="megatron_offload.autotune.loop")
    return caplog


@pytest.fixture(autouse=True)
def small_and_unhurried(monkeypatch):
    monkeypatch.setattr(automatic, "_LEAST_GROUP_BYTES", 4 * KIB)
    monkeypatch.setattr(host_clock, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(SimulatedBackend, "has_passed", lambda *_: False)  # the host is ahead
    for module in (loop_module, search):  # planning may take as long as it takes here
        monkeypatch.setattr(module, "ending_after", lambda seconds: nullcontext())


def settled(job, *, most_steps=9, **keys):
    """Take steps until nothing more is looked at; return the loop."""
    loop = tune(job.manager, **keys)
    while not loop.is_converged:
        job.step()
        assert len(job.moved_bytes) <= most_steps
    return loop


def warnings_of(log):
    return [record.message for record in log.records if record.levelno >= logging.WARNING]


def hooks_inside(context):
    """Return what autograd calls for what is saved inside a context."""
    with context:
        return torch._C._autograd._top_saved_tensors_default_hooks(True)


# Time, which is the default.


@pytest.mark.sampled
@pytest.mark.parametrize(("gbps", "percent"), [(0.1, 1), (10.0, 1), (0.1, 5), (0.02, 1)])
def test_whatever_the_link_gives_the_default_costs_no_more_than_it_may(gbps, percent, log):
    job = VirtualJob(gbps, policy={**AUTO, "most_slowdown_percent": percent})
    loop = settled(job)
    assert 100 * (job.step_us() / COMPUTE_US - 1) <= percent + 1e-9
    job.step()
    assert job.manager.observers == [job.meter], "nobody looks any more"
    assert loop.said in log.messages[0]
    assert len(log.messages) == 1
    if gbps >= 0.1:
        assert job.moved_bytes[-1] == job.moved_bytes[-2] > 60 * KIB
        assert loop.plan.measured.slowdown_percent <= percent
        assert PLANS.parse(PLANS.to_json(loop.plan), "it") == loop.plan
    elif loop.plan is None:
        assert job.moved_bytes[-1] == 0
        assert loop.said.startswith("megatron-offload: nothing is offloaded: ")


@pytest.mark.parametrize("plans", [0, 1, 3])
def test_two_steps_are_seen_in_which_all_is_kept_and_two_of_each_plan(plans):
    job = VirtualJob(0.1, policy={"kind": "auto", "measured_plans": plans})
    copy, probed, timed, followed = job.backend.copy, set(), [], []

    def seen(pairs, stream, label):
        if label == "bandwidth":
            probed.add(len(job.moved_bytes) + 1)
        return copy(pairs, stream, label)

    job.backend.copy = seen
    loop = MeasuredLoop()
    assert tune(job.manager, loop) is tune(job.manager) is loop
    while not loop.is_converged:
        timed.append(sum(isinstance(one, StepTimer) for one in job.manager.observers))
        followed.append(job.manager.learner.plan)
        job.step()
    assert job.moved_bytes[:2] == [0, 0]
    assert timed == [0] + [1] * (len(timed) - 1)
    assert probed == {2}, "short copies behind the second"
    assert followed[:2] == [None, None]
    assert all(one is not None for one in followed[2:])
    assert followed[2::2] == followed[3::2]
    assert 2 * min(plans, 1) <= len(followed) - 2 <= 2 * plans
    assert (loop.plan.measured is None) == loop.said.endswith("as predicted") == (plans == 0)
    assert loop.plan.moved_bytes > 0


# Where nothing is offloaded.


@pytest.mark.parametrize(
    ("gbps", "settings", "why"),
    [
        (0.001, {}, "a plan that frees a little is predicted to cost 102 %"),
        (0.01, {}, "the least costly plan that was tried costs 11.96 % of a step"),
        (1.0, {"us_per_row": 0.0}, "there is no GPU here"),
        (1.0, {"us_per_row": 0.0, "policy": AUTO}, "there is no GPU here"),
        (0.001, {"min_tensor_bytes": 1 << 30}, "no step came to its end"),
    ],
)
def test_where_nothing_moves_no_step_has_a_hook_and_it_is_said_once(gbps, settings, why, log):
    job = OpenJob(gbps, **settings)
    loop = job.manager.tuner
    num_steps = 0
    while not loop.is_converged:
        assert hooks_inside(job.offload) is not None
        job.step()
        num_steps += 1
        assert num_steps <= 13, "the first, and twelve that are looked at"
    for _ in range(9):
        assert hooks_inside(job.offload) is None
        assert job.step() == 3 * 32 * 16 * job.us_per_row
        assert (job.moved_bytes, job.manager.is_skipping, loop.is_converged) == (0, True, True)
    assert job.manager.host_pool.stats.slab_bytes_total == 0
    (text,) = warnings_of(log)
    assert f"nothing is offloaded: {why}" in text
    if "min_tensor_bytes" not in settings:
        assert "'policy: modules'" in text
        with profile_step(job.manager) as recorded:
            job.step()
        assert len(recorded.profile.groups) > 8, "who wants to see groups does"
    assert job.moved_bytes == 0


@pytest.mark.parametrize(("recompute", "passes"), [([], True), (["norm"], False)])
def test_of_a_fraction_of_nothing_no_hook_is_left(recompute, passes):
    manager = VirtualJob(1.0, fraction=0, recompute=recompute).manager
    manager.observers.clear()
    assert manager.is_skipping == passes
    if passes:
        assert hooks_inside(OffloadActivations(manager=manager)) is None


# What the device has room for.


@pytest.mark.parametrize("gbps", [10.0, 0.01])
@pytest.mark.parametrize(
    ("capacity_kib", "policy"),
    [(160, AUTO), (90, AUTO), (160, {"kind": "memory_target", "memory_target": "1GiB"})],
)
def test_what_the_device_has_no_room_for_moves_from_the_first_step_on(
    gbps, capacity_kib, policy, log
):
    job = OpenJob(gbps, capacity_kib * KIB, policy=policy)  # without offload it takes 132 KiB
    for number in range(12):
        job.step()  # fails where it takes more
        if number < 2:
            assert 0 < job.moved_bytes < 90 * KIB
    loop = job.manager.tuner
    assert loop.is_converged
    assert len(log.messages) == 1
    if policy == AUTO:
        assert (log.records[0].levelno == logging.WARNING) == (gbps < 1)
        assert loop.plan is None or 0 < loop.plan.ranks[0].measured_peak_bytes < capacity_kib * KIB
    else:
        assert "at most 150.00 KiB is wanted" in loop.said


# How long it looks.


def test_no_more_than_twelve_steps_are_looked_at(log):
    policy = {"kind": "memory_target", "memory_target": TARGET, "measured_plans": 20}
    job = OpenJob(10.0, policy=policy)
    number, loop = 0, job.manager.tuner
    job.backend.memory = lambda: DeviceMemory(job.meter.live_bytes, TARGET + number * KIB)
    while not loop.is_converged:
        job.step()
        number += 1
    assert 12 <= number <= 13, "the first, and twelve"
    assert "to look for a plan takes these steps too long" in loop.said
    assert warnings_of(log) == [loop.said]
    job.step()
    assert job.moved_bytes == 0


def test_looking_ends_where_it_takes_half_as_long_again_as_twelve_steps(log):
    policy = {"kind": "memory_target", "memory_target": 40 * KIB}
    job = OpenJob(0.001, policy=policy)
    took_us = 0.0
    while not job.manager.tuner.is_converged:
        took_us = job.step()
    assert took_us > 8 * job.step()
    assert (job.moved_bytes, job.manager.is_skipping) == (0, True)
    (text,) = warnings_of(log)
    assert "to look for a plan takes these steps too long" in text


def test_a_program_that_changes_for_good_is_looked_at_anew_and_not_for_ever(log):
    job = OpenJob(10.0)
    loop, plans = job.manager.tuner, []
    for depth in (32, 24, 16, 20, 28):
        for _ in range(8):
            job.step(depth=depth)
        assert loop.is_converged
        plans.append(loop.plan and loop.plan.moved_bytes)
        if depth != 28:
            job.step(depth=30)
            assert loop.is_converged, "one odd step changes nothing"
    assert 130 * KIB > plans[0] > plans[1] > plans[2] > 30 * KIB
    assert plans[3:] == [None, None]
    assert (job.moved_bytes, job.manager.is_skipping) == (0, True)
    (text,) = warnings_of(log)
    assert "its steps have other groups again and again" in text


@pytest.mark.parametrize("gbps", [10.0, 0.001])
def test_other_lengths_are_the_same_program(gbps, log):
    job = OpenJob(gbps)
    loop, begun = job.manager.tuner, set()
    for number in range(40):
        job.step(rows=(60, 5, 9, 64, 20, 33)[number % 6])
        begun.add(job.manager.learner.num_searches)
    assert begun == {1}
    assert loop.is_converged
    assert (job.moved_bytes > 0) == (loop.plan is not None) == (gbps == 10.0)
    assert len(log.messages) == 1


# When it is looked at again.


def test_a_step_that_needs_much_more_memory_than_any_is_looked_at(log):
    job = OpenJob(0.001)
    job.backend.peak_allocated_bytes = lambda: job.most_bytes
    for rows, begun in ((16, 1), (18, 1), (24, 2)):
        for _ in range(4):
            job.step(rows)
        assert job.manager.learner.num_searches == begun
    assert len(warnings_of(log)) == 1 < len(log.messages), "it is warned of once"


@pytest.mark.parametrize("gbps", [10.0, 0.01])
@pytest.mark.parametrize("in_step", [False, True])
def test_behind_a_step_that_has_run_out_of_memory_the_next_has_room(gbps, in_step):
    job = OpenJob(gbps, 200 * KIB, policy={"kind": "auto", "measured_plans": 3 * (gbps < 1)})
    job.ends_steps = in_step
    learner, loop = job.manager.learner, job.manager.tuner
    for _ in range(10):
        job.step()
    assert loop.is_converged
    learner.move_nothing()
    loop.plan = loop._followed = None
    with pytest.raises(torch.OutOfMemoryError):
        job.step(30)
    for _ in range(10):
        job.step(30)
    assert learner.num_searches == 2
    assert loop.is_converged


@pytest.mark.parametrize("gbps", [10.0, 0.05])
@pytest.mark.parametrize("where", range(1, 4))
def test_a_step_that_fails_ruins_nothing(where, gbps):
    plans = []
    for fails in (False, True):
        job = OpenJob(gbps)
        loop = job.manager.tuner
        for number in range(10):
            if fails and number == where:
                job.model[20].forward = lambda x: 1 / 0
                with pytest.raises(ZeroDivisionError):
                    job.step()
                del job.model[20].forward
            else:
                job.step()
        assert loop.is_converged
        plans.append(loop.plan)
    assert (plans[0] is None) == (plans[1] is None)
    assert plans[0] is None or plans[1].is_like(plans[0])


# Where the step is CPU-bound.


def host_bound_job(monkeypatch, engine_us, capacity_bytes=None):
    """Return a job whose host takes so long in each call of the engine."""
    times_s = itertools.count(0.0, 1e-6 * engine_us)
    monkeypatch.setattr(host_clock, "perf_counter", lambda: next(times_s))
    job = VirtualJob(1.0).launched_by_a_host(100.0)
    if capacity_bytes:
        job.backend.capacity_bytes = lambda: capacity_bytes
    return job


@pytest.mark.parametrize(
    ("engine_us", "capacity_bytes", "num_steps"),
    [(0.01, None, 4), (50.0, None, 2), (50.0, 190 * KIB, 4)],
)
def test_what_the_engine_takes_of_a_host_that_is_the_limit_is_cost(
    engine_us, capacity_bytes, num_steps, monkeypatch, log
):
    job = host_bound_job(monkeypatch, engine_us, capacity_bytes)
    loop = settled(job)
    tries = num_steps > 2
    assert (len(job.moved_bytes) >= num_steps) if tries else (len(job.moved_bytes) == num_steps)
    assert (loop.plan is not None) == tries
    assert ("the host launches these steps hardly faster" in loop.said) == (not tries)
    assert (log.records[0].levelno == logging.WARNING) == (engine_us > 1)
    if tries:
        assert loop.plan.measured.slowdown_percent > engine_us / 50


@pytest.mark.parametrize("policy", [{"kind": "memory_target", "memory_target": TARGET}, AUTO])
def test_for_replays_the_plan_is_that_of_a_host_that_takes_no_time(policy):
    plans = []
    for launch_us in (0.0, 150.0):
        job = VirtualJob(0.1, whole_step_graph=True, policy=policy).launched_by_a_host(launch_us)
        loop = settled(job)
        plans.append(loop.plan)
    assert plans[1].measured is None
    assert "as predicted" in loop.said
    assert plans[1].moved_bytes == pytest.approx(plans[0].moved_bytes, rel=0.3)
    replayed = VirtualJob(0.1).warmed_up()
    replayed.manager.follow_plan(plans[1])
    replayed.step()
    step_us = replayed.step_us()
    assert step_us == pytest.approx(plans[1].ranks[0].predicted_step_us)
    assert step_us <= (1.01 + 1e-9 if policy == AUTO else 1.2) * COMPUTE_US


@pytest.mark.parametrize("whole_step_graph", [False, True])
def test_a_capture_with_a_plan_of_a_slow_host_is_warned_of_once(whole_step_graph, log):
    job = VirtualJob(0.1, whole_step_graph=whole_step_graph).launched_by_a_host(150.0)
    settled(job)
    job.manager.observers.clear()  # nobody may look at what is captured
    job.backend.is_capturing = lambda: True
    for _ in range(2):
        job.step()
    warned = [one for one in log.records if "set whole_step_graph" in one.message]
    assert len(warned) == (not whole_step_graph)


# Memory.


@pytest.mark.parametrize("share", [1.08, 0.4, 1.3])
def test_a_target_is_kept_whatever_the_allocator_takes(share, log):
    moved_bytes = []
    for plans in (0, 3):
        policy = {"kind": "memory_target", "memory_target": TARGET, "measured_plans": plans}
        job = VirtualJob(1.0, policy=policy)
        job.backend.reserved_bytes = lambda job=job: int(share * job.meter.peak_bytes)
        job.backend.trim_device = job.meter.reset_peak
        plan = settled(job).plan
        job.meter.reset_peak()
        job.step()
        assert (job.backend.reserved_bytes() <= TARGET) == (plans > 0 or share < 1)
        moved_bytes.append(plan.moved_bytes)
    assert plan.ranks[0].measured_peak_bytes <= TARGET
    assert (moved_bytes[1] > moved_bytes[0]) == (share > 1)
    assert moved_bytes[1] != moved_bytes[0]
    assert warnings_of(log) == []


def test_a_target_that_cannot_be_kept_is_warned_of_and_the_run_goes_on(log):
    job = VirtualJob(1.0, policy={"kind": "memory_target", "memory_target": 8 * KIB})
    loop = settled(job)
    assert log.records[-1].levelno == logging.WARNING
    assert "at most 8.00 KiB is wanted" in loop.said
    # As little as there can be: everything is offloaded, in the smallest room.
    assert loop.plan.moved_bytes == loop.plan.ranks[0].saved_bytes


# Where it is said what is offloaded, and where it begins anew.


@pytest.mark.parametrize(
    "settings",
    [
        {"fraction": 1.0},
        {"delta_bytes_across_pp_ranks": 0},
        {"policy": {"kind": "modules"}},
        {"policy": {"kind": "ratio", "ratio": 0.5}},
        {"enabled": False},
    ],
)
def test_what_a_user_sets_is_what_happens(settings):
    job = VirtualJob(0.02, **settings)
    loop = tune(job.manager)
    for _ in range(5):
        run_step(job.model, job.manager, ORDER)
        assert (loop.is_converged, loop.plan, job.manager.observers) == (True, None, [job.meter])


def test_a_policy_that_nobody_plans_by_is_said_once(caplog):
    job = VirtualJob(1.0, policy={"kind": "auto"})
    for _ in range(3):
        job.step()
    (text,) = caplog.messages
    assert "call megatron_offload.autotune.loop.tune(manager)" in text
    assert job.moved_bytes[-1] > 0


def test_a_plan_that_someone_gives_is_followed_and_nothing_else(tmp_path):
    job = VirtualJob(0.1)
    loop = settled(job)
    save_plan(loop.plan, tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    job.manager.follow_plan(plan)
    for _ in range(4):
        job.step()
    assert job.manager.learner.plan is plan
    assert loop.is_converged


def test_a_context_for_another_model_begins_by_itself():
    config = make_config(simulated={"host_time": True})
    begun = []
    models = [torch.nn.Linear(8, 8) for _ in range(2)]
    for model in (models[0], models[0], models[1]):
        context = get_act_offloading_ctx_manager(model, True, config=config, warn_if_no_head=False)
        with context:
            loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        context.end_step()
        begun.append(context.manager)
        assert context.manager.learner.num_searches == 1
        del context, loss
    assert begun[0] is begun[1] is not begun[2]


def test_a_new_configuration_is_a_new_run_and_a_new_manager_takes_the_loop_along():
    job = VirtualJob(0.1)
    loop = settled(job)
    job.manager.configure(job.manager.config.model_copy(), backend=job.backend)
    assert tune(job.manager) is loop
    job.moved_bytes.clear()
    job.step()
    assert (loop.is_converged, loop.plan) == (False, None)
    settled(job)
    assert loop.plan.moved_bytes > 0
    outer, PipelineOffloadManager.instance = PipelineOffloadManager.instance, job.manager
    try:
        PipelineOffloadManager.reset_instance()
        assert PipelineOffloadManager.get_instance().tuner is loop
        PipelineOffloadManager.get_instance().close()
    finally:
        PipelineOffloadManager.instance = outer
