"""A plan's groups are folded by name and reason; no group is lost and no range is made up."""

from __future__ import annotations

from dataclasses import replace

from megatron_offload.core.profile import GroupKey
from megatron_offload.planning.plan import GroupChoice, OffloadPlan, RankPlan, UnitChoice
from megatron_offload.report.tables import PlanRow, plan_rows


def plan_of(*ranks):
    """Return a plan of groups, each a name, its bytes, whether it is offloaded, and why."""
    found = [[GroupChoice(GroupKey(0, i), *one) for i, one in enumerate(rank)] for rank in ranks]
    return OffloadPlan("x", 1, 1, tuple(RankPlan(tuple(choices)) for choices in found))


def test_groups_of_one_name_and_reason_are_one_row():
    plan = plan_of(
        [("mlp", 1, True, "for it"), ("norm", 7, False, "too soon")], [("mlp", 2, True, "for it")]
    )
    assert plan_rows(plan) == [
        PlanRow("mlp", "offloaded", "for it", 2, 3),
        PlanRow("norm", "kept", "too soon", 1, 7),
    ]


def test_rows_of_a_name_stand_together_what_moves_comes_first_and_reasons_are_apart():
    plan = plan_of(
        [("a", 1, False, "kept 3 of them"), ("b", 1, True, "x"), ("a", 1, False, "kept 4 of them")],
        [("a", 1, True, "z"), ("b", 1, False, "x")],
    )
    assert [(row.name, row.choice == "offloaded", row.reason) for row in plan_rows(plan)] == [
        *(("a", True, "z"), ("a", False, "kept 3 of them"), ("a", False, "kept 4 of them")),
        *(("b", True, "x"), ("b", False, "x")),
    ]


def test_units_say_what_is_recomputed_and_what_that_takes():
    units = [
        (
            UnitChoice(0, "norm", 5, 1000.0, True),
            UnitChoice(1, "norm", 5, 1000.0, False),
        ),
        (UnitChoice(0, "norm", 7, 2000.0, True),),
        None,
    ]
    plan = plan_of(*[[("mlp", 1, True, "x")]] * 3)
    ranks = (replace(rank, units=each) for rank, each in zip(plan.ranks, units, strict=True))
    assert plan_rows(replace(plan, ranks=tuple(ranks))) == [
        PlanRow("mlp", "offloaded", "x", 3, 3),
        PlanRow("recompute norm", "recomputed", "recompute takes 3.0 ms in all", 2, 12),
        PlanRow("recompute norm", "as its groups", "recompute takes 1.0 ms in all", 1, 5),
    ]
