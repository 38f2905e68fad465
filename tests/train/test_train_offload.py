"""What a run does with its plan from the profiled step on, on the virtual clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from programs import KIB, make_config
from virtual_clock import RUN, VirtualJob

from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.bandwidths import load_bandwidths
from megatron_offload.planning.plan_file import load_plan
from megatron_offload.train.offload import OffloadSession

AUTO = {"kind": "auto", "measured_plans": 1}
TARGET = {"kind": "memory_target", "target_bytes": 190 * KIB, "measured_plans": 1}


class Rig:
    """A run of one rank, taken step by step."""

    def __init__(self, output, policy, rank=0):
        self.job = VirtualJob(1.0).warmed_up()
        self.config = SimpleNamespace(run=SimpleNamespace(output=output), plans=True)
        self.parallel = SimpleNamespace(is_owner=rank == 0, host_group=None)
        self.session = OffloadSession(self.job.manager, make_config(policy=policy).policy)
        self.texts = []

    def profile(self):
        with profile_step(self.job.manager, run=RUN, moves=False) as recorded:
            self.job.step()
        self.session.plan(recorded.profile, self.parallel, self.config)
        assert self.session.look_back() == ""

    def step(self):
        """Take a step; return whether it was measured, and whether it moved anything."""
        with self.session.looking() as measured:
            self.job.step()
        self.texts += filter(None, [self.session.look_back()])
        return measured is not None, self.job.moved_bytes[-1] > 0


@pytest.mark.parametrize(
    ("policy", "steps"),
    [(AUTO, [(True, False), (True, True)] * 4), (TARGET, [(True, True)] * 4)],
)
def test_a_plan_is_measured_and_its_file_follows(tmp_path, policy, steps):
    rig = Rig(tmp_path, policy)
    assert not rig.session.is_planning
    assert rig.step() == (False, True), "before there is a plan nobody looks"
    rig.profile()
    assert load_bandwidths(tmp_path / "bandwidths.json").machine.d2h_gbps == 1.0
    plan = load_plan(tmp_path / "plan.json")
    assert (plan.measured, plan.ranks[0].measured_peak_bytes) == (None, None)
    for step in steps:
        assert rig.session.is_planning
        assert rig.step() == step
    assert not rig.session.is_planning
    plan = load_plan(tmp_path / "plan.json")
    assert plan.measured or plan.ranks[0].measured_peak_bytes
    (text,) = rig.texts
    assert text.endswith(" is wanted: kept")
    assert rig.step() == (False, True)
    assert len(rig.texts) == 1


def test_a_step_that_was_not_looked_at_measures_nothing(tmp_path):
    rig = Rig(tmp_path, TARGET)
    rig.profile()
    rig.job.step()
    assert rig.session.look_back() == ""
    for _ in range(4):
        assert rig.session.is_planning
        rig.step()
    assert not rig.session.is_planning


def test_only_the_first_rank_writes_files(tmp_path):
    rig = Rig(tmp_path, AUTO, rank=1)
    rig.profile()
    while rig.session.is_planning:
        rig.step()
    assert list(tmp_path.iterdir()) == []
