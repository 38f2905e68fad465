"""The command ``plan --from``: it prints the rows that a run has found."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from jobs import plan, rows_in

from megatron_offload.config import OffloadConfig
from megatron_offload.core.policy_config import AutoConfig
from megatron_offload.core.row_config import RowConfig
from megatron_offload.files.strict_model import write_model
from megatron_offload.planning.found import FoundPlan, FoundStage, RunFrontier
from megatron_offload.planning.frontier import KEEP, Action
from megatron_offload.planning.row_choice import RowChoice, Slowdown, Stage

MIB = 1 << 20


def found_run(folder, *, num_stages=1, **changes):
    """Leave what a run has found: of eight layers each move frees 4 MiB and takes 1 %."""
    run = Action((("mlp", "recompute"),), 4 * MIB, 10.0)
    stages = {}
    for number in range(num_stages):
        layers = range(8 * number, 8 * number + 8)
        own, num_bytes = [dict.fromkeys(layers, (KEEP, run))], 100 * MIB
        stages[str(number)] = Stage(own, bare_bytes=num_bytes, reserved_bytes=num_bytes)
    choice = RowChoice(AutoConfig(kind="auto", most_slowdown_percent=3), stages, 1000.0)
    while not choice.next()[0]:
        choice.note(Slowdown(2.5, 2.4, 2.6), dict.fromkeys(stages, 90 * MIB), 32)
    found = RunFrontier.of(choice, "it was found", (RowConfig(site="loss", by_rows=True),))
    write_model(folder / "frontier.json", found.model_copy(update=changes))
    return found


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ((), "0-1"),
        (("--memory-target", "90MiB"), "0-1"),  # as was seen: 8 MiB are freed of 100
        (("--memory-target", "85MiB"), "0-3"),
        (("--most-slowdown-percent", "4.5"), "0-3"),
        (("--most-slowdown-percent", "2"), "0"),
    ],
)
def test_the_plans_that_a_run_has_found_are_printed_to_be_pasted(words, layers, tmp_path, prints):
    found_run(tmp_path)
    verdict, *table, said, rows = prints("plan", "--from", tmp_path, *words).splitlines()
    assert said == "found: it was found"
    fits = r"(barely )?fits with the rows at \S+ % .*: \S+ MiB reserved of \d\d.0 MiB \(each stage"
    needs = "needs .* reserved with the rows at .* of the stage that loses most"
    assert re.match(fits if "--memory-target" in words else needs, verdict)
    config = OffloadConfig(**yaml.safe_load(rows))
    assert [(row.site, row.layers) for row in config.rows] == [("loss", "all"), ("mlp", layers)]
    (chosen,) = (line for line in table if "chosen" in line)
    assert f"recompute mlp {layers} " in chosen
    assert ("chosen, followed" in chosen) == (layers == "0-1")
    tried = [line for line in table if "+2.5 % (+2.4 to +2.6)" in line]
    assert tried
    assert all("90.0 MiB" in line for line in tried)
    assert [*tmp_path.iterdir()] == [tmp_path / "frontier.json"]


def test_rows_of_all_stages_are_pasted_together(tmp_path, prints):
    found_run(tmp_path, num_stages=2)
    printed = prints("plan", "--from", tmp_path, "--memory-target", "96MiB", "88MiB")
    rows = yaml.safe_load(printed.splitlines()[-1])["rows"]
    assert [row.get("layers") for row in rows] == ["all", "0,8-10"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--memory-target", "1MiB"), 1, "no plan of stage 0 is known to need less than"),
        (("--memory-target", "96MiB", "88MiB"), 2, "2 memory targets are given for 1"),
        (("--output", "plan.json"), 2, "beside a run's folder there are --m"),
        (("--set", "machine.d2h_gbps=5"), 2, "-percent, not --set machine.d2h_gbps\n"),
    ],
)
def test_what_can_not_be_said_of_a_run_s_plans_is_refused(words, status, message, tmp_path, capsys):
    found_run(tmp_path)
    assert plan("--from", tmp_path, *words) == status
    assert message in "".join(capsys.readouterr())


def test_a_run_that_has_left_no_plans_or_wrong_ones_is_refused(tmp_path, capsys, refused):
    assert "holds no frontier.json" in refused("plan", "--from", tmp_path)
    found = found_run(tmp_path)
    for wrong in ({"followed": 99}, {"plans": ()}, {"more": 1}, {"bare_bytes": 10**400}):
        stage = found.stages[0].model_dump() | wrong
        text = json.dumps({"said": "", "stages": [stage]}, default=str)
        (tmp_path / "frontier.json").write_text(text)
        assert plan("--from", tmp_path) == 2
        assert str(tmp_path / "frontier.json") in capsys.readouterr().err


def test_a_limit_that_no_plan_keeps_is_status_1(tmp_path, capsys):
    (stage,) = found_run(tmp_path).stages
    changes = {"plans": stage.plans[1:], "followed": 0}  # nothing isn't among them
    found_run(tmp_path, stages=(stage.model_copy(update=changes),))
    assert plan("--from", tmp_path, "--most-slowdown-percent", "0.5") == 1
    assert capsys.readouterr().out == "no plan of stage 0 takes so little time\n"


def test_where_memory_was_not_known_no_target_is_answered(tmp_path, refused, prints):
    (stage,) = found_run(tmp_path).stages
    found_run(tmp_path, stages=(stage.model_copy(update={"bare_bytes": 0}),))
    assert "not known" in prints("plan", "--from", tmp_path)
    words = ("plan", "--from", tmp_path / "frontier.json", "--memory-target", "1MiB")
    assert "frontier.json doesn't say" in refused(*words)


def test_rows_of_stages_with_the_same_layers_can_be_pasted():
    def found(*rows):
        return FoundPlan(
            rows=tuple(map(RowConfig.model_validate, rows)), freed_bytes=1, predicted_percent=1
        )

    one = {"layers": "2,3", "site": "mlp", "recompute": True}
    act = {"site": "mlp_act", "recompute": True}
    other = {"layers": "3,6", "site": "mlp", "offload": 1}
    plans = found(one, act), found(act, other)
    stages = [FoundStage(name="a", bare_bytes=1, plans=(plan,), followed=0) for plan in plans]
    assert list(map(str, RunFrontier(said="", stages=stages).rows())) == [
        "{layers: all, site: mlp_act, recompute: true}",
        "{layers: 2-3, site: mlp, recompute: true}",
        "{layers: 6, site: mlp, offload: 1}",
    ]
    strange = RowConfig(site="mlp, recompute: true}, {site: layer", offload=1)
    assert OffloadConfig(rows=f"[{strange}]").rows == (strange,)


def test_a_comparison_s_folder_shows_what_its_run_has_found(tmp_path, prints):
    run = tmp_path / "compared" / "with_offload"
    run.mkdir(parents=True)
    found_run(run)
    for folder in (run, run.parent):
        rows = rows_in(prints("plan", "--from", folder, "--memory-target", "85MiB"))
        assert [row.layers for row in rows] == ["all", "0-3"]
