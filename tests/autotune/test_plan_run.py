"""A run that plans from one of its own steps: every step a training step, every bit the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_gpus import FakeGpu, copy_little
from programs import (
    KIB,
    assert_nothing_left,
    assert_same,
    make_config,
    make_model,
    run_step,
)

from megatron_offload.autotune import agree
from megatron_offload.autotune.agree import JointChooser, agree_on_bandwidths
from megatron_offload.autotune.plan_run import check_plan, plan_run
from megatron_offload.core.machine import Machine, MachineConfig
from megatron_offload.core.profile import RunShape
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.observe.live_bytes import LiveActivationMeter
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.bandwidths import DEFAULTS, Bandwidths, simulated_machine
from megatron_offload.planning.schedule import make_schedule

ORDER = [(action, microbatch) for action in "FB" for microbatch in range(6)]
SCHEDULE = make_schedule("gpipe", 1, 6)
RUN = RunShape(num_microbatches=6)
FAST = {"node_gbps": 2.0, "d2h_gbps": 1.0, "h2d_gbps": 1.0, "both_gbps": 1.0}
UNSET = {"kind": "memory_target", "target_bytes": 100 * KIB, "measured_plans": 0}
TARGET = {**UNSET, "machine": FAST}


class Job:
    """A program whose steps are compared with those without offload."""

    def __init__(self, *, policy=None, **settings):
        self.policy = make_config(policy=policy).policy
        """What is planned by."""
        self.model = make_model(layers=4)
        self.expected = run_step(self.model, None, ORDER)
        config = make_config(max_inflight_bytes=None, prefetch_bytes=None, **settings)
        simulated = config.simulated.model_copy(update={"host_time": True, "d2h_gbps": 1.0})
        self.manager = PipelineOffloadManager(config.model_copy(update={"simulated": simulated}))
        self.manager.observers.append(LiveActivationMeter(self.model.parameters()))
        self.num_steps = 0

    def step(self):
        self.num_steps += 1
        assert_same(self.expected, run_step(self.model, self.manager, ORDER))
        assert_nothing_left(self.manager)

    def warmed_up(self):
        for _ in range(2):
            self.step()
        return self


@pytest.mark.parametrize("moves", [False, True])
def test_a_memory_target_is_planned_for_and_followed(moves):
    job = Job(policy=TARGET).warmed_up()
    plan = plan_run(job.manager, job.step, RUN, schedule=SCHEDULE, policy=job.policy, moves=moves)
    assert job.num_steps == 2 + 1
    rank = plan.ranks[0]
    assert 0 < rank.moved_bytes < rank.saved_bytes
    for _ in range(3):
        job.step()
        # What is needed too soon stays, whatever was planned.
        assert 0 < job.manager.last_step.offloaded_bytes <= rank.moved_bytes
        assert job.manager.learner.kept == rank.kept
        assert job.manager.budget.max_inflight_bytes == rank.max_inflight_bytes
        assert job.manager.budget.prefetch_bytes == rank.prefetch_bytes


def test_a_target_that_cannot_be_met_changes_nothing():
    job = Job(policy={**TARGET, "target_bytes": 1024}).warmed_up()
    moved_bytes = job.manager.last_step.offloaded_bytes
    with pytest.raises(TargetError, match="can't be brought under"):
        plan_run(job.manager, job.step, RUN, schedule=SCHEDULE, policy=job.policy)
    job.step()
    assert job.manager.last_step.offloaded_bytes == moved_bytes > 0


@pytest.mark.parametrize("policy", [None, {"kind": "ratio", "ratio": 0.5}])
def test_other_policies_plan_no_run(policy):
    job = Job(policy=policy)
    with pytest.raises(ConfigError, match="'memory_target' or 'auto', got "):
        plan_run(job.manager, job.step, RUN, schedule=SCHEDULE, policy=job.policy)
    assert job.num_steps == 0


def profiled(job):
    with profile_step(job.manager, run=RUN, moves=False) as recorded:
        job.step()
    return recorded.profile


def test_the_first_profile_of_each_pipeline_rank_counts(monkeypatch):
    job = Job(policy=TARGET).warmed_up()
    mine = profiled(job)
    plans = []
    for ranks in ([(mine, None)], [(mine, None), (replace(mine, step_us=1e9), 0)]):
        monkeypatch.setattr(agree, "gather", lambda _, group, ranks=ranks: ranks)
        chooser = JointChooser(job.manager, mine, job.policy, SCHEDULE, None)
        plans.append(chooser.ask(lambda each: each.under([100 * KIB])))
    assert plans[0] == plans[1]


# Bandwidths.


class GpuJob(Job):
    """The same on a device that passes for a GPU."""

    def __init__(self, gbps, **settings):
        super().__init__(**settings)
        config = self.manager.config
        self.manager = PipelineOffloadManager(config, backend=FakeGpu(gbps))
        self.manager.observers.append(LiveActivationMeter(self.model.parameters()))


@pytest.fixture(autouse=True)
def measured_quickly(monkeypatch):
    copy_little(monkeypatch)


def agreed(job, **keys):
    policy = make_config(policy={**UNSET, **keys}).policy
    return agree_on_bandwidths(job.manager, policy)


def test_a_run_plans_with_what_its_machine_gives(monkeypatch):
    made = []
    original = agree.job_of
    monkeypatch.setattr(
        agree, "job_of", lambda *given, **keys: made.append(original(*given, **keys)) or made[-1]
    )
    job = GpuJob(3.0, policy={**UNSET, "gpus_per_rank": 2}).warmed_up()
    plan = plan_run(job.manager, job.step, RUN, schedule=SCHEDULE, policy=job.policy)
    assert plan.bandwidths == "measured now, one GPU"
    machine = made[-1].machine
    assert made[-1].gpus_per_rank == 2
    assert (machine.d2h_gbps, machine.h2d_gbps) == (pytest.approx(3), pytest.approx(6))
    assert (machine.node_d2h_gbps, made[-1].ranks_per_node) == (None, 1)
    assert plan.ranks[0].moved_bytes > 0
    job.step()


@pytest.mark.parametrize(
    ("machine", "d2h_gbps", "origin"),
    [
        ("default", Machine().d2h_gbps, DEFAULTS),
        ({}, Machine().d2h_gbps, DEFAULTS),
        (FAST, 1.0, "the policy's section 'machine'"),
    ],
)
def test_a_section_machine_wins_and_nothing_is_measured(machine, d2h_gbps, origin):
    job = GpuJob(3.0)
    found = agreed(job, machine=machine)
    assert (found.machine.d2h_gbps, found.origin) == (d2h_gbps, origin)
    assert job.manager.backend.num_copies == 0


@pytest.mark.parametrize("setting", ["pin_memory", "copy_streams"])
def test_copies_that_are_slow_on_purpose_are_not_measured(caplog, setting):
    job = GpuJob(3.0, **{setting: False})
    found = agreed(job)
    assert found.machine == MachineConfig()
    assert found.origin == f"{DEFAULTS}; measuring failed: it needs copy_streams and pin_memory"
    assert found.origin in caplog.text
    assert job.manager.backend.num_copies == 0


def test_a_measurement_that_fails_leaves_the_defaults_and_says_so(caplog):
    job = GpuJob(3.0, policy=UNSET).warmed_up()
    job.manager.backend.pins = False
    plan = plan_run(job.manager, job.step, RUN, schedule=SCHEDULE, policy=job.policy)
    assert plan.bandwidths.startswith(f"{DEFAULTS}; measuring failed: rank 0: ")
    assert plan.bandwidths.endswith("pinning failed: out of memory")
    assert plan.bandwidths in caplog.text
    assert plan.ranks[0].moved_bytes > 0
    job.step()


def test_the_simulated_device_counts_as_it_says_it_is():
    job = Job(policy=UNSET).warmed_up()
    plan = plan_run(job.manager, job.step, RUN, schedule=SCHEDULE, policy=job.policy)
    assert plan.bandwidths == "the simulated device's own"
    simulated = job.manager.config.simulated
    assert agreed(job).machine == simulated_machine(simulated)
    assert simulated.d2h_gbps == 1.0


def test_bandwidths_that_are_given_are_taken():
    job = Job(policy=UNSET).warmed_up()
    given = Bandwidths(machine=MachineConfig(), gpus_per_rank=1, origin="a guess")
    check = check_plan(job.manager, profiled(job), job.policy, bandwidths=given, schedule=SCHEDULE)
    assert check.is_over
    assert check.plan.bandwidths == "a guess"
