"""A plan decides from the first step on, for the run that it was made for and for no other."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from programs import (
    KIB,
    TIMINGS,
    assert_nothing_left,
    assert_same,
    check_steps,
    in_group,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)

from megatron_offload.core.policy_config import RatioConfig
from megatron_offload.core.profile import RunShape
from megatron_offload.errors import ConfigError
from megatron_offload.observe.recorder import profile_step
from megatron_offload.planning.files import save_plan
from megatron_offload.planning.plan import OffloadPlan, RankPlan, UnitChoice
from megatron_offload.planning.policy import plan_by_rule
from megatron_offload.recompute.recipes import recomputable

ORDER = one_forward_one_backward(4, depth=3)


def make_profile(model, order=ORDER):
    manager = make_manager()
    for _ in range(3):  # by then it is known what something else keeps
        run_step(model, manager, order)
    return replace(manager.last_profile, run=RunShape(num_microbatches=4))


def make_plan(model, *, share=0.5, num_ranks=1, **limits):
    """Return a plan that moves a share of the bytes, on the last of some pipeline ranks."""
    plan = plan_by_rule(RatioConfig(kind="ratio", ratio=share), [make_profile(model)])
    ranks = (RankPlan(()),) * (num_ranks - 1) + (replace(plan.ranks[0], **limits),)
    return OffloadPlan(plan.policy, plan.num_microbatches, plan.vp_size, ranks)


def make_follower(plan, path, timing="late", **settings):
    save_plan(plan, path)
    return make_manager(timing, policy={"kind": "plan_file", "path": str(path)}, **settings)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_exactly_the_planned_groups_move_from_the_first_step_on(share, timing, tmp_path):
    model = make_model()
    plan = make_plan(model, share=share)
    manager = make_follower(plan, tmp_path / "plan.json", timing)
    # What something else keeps isn't known in the first step.
    moved_bytes = sum(c.identity[2] for c in plan.ranks[0].choices if c.moves)
    for _ in range(3):
        check_steps(model, manager, ORDER)
        assert manager.last_step.offloaded_bytes == moved_bytes
        moved_bytes = plan.ranks[0].moved_bytes
        reasons = {r for g in manager.last_step.by_name.values() for r in g.kept_bytes_by_reason}
        assert reasons == set(plan.ranks[0].kept.values())
        assert_nothing_left(manager)


def test_a_plan_wins_over_the_fraction_of_the_caller(tmp_path):
    model = make_model()
    plan = make_plan(model)
    manager = make_follower(plan, tmp_path / "plan.json")
    manager.begin_chunk(fraction=0.0)
    for _ in range(2):
        run_step(model, manager, ORDER)
    assert manager.last_step.offloaded_bytes == plan.ranks[0].moved_bytes > 0


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, (24 * KIB, 40 * KIB)),
        ({"max_inflight_bytes": 8 * KIB}, (8 * KIB, 40 * KIB)),
        ({"max_inflight_bytes": 8 * KIB, "prefetch_bytes": 16 * KIB}, (8 * KIB, 16 * KIB)),
    ],
)
def test_the_limits_that_the_user_set_go_over_a_plans(tmp_path, user, expected):
    model = make_model()
    plan = make_plan(model, max_inflight_bytes=24 * KIB, prefetch_bytes=40 * KIB)
    limits = {"max_inflight_bytes": None, "prefetch_bytes": None, **user}
    manager = make_follower(plan, tmp_path / "plan.json", **limits)
    for _ in range(3):
        run_step(model, manager, ORDER)
        assert (manager.budget.max_inflight_bytes, manager.budget.prefetch_bytes) == expected


def test_a_plan_for_another_run_is_refused_after_its_first_step(tmp_path):
    model = make_model()
    manager = make_follower(make_plan(model), tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"another run: group 24 .* is missing in the plan"):
        run_step(model, manager, one_forward_one_backward(5, depth=3))
    wider = make_follower(make_plan(make_model(width=64)), tmp_path / "wider.json")
    with pytest.raises(ConfigError, match=r"group 0 of pipeline rank 0 is '\w+' .* in the plan"):
        run_step(model, wider, ORDER)


def test_a_later_step_of_another_shape_is_only_warned_of(tmp_path, caplog):
    model = make_model()
    manager = make_follower(make_plan(model), tmp_path / "plan.json")
    other = one_forward_one_backward(5, depth=3)
    expected, expected_other = run_step(model, None, ORDER), run_step(model, None, other)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(expected, run_step(model, manager, ORDER))
            assert_same(expected_other, run_step(model, manager, other))
    warnings = [r.getMessage() for r in caplog.records if "planned for" in r.getMessage()]
    assert len(warnings) == 1
    assert "group 24 of pipeline rank 0 is missing in the plan" in warnings[0]


def test_a_rank_follows_its_own_part(tmp_path):
    model = make_model()
    plan = make_plan(model, num_ranks=3)
    manager = make_follower(plan, tmp_path / "plan.json")
    begin_chunk = manager.begin_chunk
    manager.begin_chunk = lambda: begin_chunk(pp_rank=2)
    for _ in range(2):
        run_step(model, manager, ORDER)
    assert manager.last_step.offloaded_bytes == plan.ranks[2].moved_bytes
    with pytest.raises(ConfigError, match="for 3 pipeline ranks, and this is rank 3"):
        begin_chunk(pp_rank=3)


def test_a_plan_outlives_a_failed_step(tmp_path):
    model = make_model()
    plan = make_plan(model)
    manager = make_follower(plan, tmp_path / "plan.json")
    run_step(model, manager, ORDER)
    manager.begin_chunk()
    manager.guard.fail()  # as an error in the middle of a call does
    manager.abort()
    assert manager.learner.kept == plan.ranks[0].kept
    for _ in range(2):
        run_step(model, manager, ORDER)
    assert manager.last_step.offloaded_bytes == plan.ranks[0].moved_bytes


def test_a_plan_can_be_taken_up_in_the_middle(tmp_path):
    model = make_model()
    manager = make_manager()
    for _ in range(2):
        run_step(model, manager, ORDER)
    everything = manager.last_step.offloaded_bytes
    plan = make_plan(model)
    manager.follow_plan(plan)
    check_steps(model, manager, ORDER)
    assert manager.last_step.offloaded_bytes == plan.ranks[0].moved_bytes < everything


def test_a_share_of_the_bytes_moves():
    model = make_model()
    manager = make_manager(policy={"kind": "ratio", "ratio": 0.3})
    run_step(model, manager, ORDER)
    for _ in range(2):
        check_steps(model, manager, ORDER)
        profile = manager.last_profile
        total = sum(group.num_bytes for group in profile.groups)
        largest = max(group.num_bytes for group in profile.groups)
        assert 0.3 * total - largest < manager.last_step.offloaded_bytes <= 0.3 * total


def test_what_two_groups_share_makes_no_other_run_of_it():
    # Where the first of them stays, the second one counts and moves what they share.
    shared = torch.randn(64, 64)

    def step(manager):
        manager.begin_chunk()
        losses = []
        for name in ("first", "second"):
            x = torch.zeros(64, 64, requires_grad=True)
            losses.append(in_group(manager, lambda x: x * shared, x, name).sum())
        del x
        sum(losses).backward()
        manager.reset()

    recorder = make_manager()
    with profile_step(recorder, run=RunShape(), moves=False) as recorded:
        step(recorder)
    plan = plan_by_rule(RatioConfig(kind="ratio", ratio=1.0), [recorded.profile])
    choices = [c._replace(moves=c.name == "second") for c in plan.ranks[0].choices]
    ranks = (replace(plan.ranks[0], choices=tuple(choices)),)
    manager = make_manager()
    manager.follow_plan(replace(plan, ranks=ranks))
    for _ in range(3):
        step(manager)
        assert_nothing_left(manager)


def test_a_few_bytes_more_or_less_make_no_other_run_of_it():
    model = make_model()
    plan, profile = make_plan(model), make_profile(model)
    total, (first, *others) = sum(g.num_bytes for g in profile.groups), profile.groups

    def with_more(num_bytes):
        more = first._replace(num_bytes=first.num_bytes + num_bytes)
        return replace(profile, groups=(more, *others))

    plan.check(with_more(total // 60))
    with pytest.raises(ConfigError, match="group 0 of pipeline rank 0"):
        plan.check(with_more(total // 40))


def recomputing_step(manager):
    """Take a step of two virtual stages, each with the units 'norm' and 'act'; return its loss."""
    with manager.step():
        loss = 0.0
        for vp_stage in range(2):
            manager.begin_chunk(vp_stage=vp_stage)
            x = torch.linspace(0, 1, 8 * KIB).requires_grad_() * 1.0

            def body(x):
                y = recomputable(torch.sin, x, unit="norm", manager=manager)
                return (
                    (y * y * x).exp() * recomputable(torch.cos, x, unit="act", manager=manager) * x
                )

            loss = loss + in_group(manager, body, x, f"stage {vp_stage}").sum()
        loss.backward()
    return loss.item()


def test_each_virtual_stage_recomputes_what_the_plan_says(tmp_path):
    manager = make_manager()
    for _ in range(3):
        recomputing_step(manager)
    run = RunShape(num_microbatches=1, vp_size=2)
    profile = replace(manager.last_profile, run=run)
    units = [UnitChoice(0, "norm", 1, 0.0, True), UnitChoice(0, "act", 1, 0.0, False)]
    units.append(UnitChoice(1, "act", 1, 0.0, True))
    plan = plan_by_rule(RatioConfig(kind="ratio", ratio=1.0), [profile])
    plan = replace(plan, ranks=(replace(plan.ranks[0], units=tuple(units)),))
    follower = make_follower(plan, tmp_path / "plan.json")
    losses = set()
    for _ in range(3):
        losses.add(recomputing_step(follower))
        recomputed = {
            (group.name, unit.unit)
            for group in follower.last_profile.groups
            for unit in group.recomputed
            if unit.is_recomputed
        }
        assert recomputed == {("stage 0", "norm"), ("stage 1", "act")}
    assert losses == {recomputing_step(manager)}


def test_what_a_plan_recomputes_and_the_run_can_not_is_said(tmp_path):
    plan = make_plan(make_model())
    unit = UnitChoice(0, "norm", 1, 0.0, True)
    plan = replace(plan, ranks=(replace(plan.ranks[0], units=(unit,)),))
    manager = make_follower(plan, tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"it recomputes 'norm' on pipeline rank 0, and the run"):
        run_step(make_model(), manager, ORDER)
