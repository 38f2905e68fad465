"""A run that plans: all ranks follow one plan from the step behind the profiled one on."""

from __future__ import annotations

import json

import pytest
from training_runs import numbers, run, words

from megatron_offload.commands.source import load_run
from megatron_offload.config import validate
from megatron_offload.errors import ConfigError
from megatron_offload.planning.bandwidths import DEFAULTS, load_bandwidths
from megatron_offload.planning.plan import load_plan
from megatron_offload.planning.profile_file import load_profile
from megatron_offload.train.config import TrainConfig

OFFLOAD = "offload.enabled=true"
TARGET = "offload.policy.kind=memory_target"


def train(output, *settings, **more):
    return run([*words(output, *settings)], **more)


def steps_of(output):
    return [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]


def test_a_target_is_kept_by_every_rank_and_no_bit_changes(tmp_path):
    plain, planned = tmp_path / "plain", tmp_path / "planned"
    assert train(plain)[0] == 0
    last = steps_of(plain)[-1]
    live_bytes = [rank["peak_live_activation_bytes"] for rank in last["ranks"]]
    target_bytes = int(0.8 * min(live_bytes))
    settings = (OFFLOAD, TARGET, f"offload.policy.target_bytes={target_bytes}")
    settings += ("offload.simulated.d2h_gbps=7.5",)
    status, errors = train(planned, *settings)
    assert status == 0, errors
    assert numbers(planned) == numbers(plain)
    found = steps_of(planned)
    plan = load_plan(planned / "plan.json")
    assert plan.policy == "memory_target"
    assert plan.bandwidths == "the simulated device's own"
    assert load_bandwidths(planned / "bandwidths.json").machine.d2h_gbps == 7.5
    source = load_run(planned)
    assert source.machine == f"{planned / 'bandwidths.json'}: the simulated device's own"
    assert source.job.machine.d2h_gbps == 7.5
    assert [step["ranks"][0]["is_profiled"] for step in found].index(True) == 2
    for pp_rank, rank_plan in enumerate(plan.ranks):
        profile = load_profile(planned / f"profile_{pp_rank}.json")
        plan.check(profile)
        for step in found[3:]:
            rank = step["ranks"][pp_rank]
            assert 0 < rank["offloaded_bytes"] <= rank_plan.moved_bytes
            assert rank["peak_live_activation_bytes"] <= target_bytes


def test_a_target_that_cannot_be_met_ends_the_run_on_all_ranks(tmp_path):
    settings = (OFFLOAD, TARGET, "offload.policy.target_bytes=1")
    status, errors = train(tmp_path, *settings, "offload.policy.machine=default")
    assert status == 1
    assert "can't be brought under" in errors
    assert not (tmp_path / "plan.json").exists()
    assert load_bandwidths(tmp_path / "bandwidths.json").origin == DEFAULTS
    assert train(tmp_path, "run.steps=1")[0] == 0
    assert not (tmp_path / "bandwidths.json").exists(), "another run's"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"steps": 3}, "run.profile_step 3 does not come before the last of 3"),
        ({"steps": 6, "profile_moves": True}, "plans from a step that moves nothing"),
        ({"steps": 2}, "run.profile_step 3 does not come before the last of 2"),
    ],
)
def test_settings_that_leave_nothing_to_plan_from_are_refused(run, message):
    policy = {"kind": "auto"}
    data = {"run": run, "offload": {"enabled": True, "policy": policy}}
    with pytest.raises(ConfigError, match=message):
        validate(TrainConfig, data, "test")
    validate(TrainConfig, data | {"offload": {"policy": policy}}, "test")
