r"""Choose rows of a described job by simulation, with no GPU, or print those that a run has found.

reads    a described job: a YAML file or the name of one, or of what --hf and --megatron make one
         (--print shows it, to be edited); or frontier.json of a run's folder, in its place or by
         --from: the trainer, --offload-report and, in any program, offload.save_report(FOLDER)
         leave it, as does --output here, whose page 'megatron-offload report FILE' writes
prints   of every pipeline rank the plans of rows among which was chosen, what each frees, and what
         it is predicted to take or, where a run has tried it, took; of a described job first
         whether it fits, then peak memory and step time, predicted and not measured; in the end
         the rows that were chosen, to be pasted into a configuration
writes   with --model these plans to --output, which --from reads; else nothing

policy: with --memory-target the quickest plan that brings every rank under it (memory_target), else
        the most memory that costs no more than --most-slowdown-percent of the step's time (auto)
        or, where that doesn't fit and none was given, the quickest plan that does; of a run's
        plans, with neither, what the run has followed

exit status: 0 what is printed fits, 1 it doesn't, or the target can't be kept, 2 bad input

example: megatron-offload plan gpt_16x8192_pp4_vpp2 \
             --memory-target 26GiB --output frontier.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from rich.table import Table

from megatron_offload.cli.options import writing
from megatron_offload.cli.source import Source, SourceOptions, load_source
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.files.strict_model import TargetBytes, write_model
from megatron_offload.planning.alternatives import alternatives
from megatron_offload.planning.found import RunFrontier, read_frontier
from megatron_offload.planning.job_choice import JobChoice
from megatron_offload.report.console import console, plain_table
from megatron_offload.report.tables import found_table
from megatron_offload.train.run_folder import main_folder

_USUAL_PERCENT = AutoConfig(kind="auto").most_slowdown_percent
_MOST_RANKS = 4  # whose plans are printed; else those of the fullest alone
_WithoutSign = BeforeValidator(lambda text: str(text).removesuffix("%"))


class Given(SourceOptions):
    """The options of ``plan``."""

    memory_target: tuple[TargetBytes, ...] | None = None
    """Most device memory of every pipeline rank, such as 26GiB; or one size for each."""

    most_slowdown_percent: Annotated[float, _WithoutSign, Field(ge=0, le=1000)] | None = None
    """Maximum step-time overhead in percent (default 3; of a run's plans what was followed)."""

    output: Path | None = None
    """Where the plans of a described job go."""

    from_: Path | None = Field(default=None, alias="from")
    """The folder of a run that has found rows, or a file of plans, to be printed."""


def run(given: Given) -> int:
    """Plan, print and write; return 0, or 1 where what is found doesn't fit."""
    folder = given.folder if given.from_ is None else given.from_
    if folder is not None:
        return _show_found(given, folder)
    percent = given.most_slowdown_percent
    with console(stderr=True).status("planning"):
        source = load_source(given)
        if given.print_:
            return source.print_description()
        described = source.described
        short = described.short_job() or source.job
        choice = JobChoice(source.job, short, described.offload)
        steps = dict(alternatives(short, described.offload))
        others = [source.summary(what, step, steps["nothing"]) for what, step in steps.items()]
        targets = _targets(given, source.job.schedule.num_ranks)
        try:
            if targets:
                planned = choice.under(targets)
            else:
                planned = choice.within(_USUAL_PERCENT if percent is None else percent)
                if percent is None and any(source.misfits(planned.step)):
                    targets = (source.job.machine.device_bytes,) * source.job.schedule.num_ranks
                    planned = choice.under(targets)
        except TargetError as error:
            return _refuse(given, source, others, error)
    found, out = planned.found, console(quiet=given.json_)
    if given.output is not None:
        with writing(given.output):
            write_model(given.output, found)
    others.append(source.summary("the rows below", planned.step, choice.without))
    peaks = [rank.peak_reserved_bytes for rank in planned.step.ranks]
    shown = found.stages if len(peaks) <= _MOST_RANKS else [found.stages[peaks.index(max(peaks))]]
    tables = [_table(source, others)]
    tables.append(source.memory_table(choice.without, planned.step, "with the rows"))
    tables += [found_table(stage, stage.followed) for stage in shown]
    rows = [row.model_dump(exclude_defaults=True) for row in found.rows()]
    more = {"rows": rows, "alternatives": others}
    status = source.show(choice.without, planned.step, "with the rows", tables, more)
    out.print(f"plans: {given.output}" if given.output else "--output FILE keeps the plans")
    out.print(_pasted(found))
    return status


def _refuse(
    given: Given, source: Source, others: Sequence[dict[str, Any]], error: TargetError
) -> int:
    """Say that nothing keeps the targets, and print what else there is; return 1."""
    fits = "" if given.memory_target else "does not fit: "
    least = format_bytes(max(source.job.static_bytes))
    said = f"{fits}{error}; {least} are weights, gradients and optimizer, which more GPUs may share"
    console(stderr=True).print(f"megatron-offload: {said}")
    as_json = json.dumps({"fits": False, "misfits": [said], "alternatives": others}, indent=1)
    console().print(as_json if given.json_ else _table(source, others))
    return 1


def _table(source: Source, others: Sequence[dict[str, Any]]) -> Table:
    """Return a line for each of some things to do, with memory of the fullest rank."""
    rows = []
    for what, fits, *sizes, percent in map(dict.values, others):
        fits = "yes" if fits else "no"
        rows.append([what, fits, *map(format_bytes, sizes), f"{percent:+.1f} %"])
    columns = ["what, layers of each stage", "fits", "reserved", "host, a node", "takes longer"]
    return plain_table(f"What {source.title} may do: PREDICTED", columns, 1, rows)


def _show_found(given: Given, folder: Path) -> int:
    names = ("model", "hf", "megatron", "print_", "json_", "output", "machine")
    others: dict[str, Any] = {"another folder": given.from_ and given.folder}
    others |= {f"--{name.rstrip('_')}": getattr(given, name) for name in names}
    if wrong := [*(name for name, value in others.items() if value), *given.typed.values()]:
        raise ConfigError(
            "beside a run's folder there are --memory-target and --most-slowdown-percent, not "
            f"{', '.join(wrong)}"
        )
    found = read_frontier(main_folder(folder) if folder.is_dir() else folder)
    targets, out, chosen = _targets(given, len(found.stages)), console(), list[int]()
    if targets and not all(stage.bare_bytes for stage in found.stages):
        raise ConfigError(f"{folder} doesn't say what was in use, so no target can be kept")
    for number, stage in enumerate(found.stages):
        place: int | None = stage.followed
        if targets:
            place = stage.under(targets[number])
        elif given.most_slowdown_percent is not None:
            place = stage.within(given.most_slowdown_percent)
        if place is None:
            out.print(f"no plan of stage {stage.name} is known to fit", style="red")
            return 1
        out.print(found_table(stage, place))
        chosen.append(place)
    out.print(f"found: {found.said}")
    out.print(_pasted(found, chosen))
    return 0


def _pasted(found: RunFrontier, places: Sequence[int] | None = None) -> str:
    """Return the rows of a plan of each stage, to be pasted."""
    return f"rows: [{', '.join(map(str, found.rows(places)))}]"


def _targets(given: Given, num_stages: int) -> tuple[int, ...]:
    """Return the memory target of each pipeline stage; none where time is what is limited."""
    if given.memory_target is None:
        return ()
    if given.most_slowdown_percent is not None:
        raise ConfigError("give either --memory-target or --most-slowdown-percent")
    first, *others = given.memory_target
    target = given.memory_target if others else first
    return MemoryTargetConfig(kind="memory_target", memory_target=target).targets(num_stages)
