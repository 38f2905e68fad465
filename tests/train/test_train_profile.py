"""A profiled step changes no bit, and what every rank writes says how long a step takes."""

from __future__ import annotations

import json

import pytest
import torch
from training_runs import numbers, run, words

from megatron_offload.core.machine import Machine
from megatron_offload.core.trace import ByteCount, read_traces
from megatron_offload.planning.files import load_profile
from megatron_offload.planning.profiled_job import job_from_profiles, measured_peak_bytes
from megatron_offload.planning.schedule import make_schedule
from megatron_offload.planning.simulate import simulate
from megatron_offload.train.records import read_steps

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the bridges to a CPU are for machines without a CUDA device"
)

ONE_RANK = ("parallel.pipeline=1", "parallel.virtual=1", "run.steps=5", "offload.enabled=true")


def test_a_profiled_step_is_bitwise_identical_and_moves_what_others_move(train, tmp_path):
    train(tmp_path / "plain")
    train(tmp_path / "profiled", "run.profile_step=3", "offload.policy.kind=modules")
    assert numbers(tmp_path / "profiled") == numbers(tmp_path / "plain")
    assert not list((tmp_path / "plain").glob("profile_*"))
    steps = [record.ranks[0] for record in read_steps(tmp_path / "profiled")]
    assert [step.is_profiled for step in steps] == [False, False, True, False, False]
    assert steps[2].offloaded_bytes == steps[3].offloaded_bytes == steps[4].offloaded_bytes > 0
    profile = load_profile(tmp_path / "profiled/profile_0.json")
    assert profile.d2h_gbps > 0
    assert profile.offloaded_bytes == steps[2].offloaded_bytes
    kept_bytes = sum(group.kept_bytes for group in steps[4].groups)
    movable_bytes = sum(group.num_bytes for group in profile.groups)
    assert movable_bytes == steps[4].offloaded_bytes + kept_bytes
    assert (profile.run.num_microbatches, profile.run.pp_size, profile.run.vp_size) == (2, 1, 1)
    assert profile.run.modules == ("core_attn", "mlp_act")
    assert torch.__version__.startswith(dict(profile.run.versions)["torch"])  # +cu130 may follow
    # The step without its optimizer, which a busy machine may delay: no other unit fits.
    assert 0.002 < profile.step_us / (1e6 * steps[2].step_time_s) < 1
    # It is reported as if nothing had moved; the run's own count of the peak is not lost.
    assert measured_peak_bytes(profile) > steps[2].peak_live_activation_bytes > 0
    assert steps[2].peak_live_activation_bytes == steps[4].peak_live_activation_bytes


@pytest.mark.slow  # how soon it settles goes by the machine's own time
def test_a_run_that_ends_before_it_has_converged_says_so(train, tmp_path, capsys):
    policy = "offload.policy={kind: auto, most_slowdown_percent: 1000}"
    train(tmp_path, policy, "run.steps=3", "run.profile_step=0")
    steps = [record.ranks[0] for record in read_steps(tmp_path)]
    assert any(step.is_planned_by for step in steps)
    assert all(step.offloaded_bytes == 0 for step in steps[:2]), "all is kept that has room"
    assert "the run ended before it had found its rows" in capsys.readouterr().err
    assert not (tmp_path / "frontier.json").exists()


@pytest.mark.slow
def test_the_profiles_of_two_ranks_can_be_planned_and_simulated_with(tmp_path):
    settings = ("parallel.virtual=1", "data.microbatches=6", "run.steps=5", "run.profile_step=4")
    settings = (*settings, "offload.enabled=true", "offload.policy.kind=modules")
    status, errors = run(words(tmp_path, *settings))
    assert status == 0, errors
    profiles = [load_profile(tmp_path / f"profile_{rank}.json") for rank in range(2)]
    assert [profile.run.pp_rank for profile in profiles] == [0, 1]
    for profile in profiles:
        assert 0 < profile.peak_allocated_bytes <= profile.peak_reserved_bytes
        assert len(profile.groups) == 6 * 2 * 2
    job = job_from_profiles(profiles, make_schedule("1f1b", 2, 6), Machine())
    simulation = simulate(job)
    # Whatever else the machine does delays single microbatches, of which the median is taken. How
    # close it comes on a machine of one's own is held on the virtual clock.
    measured_us = max(profile.step_us for profile in profiles)
    assert 0.02 * measured_us < simulation.step_us < 1.1 * measured_us
    for rank, profile in zip(simulation.ranks, profiles, strict=True):
        assert rank.peak_device_bytes <= measured_peak_bytes(profile)


def test_a_traced_step_is_bitwise_identical_and_is_the_one_that_was_asked_for(train, tmp_path):
    train(tmp_path / "plain")
    train(tmp_path / "traced", "run.trace_step=3")
    assert numbers(tmp_path / "traced") == numbers(tmp_path / "plain")
    assert not list((tmp_path / "plain").glob("trace_*"))
    trace = read_traces(tmp_path / "traced/trace_0.json")[0]
    lines = (tmp_path / "traced/steps.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    (rank,) = steps[2]["ranks"]
    assert trace.num_bytes["d2h"] == rank["offloaded_bytes"] > 0
    assert trace.num_bytes["h2d"] == rank["reloaded_bytes"]
    kinds = {span.kind for span in trace.of("compute")}
    assert {"forward", "backward", "other"} <= kinds
    assert {ByteCount.LIVE, ByteCount.HELD} <= {counter.name for counter in trace.counters}
    # Virtual copies beside real compute, in the same unit as the clock on the wall; the optimizer's
    # part, which isn't traced, is long on a busy machine.
    measured_us = 1e6 * steps[2]["step_time_s"]
    assert 0.002 * measured_us < trace.duration_us < 1.5 * measured_us


def test_a_short_run_traces_its_last_step(train, tmp_path):
    train(tmp_path, "run.trace_step=100", "run.steps=2", "offload.fraction=0.5")
    last = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
    trace = read_traces(tmp_path / "trace_0.json")[0]
    assert trace.num_bytes["d2h"] == last["ranks"][0]["offloaded_bytes"] > 0


def test_a_new_run_leaves_nothing_of_an_earlier_one(train, tmp_path):
    mine = ("profile_x.json", "trace_x.json")
    earlier = ("profile_0.json", "profile_7.json", "trace_0.json", "frontier.json")
    for name in (*earlier, *mine):
        (tmp_path / name).write_text("old")
    train(tmp_path, "run.steps=1", "offload.enabled=false")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "config.yaml",
        "profile_x.json",
        "run.json",
        "steps.jsonl",
        "trace_x.json",
    ]
