r"""Choose what moves to the host, from a run's profiles or from a described model, with no GPU.

--from   prints the plans of rows among which a run has chosen, what each frees, and what it is
         predicted to take or, where the run has tried it, took; and, to be pasted into a
         configuration, the rows of the one that was followed, or that the policy below chooses.
         Reads frontier.json, which --offload-report makes a job leave, or
         offload.manager.tuner.save(FOLDER) any program; writes nothing

reads    RUN_FOLDER/profile_<rank>.json, which run.profile_step makes a run leave (of a
         comparison, its run with offload); or the YAML of --model
prints   for every pipeline rank what is offloaded, what is kept, peak memory and step time; for
         every kind of group why; all predicted, not measured
writes   the plan to --output, and the predicted trade-off curve to tradeoff.json beside it. Without
         --output the plan is RUN_FOLDER/plan.json, in the place of one that is there, unless the
         run followed that: then this is refused; with --model nothing is written. With
         'offload: {policy: {kind: plan_file, path: FILE}}' a run follows the plan

policy: with --memory-target the quickest plan that brings every rank under it (memory_target), else
        the most memory that costs no more than --most-slowdown-percent of the step's time (auto)

exit status: 0 planned, 1 the target can't be kept, 2 bad input

example: megatron-offload plan --model gpt_16x8192_pp4_vpp2 \
             --memory-target 26GiB --output plan.json
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from rich.table import Table

from megatron_offload.cli.options import writing
from megatron_offload.cli.source import Source, SourceOptions, load_source
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import TargetBytes, write_model
from megatron_offload.planning.choice import Chooser, Planned
from megatron_offload.planning.files import save_plan
from megatron_offload.planning.found import read_frontier
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.simulate import Simulation
from megatron_offload.report.console import console, plain_table
from megatron_offload.report.tables import (
    TRADEOFF_NAME,
    TradeOff,
    TradeOffPoint,
    found_table,
    plan_table,
)
from megatron_offload.train.run_folder import PLAN_NAME

_NUM_TARGETS = 4  # on the trade-off curve
_WithoutSign = BeforeValidator(lambda text: str(text).removesuffix("%"))


class Given(SourceOptions):
    """The options of ``plan``."""

    memory_target: tuple[TargetBytes, ...] | None = None
    """Most device memory of every pipeline rank, such as 26GiB; or one size for each."""

    most_slowdown_percent: Annotated[float, _WithoutSign, Field(ge=0, le=1000)] | None = None
    """Maximum step-time overhead in percent (default 1; beside --from what was followed)."""

    output: Path | None = None
    """Where the plan goes."""

    from_: Path | None = Field(default=None, alias="from")
    """The folder of a run that has found rows, whose plans are printed."""


def run(given: Given) -> int:
    """Plan, print and write; return 0, or 1 where no plan that a run has found fits."""
    if given.from_ is not None:
        return _show_found(given, given.from_)
    output = given.output or (given.folder and given.folder / PLAN_NAME)
    config = _policy_of(given)
    with console(stderr=True).status("planning"):
        source = load_source(given)
        if output is not None and _is_followed(output, source):
            raise ConfigError(
                f"{output} is the plan that the run followed; --output FILE takes another"
            )
        chooser = Chooser(source.profiles, source.job, source.default)
        plan = make(source, chooser, config, output)
    step = chooser.simulate(plan)
    tables = (_rank_table(source, plan, chooser.without, step), plan_table(plan))
    source.show(chooser.without, step, "with the plan", tables)
    written = f"plan: {output}" if output else "nothing was written; --output FILE keeps the plan"
    console().print(written)
    return 0


def _show_found(given: Given, folder: Path) -> int:
    if given.folder or given.model or given.output or given.machine or given.set:
        raise ConfigError("beside --from there are --memory-target and --most-slowdown-percent")
    policy, found, out, chosen = _policy_of(given), read_frontier(folder), console(), []
    targets, percent = given.memory_target, given.most_slowdown_percent
    if targets and len(targets) not in (1, len(found.stages)):
        raise ConfigError(
            f"--memory-target has {len(targets)} sizes for {len(found.stages)} stages"
        )
    if targets and not all(stage.bare_bytes for stage in found.stages):
        raise ConfigError("what the run had in use isn't known, so no target can be kept")
    for number, stage in enumerate(found.stages):
        place: int | None = stage.followed
        if isinstance(policy, MemoryTargetConfig):
            place = stage.under(policy.target_of(number))
        elif percent is not None:
            place = stage.within(percent)
        if place is None:
            out.print(f"no plan of stage {stage.name} is known to fit", style="red")
            return 1
        out.print(found_table(stage, place))
        chosen.append(stage.plans[place])
    out.print(f"the run: {found.said}")
    out.print(f"rows: [{', '.join(map(str, found.rows_of(chosen)))}]")
    return 0


def _is_followed(path: Path, source: Source) -> bool:
    """Whether a file is the plan that the run followed."""
    own = source.recorded.own_plan if source.recorded else None
    return own is not None and path.resolve() == own.resolve()


def make(source: Source, chooser: Chooser, config: Planned, output: Path | None) -> OffloadPlan:
    """Return a plan; write it, and beside it what it and other targets are predicted to bring."""
    plan = replace(chooser.plan(config), bandwidths=source.machine)
    if output is None:
        return plan
    without, lowest = chooser.without, chooser.lowest_bytes
    above = chooser.highest_bytes - lowest  # 0 where nothing can be offloaded
    targets = {lowest + above * index // _NUM_TARGETS for index in range(_NUM_TARGETS) if above}
    steps = {"no offload": without, f"the plan ({plan.policy})": chooser.simulate(plan)}
    for target in sorted(targets):
        other = chooser.under((target,) * len(without.ranks))
        steps[f"target {format_bytes(target)}"] = chooser.simulate(other)
    points = [
        TradeOffPoint(
            label=label,
            peak_bytes=max(rank.peak_reserved_bytes for rank in step.ranks),
            step_time_percent=100 * (step.step_us / without.step_us - 1),
            kind="plan" if label.startswith("the plan") else "predicted",
        )
        for label, step in steps.items()
    ]
    with writing(output):
        save_plan(plan, output)
        curve = TradeOff(memory=source.memory, points=tuple(points))
        write_model(output.parent / TRADEOFF_NAME, curve)
    return plan


def _rank_table(source: Source, plan: OffloadPlan, without: Simulation, step: Simulation) -> Table:
    rows = []
    ranks = zip(plan.ranks, without.ranks, step.ranks, strict=True)
    for index, (rank, before, after) in enumerate(ranks):
        peaks = (before.peak_reserved_bytes, after.peak_reserved_bytes, after.peak_host_bytes)
        kept_bytes = rank.saved_bytes - rank.moved_bytes
        sizes = (rank.moved_bytes, rank.recomputed_bytes, kept_bytes, *peaks)
        rows.append([index, *map(format_bytes, sizes)])
    peak = f"peak {source.memory}"
    columns = ["rank", "offloaded", "recomputed", "kept", peak, "with the plan", "host"]
    title = f"Plan of {source.title}, policy {plan.policy}: PREDICTED"
    return plain_table(title, columns, 0, rows)


def _policy_of(given: Given) -> Planned:
    targets, percent = given.memory_target, given.most_slowdown_percent
    if targets is None:
        return AutoConfig(kind="auto", most_slowdown_percent=1.0 if percent is None else percent)
    if percent is not None:
        raise ConfigError("give either --memory-target or --most-slowdown-percent")
    each = targets if len(targets) > 1 else targets[0]
    return MemoryTargetConfig(kind="memory_target", memory_target=each)
