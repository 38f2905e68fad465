"""A plan's groups are folded by name and reason; no group is lost and no range is made up."""

from __future__ import annotations

from dataclasses import replace

from megatron_offload.core.profile import GroupKey
from megatron_offload.planning.plan import GroupChoice, OffloadPlan, RankPlan, UnitChoice
from megatron_offload.report.console import console
from megatron_offload.report.tables import PlanRow, plan_list, plan_rows, plan_table


def plan_of(*ranks):
    """Return a plan of groups, each a name, its bytes, whether it moves, and why."""
    found = [[GroupChoice(GroupKey(0, i), *one) for i, one in enumerate(rank)] for rank in ranks]
    return OffloadPlan("x", 1, 1, tuple(RankPlan(tuple(choices)) for choices in found))


def test_reasons_that_differ_in_their_times_are_one_with_a_range():
    plan = plan_of(
        [("mlp", 1, True, "away for 9.5 ms; copies take 2.0 ms"), ("norm", 7, False, "too soon")],
        [("mlp", 2, True, "away for 10.0 ms; copies take 2.0 ms")],
    )
    assert plan_rows(plan) == [
        PlanRow("mlp", "moves", "away for 9.5 to 10.0 ms; copies take 2.0 ms", 2, 3),
        PlanRow("norm", "stays", "too soon", 1, 7),
    ]


def test_rows_of_a_name_stand_together_what_moves_comes_first_and_reasons_stay_apart():
    plan = plan_of(
        [("a", 1, False, "kept 3 of them"), ("b", 1, True, "x"), ("a", 1, False, "kept 4 of them")],
        [("a", 1, True, "z"), ("b", 1, False, "x")],
    )
    assert [(row.name, row.choice == "moves", row.reason) for row in plan_rows(plan)] == [
        *(("a", True, "z"), ("a", False, "kept 3 of them"), ("a", False, "kept 4 of them")),
        *(("b", True, "x"), ("b", False, "x")),
    ]


def test_tables_take_nothing_of_a_plan_for_markup(capsys):
    plan = plan_of([("[red]a", 1, False, "[bold]why")])
    for table in (plan_table(plan), plan_list(plan)):
        console().print(table)
    printed = capsys.readouterr().out
    assert printed.count("[red]a") == printed.count("[bold]why") == 2


def test_units_say_what_is_made_again_and_why():
    units = [
        (
            UnitChoice(0, "norm", 5, 1.0, True, "made again in 1.0 ms"),
            UnitChoice(1, "norm", 5, 1.0, False, "no"),
        ),
        (UnitChoice(0, "norm", 7, 2.0, True, "made again in 2.0 ms"),),
        None,
    ]
    plan = plan_of(*[[("mlp", 1, True, "x")]] * 3)
    ranks = (replace(rank, units=each) for rank, each in zip(plan.ranks, units, strict=True))
    assert plan_rows(replace(plan, ranks=tuple(ranks))) == [
        PlanRow("mlp", "moves", "x", 3, 3),
        PlanRow("unit norm", "made again", "made again in 1.0 to 2.0 ms", 2, 12),
        PlanRow("unit norm", "as its groups", "no", 1, 5),
    ]
