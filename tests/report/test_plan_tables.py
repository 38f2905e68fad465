"""A plan's groups are folded by name and reason; no group is lost and no range is made up."""

from __future__ import annotations

from megatron_offload.core.profile import GroupKey
from megatron_offload.planning.plan import GroupChoice, OffloadPlan, RankPlan
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
        PlanRow("mlp", True, "away for 9.5 to 10.0 ms; copies take 2.0 ms", 2, 3),
        PlanRow("norm", False, "too soon", 1, 7),
    ]


def test_rows_of_a_name_stand_together_what_moves_comes_first_and_reasons_stay_apart():
    plan = plan_of(
        [("a", 1, False, "kept 3 of them"), ("b", 1, True, "x"), ("a", 1, False, "kept 4 of them")],
        [("a", 1, True, "z"), ("b", 1, False, "x")],
    )
    assert [(row.name, row.moves, row.reason) for row in plan_rows(plan)] == [
        *(("a", True, "z"), ("a", False, "kept 3 of them"), ("a", False, "kept 4 of them")),
        *(("b", True, "x"), ("b", False, "x")),
    ]


def test_tables_take_nothing_of_a_plan_for_markup(capsys):
    plan = plan_of([("[red]a", 1, False, "[bold]why")])
    for table in (plan_table(plan), plan_list(plan)):
        console().print(table)
    printed = capsys.readouterr().out
    assert printed.count("[red]a") == printed.count("[bold]why") == 2
