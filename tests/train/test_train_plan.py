"""A run that plans: all ranks follow one plan from the step behind the profiled one on."""

from __future__ import annotations

import json
import re
import statistics

import pytest
from cli.jobs import load_run
from training_runs import numbers, run, words

from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.planning.bandwidths import DEFAULTS, load_bandwidths
from megatron_offload.planning.plan_file import load_plan
from megatron_offload.planning.profile_file import load_profile
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import read_steps

OFFLOAD = "offload.enabled=true"
TARGET = "offload.policy.kind=memory_target"


def train(output, *settings, **more):
    return run([*words(output, *settings)], **more)


def steps_of(output):
    return [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]


MEASURED = ("offload.policy.kind=auto",)

LONG = f"run.steps={1 + 4 * 7 + 5}"
"""Enough for every plan that there may be."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without offload; read-only."""
    output = tmp_path_factory.mktemp("plain")
    assert train(output, LONG)[0] == 0
    return output


@pytest.mark.slow
def test_a_target_is_kept_by_every_rank_and_no_bit_changes(plain, tmp_path):
    last = steps_of(plain)[-1]
    live_bytes = [rank["peak_live_activation_bytes"] for rank in last["ranks"]]
    target_bytes = int(0.9 * min(live_bytes))
    settings = (OFFLOAD, TARGET, f"offload.policy.target_bytes={target_bytes}")
    settings += ("offload.simulated.d2h_gbps=7.5", "run.profile_moves=true")
    status, errors = train(tmp_path, LONG, *settings)
    assert status == 0, errors
    assert numbers(tmp_path) == numbers(plain)
    plan = load_plan(tmp_path / "plan.json")
    assert plan.policy == "memory_target"
    assert plan.bandwidths == "the simulated device's own"
    assert load_bandwidths(tmp_path / "bandwidths.json").machine.d2h_gbps == 7.5
    source = load_run(tmp_path)
    assert source.machine == f"{tmp_path / 'bandwidths.json'}: the simulated device's own"
    assert source.job.machine.d2h_gbps == 7.5
    found = steps_of(tmp_path)
    assert [step["ranks"][0]["is_profiled"] for step in found].index(True) == 2
    wanted = f"at most {format_bytes(target_bytes, 2)} is wanted"
    assert re.search(rf"{wanted}(; an earlier plan is followed again)?: kept", errors), errors
    # With a step that moves something no step takes what it takes without offload.
    peaks = [[rank["peak_live_activation_bytes"] for rank in step["ranks"]] for step in found]
    most_bytes = [max(of_rank) for of_rank in zip(*peaks, strict=True)]
    assert all(most < live for most, live in zip(most_bytes, live_bytes, strict=True))
    settled = 3 + 4 * (1 + errors.count("planned again"))
    assert settled < len(found)
    for pp_rank, rank_plan in enumerate(plan.ranks):
        assert 0 < rank_plan.measured_peak_bytes <= target_bytes
        profile = load_profile(tmp_path / f"profile_{pp_rank}.json")
        plan.check(profile)
        for step in found[settled:]:
            rank = step["ranks"][pp_rank]
            assert 0 < rank["offloaded_bytes"] <= rank_plan.moved_bytes
            assert rank["peak_live_activation_bytes"] <= target_bytes


@pytest.mark.slow
def test_auto_is_measured_by_ordinary_steps_and_no_bit_changes(plain, tmp_path):
    # A limit that no machine is too busy to keep.
    policy = (*MEASURED, "offload.policy.most_slowdown_percent=1000")
    link = ("offload.simulated.d2h_gbps=1000", "offload.simulated.h2d_gbps=1000")
    traced = "run.trace_step=6"
    status, errors = train(tmp_path, LONG, OFFLOAD, *policy, *link, traced)
    assert status == 0, errors
    assert numbers(tmp_path) == numbers(plain)
    found, _ = read_steps(tmp_path)
    # The third is profiled; behind it one of each kind, the traced one, and three pairs.
    measured = [step.step for step in found if step.measured_step_us is not None]
    assert measured == [4, 5, *range(7, 13)]
    for step in found:
        assert all(
            (rank.measured_step_us is None) == (step.step not in measured) for rank in step.ranks
        )
        moves = step.step not in (3, 4, 7, 9, 11)
        assert all((rank.offloaded_bytes > 0) == moves for rank in step.ranks), step.step
    usual = [step.step for step in found if step.is_usual]
    assert usual == [1, 2, 6, *range(13, len(found) + 1)]
    cost = load_plan(tmp_path / "plan.json").measured
    times = {step.step: step.measured_step_us for step in found}
    assert cost.without_us == statistics.median(times[step] for step in (7, 9, 11))
    assert cost.with_us == statistics.median(times[step] for step in (8, 10, 12))
    assert times[8] == max(rank.measured_step_us for rank in found[7].ranks)
    assert cost.num_pairs == 3
    assert f"the plan costs {cost}, at most 1000 % is wanted: kept" in errors


@pytest.mark.slow
def test_where_no_plan_is_fast_enough_every_rank_moves_nothing_in_the_end(plain, tmp_path):
    # A link on which a single byte takes longer than any step.
    planned = [f"offload.policy.machine.{key}_gbps=1000" for key in ("d2h", "h2d", "both", "node")]
    link = ("offload.simulated.d2h_gbps=1e-9", "offload.simulated.h2d_gbps=1e-9")
    status, errors = train(tmp_path, LONG, OFFLOAD, *MEASURED, *planned, *link)
    assert status == 0, errors
    assert numbers(tmp_path) == numbers(plain)
    found, _ = read_steps(tmp_path)
    measured = [step for step in found if step.measured_step_us is not None]
    assert len(measured) in (8 + 7 * number for number in range(4))
    assert any(rank.offloaded_bytes for rank in measured[-1].ranks)
    assert not any(
        rank.offloaded_bytes for step in found[3 + len(measured) :] for rank in step.ranks
    )
    plan = load_plan(tmp_path / "plan.json")
    assert (plan.moved_bytes, plan.measured) == (0, None)
    reasons = {choice.reason for rank in plan.ranks for choice in rank.choices}
    assert any(reason.startswith("moving costs too much time: +") for reason in reasons)
    assert "nothing moves from here on: no plan was fast enough" in errors


@pytest.mark.slow
def test_a_target_that_cannot_be_met_ends_the_run_on_all_ranks(tmp_path):
    settings = (OFFLOAD, TARGET, "offload.policy.target_bytes=1KiB")
    status, errors = train(tmp_path, *settings, "offload.policy.machine=default")
    assert status == 1
    assert "can't be brought under" in errors
    assert not (tmp_path / "plan.json").exists()
    assert load_bandwidths(tmp_path / "bandwidths.json").origin == DEFAULTS


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"steps": 3}, "run.profile_step 3 does not come before the last of 3"),
        ({"steps": 6, "profile_moves": True}, "'auto' plans from a step that moves nothing"),
        ({"steps": 2}, "run.profile_step 3 does not come before the last of 2"),
    ],
)
def test_settings_that_leave_nothing_to_plan_from_are_refused(run, message):
    policy = {"kind": "auto"}
    data = {"run": run, "offload": {"policy": policy}}
    with pytest.raises(ConfigError, match=message):
        validate(TrainConfig, data, "test")
    validate(TrainConfig, data | {"offload": {"enabled": False, "policy": policy}}, "test")
