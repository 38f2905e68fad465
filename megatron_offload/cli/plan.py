r"""Choose what moves to the host, from a run's profiles or from a described model, with no GPU.

reads    RUN_FOLDER/profile_<rank>.json, which run.profile_step makes a run leave (of a
         comparison, its run with offload); or the YAML of --model
prints   for every pipeline rank what moves, what stays, peak memory and step time; for every kind
         of group why; all predicted, not measured
writes   the plan to --output (RUN_FOLDER/plan.json unless given, in the place of one that is there;
         with --model nothing is written without --output), and the predicted trade-off curve to
         tradeoff.json beside it. 'megatron-offload report RUN_FOLDER' shows both; with
         'offload: {policy: {kind: plan_file, path: FILE}}' a run follows the plan

policy: with --device-target the quickest plan that brings every rank under it (memory_target), else
        the most memory that costs no more than --max-cost of the step's time (auto)

exit status: 0 planned, 1 the target can't be kept, 2 bad input

example: megatron-offload plan --model gpt_16x8192_pp4_vpp2 \
             --device-target 26GiB --output plan.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from rich.table import Table

from megatron_offload.cli.output import OutputFile, check_output, progress, writing
from megatron_offload.cli.source import Source, SourceOptions, load_source
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, PolicyConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import TargetBytes
from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.plan_file import save_plan
from megatron_offload.planning.simulate import Simulation, simulate
from megatron_offload.report.console import console, plain_table
from megatron_offload.report.tables import plan_table
from megatron_offload.report.tradeoff import TRADEOFF_NAME, TradeOffPoint, write_tradeoff
from megatron_offload.train.run_folder import PLAN_NAME

_WithoutSign = BeforeValidator(lambda text: str(text).removesuffix("%"))


class Given(SourceOptions):
    """The options of ``plan``."""

    device_target: tuple[TargetBytes, ...] | None = None
    """Most device memory of every pipeline rank, such as 26GiB; or one size for each."""

    max_cost: Annotated[float, _WithoutSign, Field(ge=0, le=1000)] | None = None
    """Percent that the step may take longer at most; 1 unless set."""

    output: OutputFile | None = None
    """Where the plan goes."""

    curve: int = Field(default=6, ge=0, le=64)
    """Memory targets on the trade-off curve; 0 for none."""


@dataclass(frozen=True)
class Outcome:
    """A plan, and what simulating says of the step with it and without."""

    source: Source
    plan: OffloadPlan
    step: Simulation
    without: Simulation
    points: tuple[TradeOffPoint, ...]
    """Of the trade-off curve."""


def run(given: Given) -> int:
    """Plan, print and write; return 0."""
    output = given.output or (given.folder and check_output(given.folder / PLAN_NAME))
    config = _policy_of(given)
    with progress("planning") as say:
        source = load_source(given)
        recorded = source.recorded
        if recorded is not None and recorded.own_plan == output:
            raise ConfigError(
                f"{output} is the plan that the run made and followed; --output FILE takes another"
            )
        outcome = make(source, config, given.curve, say)
    tables = (_rank_table(outcome), plan_table(outcome.plan))
    source.show(outcome.without, outcome.step, "with the plan", tables)
    out = console()
    if output is None:
        out.print("nothing was written; --output FILE keeps the plan")
    else:
        curve = write(outcome, output)
        out.print(f"plan: {output}")
        if curve is not None:
            out.print(f"curve: {curve}")
    return 0


def make(
    source: Source,
    config: PolicyConfig,
    num_targets: int = 6,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Return a plan, what is predicted of it, and a curve of other targets, if there are any.

    ``say`` is told how far it is. TargetError: the target can't be kept.
    """
    say("candidates are simulated")
    chooser = Chooser(source.profiles, source.job, source.default)
    plan = replace(chooser.plan(config), bandwidths=source.machine)
    step = chooser.simulate(plan)
    points = list(_curve(source, chooser, num_targets, say)) if num_targets else []
    if points:
        points.append(_point(f"the plan ({plan.policy})", step, chooser.without, is_plan=True))
    return Outcome(source, plan, step, chooser.without, tuple(points))


def write(outcome: Outcome, path: Path) -> Path | None:
    """Write a plan, and beside it the trade-off curve, whose file is returned; None without one."""
    with writing(path):
        save_plan(outcome.plan, path)
    if not outcome.points:
        return None
    curve = path.parent / TRADEOFF_NAME
    with writing(curve):
        write_tradeoff(curve, outcome.source.memory, outcome.points)
    return curve


def _rank_table(outcome: Outcome) -> Table:
    """Return a line for each rank: what becomes of its bytes, and its peaks."""
    plan = outcome.plan
    rows = []
    ranks = zip(plan.ranks, outcome.without.ranks, outcome.step.ranks, strict=True)
    for index, (rank, before, after) in enumerate(ranks):
        peaks = (before.peak_reserved_bytes, after.peak_reserved_bytes, after.peak_host_bytes)
        sizes = (rank.moved_bytes, rank.remade_bytes, rank.saved_bytes - rank.moved_bytes, *peaks)
        rows.append([index, *map(format_bytes, sizes)])
    peak = f"peak {outcome.source.memory}"
    columns = ["rank", "moved", "made again", "kept", peak, "with the plan", "host"]
    title = f"Plan of {outcome.source.title}, policy {plan.policy}: PREDICTED"
    return plain_table(title, columns, 0, rows)


def _policy_of(given: Given) -> PolicyConfig:
    targets, percent = given.device_target, given.max_cost
    if targets is None:
        return AutoConfig(kind="auto", most_slowdown_percent=1.0 if percent is None else percent)
    if percent is not None:
        raise ConfigError("give either --device-target or --max-cost")
    each = targets if len(targets) > 1 else targets[0]
    return MemoryTargetConfig(kind="memory_target", target_bytes=each)


def _curve(
    source: Source, chooser: Chooser, num_targets: int, say: Callable[[str], None]
) -> Iterator[TradeOffPoint]:
    """Yield what other settings bring: none, the run's own, and targets from the lowest up."""
    without = chooser.without
    yield _point("no offload", without, without)
    if source.recorded is not None:
        step = simulate(source.job, source.settings())
        yield _point("this run's own settings", step, without)
    lowest, highest = chooser.lowest_bytes, chooser.highest_bytes
    for index in range(num_targets if lowest < highest else 0):  # else nothing can move
        say(f"target {index + 1} of {num_targets} for the trade-off curve")
        target = lowest + (highest - lowest) * index // num_targets
        step = chooser.simulate(chooser.under((target,) * len(without.ranks)))
        yield _point(f"target {format_bytes(target)}", step, without)


def _point(
    label: str, step: Simulation, without: Simulation, *, is_plan: bool = False
) -> TradeOffPoint:
    return TradeOffPoint(
        label=label,
        peak_bytes=max(rank.peak_reserved_bytes for rank in step.ranks),
        step_time_percent=100 * (step.step_us / without.step_us - 1),
        is_predicted=True,
        is_plan=is_plan,
    )
