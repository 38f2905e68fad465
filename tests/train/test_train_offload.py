"""What a run does with its plan from the profiled step on, on the virtual clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from programs import make_config
from virtual_clock import RUN, VirtualJob

from megatron_offload.autotune import distances as distance_check
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.bandwidths import load_bandwidths
from megatron_offload.planning.plan import Distances
from megatron_offload.planning.plan_file import load_plan
from megatron_offload.train.offload import OffloadSession, PlannedRun

AUTO = {"kind": "auto", "correction_steps": 2, "measured_steps": 1}


class Search:
    """Finds these distances, whatever the steps show."""

    best = Distances(30_000, 20_000)
    is_frozen = False

    def __init__(self, *_):
        pass

    def follow(self, seen):
        return Distances(20_000, 20_000)


class Rig:
    """A run of one rank, taken step by step."""

    def __init__(self, output, rank=0, **policy):
        self.output = output
        self.job = VirtualJob(1.0).warmed_up()
        config = SimpleNamespace(run=SimpleNamespace(output=output), plans=True)
        parallel = SimpleNamespace(is_owner=rank == 0, host_group=None)
        self.planned = PlannedRun(
            config,
            parallel,
            OffloadSession(self.job.manager, make_config(policy={**AUTO, **policy}).policy),
        )
        self.texts = []

    def profile(self):
        with profile_step(self.job.manager, run=RUN, moves=False) as recorded:
            self.job.step()
        self.planned.take(recorded.profile)
        assert self.planned.look_back() == ""

    def step(self):
        """Take a step; return whether it was measured, and whether it moved anything."""
        with self.planned.looking() as timed:
            self.job.step()
        self.texts += filter(None, [self.planned.look_back()])
        return timed is not None, self.job.moved_bytes[-1] > 0

    def distances(self):
        rank = load_plan(self.output / "plan.json").ranks[0]
        return rank.max_inflight_bytes, rank.prefetch_bytes

    def in_force(self):
        budget = self.job.manager.budget
        return budget.max_inflight_bytes, budget.prefetch_bytes


def test_the_plan_is_corrected_then_measured_and_its_file_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(distance_check, "Adaptation", Search)
    rig = Rig(tmp_path)
    assert not rig.planned.is_open
    assert rig.step() == (False, True), "before there is a plan nobody looks"
    rig.profile()
    assert rig.planned.is_open
    assert load_bandwidths(tmp_path / "bandwidths.json").machine.d2h_gbps == 1.0
    planned = rig.distances()
    assert planned == rig.in_force() != Search.best
    assert [rig.step() for _ in range(3)] == [(False, True)] * 3
    assert rig.texts == ["distances corrected on pipeline ranks 0"]
    assert rig.distances() == rig.in_force() == Search.best
    assert load_plan(tmp_path / "plan.json").measured is None
    assert rig.planned.is_open
    assert [rig.step() for _ in range(4)] == [(True, False), (True, True)] * 2
    assert not rig.planned.is_open
    plan = load_plan(tmp_path / "plan.json")
    said = f"the plan costs {plan.measured}, at most 0.5 % is wanted: kept"
    assert rig.texts[1:] == [said]
    assert rig.distances() == rig.in_force() == Search.best
    assert rig.step() == (False, True)
    assert len(rig.texts) == 2


def test_a_correction_that_changes_nothing_is_no_news(tmp_path):
    rig = Rig(tmp_path, measured_steps=0, correction_steps=4)
    rig.profile()
    planned = rig.distances()
    for number in range(5):
        assert rig.planned.is_open, number
        rig.step()
    assert not rig.planned.is_open
    assert rig.texts == []
    assert rig.distances() == rig.in_force() == planned


@pytest.mark.parametrize("keys", [{"correction_steps": 0}, {"prefetch_bytes": "20KiB"}])
def test_without_a_correction_the_plan_is_measured_at_once(tmp_path, keys):
    rig = Rig(tmp_path, **keys)
    rig.profile()
    assert rig.step() == (True, False)


def test_only_the_first_rank_writes_files(tmp_path):
    rig = Rig(tmp_path, rank=1)
    rig.profile()
    while rig.planned.is_open:
        rig.step()
    assert list(tmp_path.iterdir()) == []
