"""Plans as data and as files, and the runs that they are refused for."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from problems import profiles, random_profile

from megatron_offload.core.policy_config import RatioConfig
from megatron_offload.core.profile import GroupKey
from megatron_offload.errors import ConfigError
from megatron_offload.planning.files import PLANS, load_plan, save_plan
from megatron_offload.planning.plan import (
    MeasuredCost,
    OffloadPlan,
    check_profiles,
    rank_plan,
)
from megatron_offload.planning.policy import plan_by_rule

PROFILES = profiles(ranks=2, virtual=2, microbatches=4)
PLAN = plan_by_rule(RatioConfig(kind="ratio", ratio=0.5), PROFILES)


def random_plan(rng):
    ranks = [
        rank_plan(
            profile,
            {group.key: "<why>" for group in profile.groups if rng.random() < 0.5},
            "moves",
            max_inflight_bytes=rng.choice([None, rng.randrange(2**62)]),
            prefetch_bytes=rng.choice([None, rng.randrange(2**62)]),
            predicted_peak_bytes=rng.choice([None, rng.randrange(2**62)]),
            predicted_step_us=rng.choice([None, rng.uniform(0, 1e12)]),
        )
        for profile in (random_profile(rng) for _ in range(rng.randint(1, 4)))
    ]
    sizes = rng.randint(1, 99), rng.randint(1, 4)
    measured = rng.choice([None, MeasuredCost(rng.uniform(0, 1e9), rng.uniform(0, 1e9))])
    return OffloadPlan("auto", *sizes, tuple(ranks), rng.choice(["", "measured <now>"]), measured)


def test_plans_survive_json(tmp_path):
    for seed in range(300):
        plan = random_plan(random.Random(seed))
        again = PLANS.parse(PLANS.to_json(plan), "it")
        assert again == plan, seed
        assert PLANS.to_json(again) == PLANS.to_json(plan)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_every_group_has_a_choice_and_a_reason():
    for profile, rank in zip(PROFILES, PLAN.ranks, strict=True):
        assert [choice.key for choice in rank.choices] == [group.key for group in profile.groups]
        assert all(choice.reason for choice in rank.choices)
        assert set(rank.kept) == {choice.key for choice in rank.choices if not choice.moves}
        assert 0 < rank.moved_bytes < rank.saved_bytes


def test_groups_without_bytes_are_kept():
    profile = PROFILES[0]
    empty = profile.groups[0]._replace(num_bytes=0)
    plan = rank_plan(replace(profile, groups=(empty, *profile.groups[1:])), {}, "moves")
    assert list(plan.kept) == [empty.key]
    assert "nothing" in plan.kept[empty.key]


def with_group(profile, index, **changes):
    groups = list(profile.groups)
    groups[index] = groups[index]._replace(**changes)
    return replace(profile, groups=tuple(groups))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: replace(p, run=p.run._replace(num_microbatches=8)),
            "for 4 microbatches, and there are 8",
        ),
        (
            lambda p: replace(p, run=p.run._replace(pp_size=4)),
            "for 2 pipeline ranks, and there are 4",
        ),
        (
            lambda p: replace(p, run=p.run._replace(vp_size=1)),
            "for 2 virtual stages, and there are 1",
        ),
        (
            lambda p: with_group(p, 3, num_bytes=77),
            r"group 3 of pipeline rank 1 is 'mlp_fc1' \(chunk 0, 335544320 bytes\) in the plan and "
            r"'mlp_fc1' \(chunk 0, 77 bytes\) in the run",
        ),
        (
            lambda p: with_group(with_group(p, 4, name="other"), 5, name="later"),
            r"group 4 .* is 'mlp_act' .* in the plan and 'other'",
        ),
        (lambda p: with_group(p, 0, key=GroupKey(7, 0)), r"group 0 .*\(chunk 0.*\(chunk 7"),
        (lambda p: replace(p, groups=p.groups[:-1]), "group 39 .* and missing in the run"),
        (
            lambda p: replace(p, groups=(*p.groups, p.groups[0])),
            "group 40 .* is missing in the plan",
        ),
    ],
)
def test_another_run_is_refused_and_the_difference_named(change, message):
    with pytest.raises(ConfigError, match=message):
        PLAN.check(change(PROFILES[1]))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([], "got none"),
        ([0], "got those of 0"),
        ([0, 1, 1], "got those of 0, 1, 1"),
        ([1], "got those of 1"),
    ],
)
def test_a_plan_needs_one_profile_of_each_rank(chosen, message):
    with pytest.raises(ConfigError, match=message):
        check_profiles([PROFILES[index] for index in chosen])


def test_profiles_come_in_any_order_but_from_one_run():
    assert check_profiles(PROFILES[::-1]) == tuple(PROFILES)
    other = replace(PROFILES[1], run=PROFILES[1].run._replace(num_microbatches=8))
    with pytest.raises(ConfigError, match="of different runs"):
        check_profiles([PROFILES[0], other])


COST = MeasuredCost(101.0, 1.5)._asdict()


def changed(change):
    data = json.loads(PLANS.to_json(PLAN))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["ranks"][1].update(prefech_bytes=3), "did you mean 'prefetch_bytes'"),
        (lambda d: d["ranks"][0]["choices"][0].update(moves="keep"), "valid boolean"),
        (lambda d: d["ranks"][0]["choices"][0]["key"].update(order=1), "one key"),
        (lambda d: d["ranks"].clear(), "'ranks'"),
        (lambda d: d.update(version=1), "'version'"),
        (lambda d: d.update(vp_size=0), "'vp_size'"),
        (lambda d: d.update(bandwidths=3), "'bandwidths'"),
        (lambda d: d.update(measured={**COST, "step_us": "fast"}), "step_us'"),
        (lambda d: d.update(measured={**COST, "lost_us": -1.0}), "lost_us'"),
        (lambda d: d.update(measured={**COST, "num_steps": 0}), "num_steps'"),
        (lambda d: d["ranks"][0].update(predicted_step_us="fast"), "'ranks.0.predicted_step_us'"),
    ],
)
def test_a_file_changed_by_hand_is_refused_unless_it_is_a_choice(change, message):
    with pytest.raises(ConfigError, match=message):
        PLANS.parse(changed(change), "it")


def test_a_choice_may_be_changed_by_hand():
    plan = PLANS.parse(changed(lambda d: d["ranks"][0]["choices"][0].update(moves=False)), "it")
    assert plan.ranks[0].choices[0].key in plan.ranks[0].kept


@pytest.mark.parametrize("percent", [-3, -1, 1, 3])
def test_sizes_may_differ_a_little_as_what_is_shared_depends_on_what_moves(percent):
    profile = PROFILES[1]
    total_bytes = sum(group.saved_bytes for group in profile.groups)
    largest = max(range(len(profile.groups)), key=lambda i: profile.groups[i].num_bytes)
    num_bytes = profile.groups[largest].num_bytes + total_bytes * percent // 100
    other = with_group(profile, largest, num_bytes=num_bytes)
    if abs(percent) < 2:
        PLAN.check(other)
    else:
        with pytest.raises(ConfigError, match=f"group {largest} of pipeline rank 1"):
            PLAN.check(other)
