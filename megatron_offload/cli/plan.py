r"""Choose rows of a described job by simulation, with no GPU, or print those that a run has found.

reads    a described job: a YAML file or the name of one, or of what --hf and --megatron make one
         (--print shows it, to be edited); or with --from frontier.json of a run's folder: the
         trainer, --offload-report and, in any program, offload.save_report(FOLDER) leave it, as
         does --output here, whose page 'megatron-offload report FILE' writes
prints   of a described job whether it fits or what helps, what else can be done, peak memory and
         step time, predicted and not measured, and plans of the fullest rank; of a run the plans of
         every stage, what each frees, and what it is predicted to take or, where it was tried,
         took; in the end the rows that were chosen, to be pasted into a configuration
writes   of a described job these plans to --output, which --from reads, and to --picture memory
         against time of these and of recompute, offload and both, needing the extra 'report'

policy: with --memory-target the quickest plan that brings every rank under it (memory_target), else
        the most memory that costs no more than --most-slowdown-percent of the step's time (auto)
        or, where that doesn't fit and none was given, the quickest plan that does; none pins more
        than machine.host_bytes; of a run's plans, each of whose stages keeps a limit by itself,
        with neither what the run has followed

exit status: 0 what is printed fits, 1 it doesn't, or the target can't be kept, 2 bad input

example: megatron-offload plan gpt_16x8192_pp4_vpp2 \
             --memory-target 26GiB --output frontier.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from megatron_offload.cli.options import OutputFile, writing
from megatron_offload.cli.report import check_picture, write_report
from megatron_offload.cli.source import NEARLY, Source, SourceOptions, load_source
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, TargetError
from megatron_offload.files.strict_model import TargetBytes, write_model
from megatron_offload.planning.found import Alternative, RunFrontier, read_frontier
from megatron_offload.planning.job_choice import JobChoice, MissedTargetError, Planned
from megatron_offload.planning.job_judge import SLOW_LINK_SHARE
from megatron_offload.planning.simulate import Simulation
from megatron_offload.report.console import console
from megatron_offload.report.report import Report
from megatron_offload.report.tables import alternative_table, found_table
from megatron_offload.train.run_folder import main_folder

_USUAL_PERCENT = AutoConfig(kind="auto").most_slowdown_percent
_WithoutSign = BeforeValidator(lambda text: str(text).removesuffix("%"))


class Given(SourceOptions):
    """The options of ``plan``."""

    memory_target: tuple[TargetBytes, ...] | None = None
    """Most device memory of every pipeline rank, such as 26GiB; or one size for each."""

    most_slowdown_percent: Annotated[float, _WithoutSign, Field(ge=0, le=1000)] | None = None
    """Maximum step-time overhead in percent (default 3; of a run's plans what was followed)."""

    output: OutputFile | None = None
    """Where the plans of a described job go."""

    picture: OutputFile | None = None
    """Likewise a picture of memory against time (.svg, .png, .pdf), or the page with it (.html)."""

    from_: Path | None = Field(default=None, alias="from")
    """The folder of a run that has found rows, or a file of plans, to be printed."""


def run(given: Given) -> int:
    """Plan, print, draw and write; return 0, or 1 where what is found doesn't fit."""
    if given.from_ is not None:
        return _show_found(given, given.from_)
    percent, picture = given.most_slowdown_percent, given.picture
    if picture is not None:
        check_picture(picture)
    with console(stderr=True).status("planning") as status:
        source = load_source(given)
        if given.print_:
            return source.print_description()
        targets = _targets(given, source.job.schedule.num_ranks)
        source = replace(source, targets=targets)
        choice = JobChoice(source.job, source.described.offload)
        steps = choice.alternatives.items()
        each = [source.summary(what, step, choice.without) for what, step in steps]
        status.update("planning: looking for rows")
        try:
            planned = choice.under(source.limits) if targets else _within(choice, source, percent)
        except MissedTargetError as error:
            return _refuse(given, source, choice.without, each, error)
    without, step = choice.without, planned.step
    is_limit = percent is not None and any(one.fits for one in each)
    first = ["leave out --most-slowdown-percent"] if is_limit else []
    verdict = source.verdict(without, step, "with the rows", first)
    verdict += f"\n{planned.found.said}"
    each.append(source.summary("the chosen rows", step, without, "chosen"))
    if slow := planned.slow_link:
        (stage,) = planned.found.stages
        percents = *slow.values(), stage.plans[stage.followed].slow_link_percent
        pairs = zip(each, percents, strict=True)
        each = [one.model_copy(update={"slow_link_percent": x}) for one, x in pairs]
    shown = source.alternatives(verdict, each)
    found = planned.found.model_copy(update={"alternatives": shown})
    if picture is not None:
        write_report(picture, Report(source.title, found=found, alternatives=shown))
    if given.output is not None:
        with writing(given.output):
            write_model(given.output, found)
    (stage,), out = found.stages, console(quiet=given.json_)
    tables = [alternative_table(shown), source.memory_table(without, step, "with the rows")]
    tables.append(found_table(stage, chosen=stage.followed))
    rows = [row.model_dump(exclude_defaults=True) for row in found.rows()]
    more = {"rows": rows, "alternatives": shown.model_dump()["each"]}
    result = source.show(without, step, "with the rows", tables, verdict, more)
    out.print(f"plans: {given.output}" if given.output else "--output FILE keeps the plans")
    out.print(f"picture: {picture}" if picture else "--picture FILE draws the table")
    out.print("the rows, for a YAML of run --offload-config, or for OffloadConfig(rows=...):")
    out.print(found.pasted())
    return result


def _within(choice: JobChoice, source: Source, percent: float | None) -> Planned:
    """Return what a limit of time allows; where that doesn't fit a GPU the quickest plan that does.

    A limit that was given is kept, though, where both can't be.
    """
    limit = _USUAL_PERCENT if percent is None else percent
    if not any(source.misfits(choice.without)):
        return choice.within(limit)
    try:
        fitting = choice.under(source.limits)
    except TargetError:
        if percent is None:
            raise
        return choice.within(limit)
    is_quick = 100 * (fitting.step.step_us / choice.without.step_us - 1) <= limit
    if not is_quick and percent is None:
        return fitting
    planned = choice.within(limit)
    return fitting if is_quick and any(source.misfits(planned.step)) else planned


def _refuse(
    given: Given,
    source: Source,
    without: Simulation,
    each: list[Alternative],
    error: MissedTargetError,
) -> int:
    """Say that nothing keeps the targets, and print and draw what else there is; return 1."""
    what, (_, _, limit) = "with what needs least", source.tightest(error.step)
    least = max(rank.peak_reserved_bytes for rank in error.step.ranks)
    is_target = limit < source.job.machine.device_bytes >= least
    first = [f"--memory-target {-(-least // 2**20)}MiB"] if is_target else []
    each = [*each, source.summary("what needs least", error.step, without)]
    verdict = f"does not fit {source.named(limit)}: {error}{source.to_fit(limit, first)}"
    shown = source.alternatives(verdict, each)
    if given.picture is not None:
        write_report(given.picture, Report(source.title, alternatives=shown))
    tables = [alternative_table(shown), source.memory_table(without, error.step, what)]
    more = {"target_bytes": limit, "alternatives": shown.model_dump()["each"]}
    result = source.show(without, error.step, what, tables, verdict, more)
    if given.output is not None:
        console(quiet=given.json_).print(f"plans: none, so that {given.output} is not written")
    return result


def _show_found(given: Given, folder: Path) -> int:
    names = ("job", "hf", "megatron", "print_", "json_", "output", "picture", "machine")
    others = (f"--{name.rstrip('_')}" for name in names if getattr(given, name))
    if wrong := [*(name.replace("--job", "a job") for name in others), *given.typed.values()]:
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
            text = f"no plan of stage {stage.name} takes so little time"
            if targets:
                least = format_bytes(min(stage.needed_bytes()))
                text = f"no plan of stage {stage.name} is known to need less than {least}"
            out.print(f"does not fit: {text}" if targets else text, style="bold red")
            return 1
        chosen.append(place)
    verdict, fits = _verdict(found, chosen, targets)
    out.print(verdict, style="bold green" if fits else "bold red")
    for stage, place in zip(found.stages, chosen, strict=True):
        out.print(found_table(stage, chosen=place, followed=stage.followed))
    out.print(f"found: {found.said}")
    if found.alternatives and (targets or given.most_slowdown_percent is not None):
        slow = "" if targets else f", with {SLOW_LINK_SHARE:g} of the bandwidth to the host, too"
        out.print(f"of the plans of this file{slow}: planned anew, the job may get others")
    out.print(found.pasted(chosen))
    return int(not fits)


def _verdict(found: RunFrontier, places: Sequence[int], targets: Sequence[int]) -> tuple[str, bool]:
    """Return whether a plan of each stage fits, in words, and as far as that is known."""
    pairs, is_run = [*zip(found.stages, places, strict=True)], found.alternatives is None
    percent = max(stage.plans[place].percent for stage, place in pairs)
    of_what = "the stage that loses most" if is_run else "the step's time"
    what = f"with the rows at {percent:+z.2f} % of {of_what}"
    if not all(stage.bare_bytes for stage in found.stages):
        return f"what is needed is not known, {what}", True
    sizes = [stage.needed_bytes()[place] for stage, place in pairs]
    there = found.alternatives.device_bytes if found.alternatives else 0
    limits = targets or [there] * len(sizes)
    spare, size, limit = min((y - x, x, y) for x, y in zip(sizes, limits, strict=True))
    if not limit:
        return f"needs {format_bytes(size)} reserved {what}", True
    barely = "barely " if size > NEARLY * limit else ""
    fits = f"{barely}fits" if spare >= 0 else "does not fit"
    of_all = f"{format_bytes(size)} reserved of {format_bytes(limit)}"
    by_itself = " (each stage keeps its limit by itself)" if is_run else ""
    return f"{fits} {what}: {of_all}{by_itself}", spare >= 0


def _targets(given: Given, num_stages: int) -> tuple[int, ...]:
    """Return the memory target of each pipeline stage; none where time is what is limited."""
    if given.memory_target is None:
        return ()
    if given.most_slowdown_percent is not None:
        raise ConfigError("give either --memory-target or --most-slowdown-percent")
    first, *others = given.memory_target
    target = given.memory_target if others else first
    return MemoryTargetConfig(kind="memory_target", memory_target=target).targets(num_stages)
