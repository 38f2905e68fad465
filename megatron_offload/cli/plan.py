"""The command ``plan``: chooses what moves, says why and what it brings, and writes it down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import CliToggleFlag
from rich.console import Console

from megatron_offload.cli.output import PREDICTED, check_place, progress, writing
from megatron_offload.cli.source import PLAN_NAME, Source, SourceOptions, load_source
from megatron_offload.core.policy_config import (
    AutoConfig,
    MemoryTargetConfig,
    ModulesConfig,
    PolicyConfig,
    RatioConfig,
)
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.files.strict_model import TargetBytes, validate
from megatron_offload.planning.choice import Chooser
from megatron_offload.planning.plan import OffloadPlan
from megatron_offload.planning.plan_file import save_plan
from megatron_offload.planning.simulate import Simulation, simulate
from megatron_offload.report.console import console, plain_table
from megatron_offload.report.tables import plan_list, plan_table
from megatron_offload.report.tradeoff import TradeOffPoint, write_tradeoff

ABOUT = """\
Choose what moves to the host, from the profiles of a run or from a described model, with no GPU.

reads    RUN_FOLDER/profile_<rank>.json and bandwidths.json, which run.profile_step makes a run
         leave (of a comparison, its run with offload); or the YAML of --model
prints   for every pipeline rank what moves, what stays, peak memory and step time; for every kind
         of group why; all predicted, not measured
writes   the plan to --output (RUN_FOLDER/plan.json unless given, in the place of one that is there;
         with --model nothing is written without --output), and the predicted trade-off curve to
         tradeoff.json beside it. 'megatron-offload report RUN_FOLDER' shows both; with
         'offload: {policy: {kind: plan_file, path: FILE}}' a run follows the plan

policies: auto           the most memory that costs no more than --max-cost of the step's time
          memory_target  the quickest that brings every rank under --device-target
          modules        Megatron's rules: --modules, and --fraction of each chunk's groups
          ratio          --ratio of each rank's bytes

exit status: 0 planned, 1 the target can't be kept, 2 bad input

example: megatron-offload plan --model gpt_16x8192_pp4_vpp2 \\
             --device-target 26GiB --output plan.json
"""

_KINDS: dict[str, Any] = {
    "auto": AutoConfig,
    "memory_target": MemoryTargetConfig,
    "modules": ModulesConfig,
    "ratio": RatioConfig,
}

_FLAGS = {
    "max_cost": ("auto", "most_slowdown_percent"),
    "device_target": ("memory_target", "target_bytes"),
    "modules": ("modules", "modules"),
    "fraction": ("modules", "fraction"),
    "ratio": ("ratio", "ratio"),
}
"""The policy that a flag belongs to, and its key there."""

_NEEDED = {"memory_target": "device_target", "ratio": "ratio"}


def _without_sign(value: Any) -> Any:
    return value.removesuffix("%") if isinstance(value, str) else value


class Given(SourceOptions):
    """The options of ``plan``."""

    policy: str | None = None
    """See above; that of the flags given, else auto."""

    device_target: tuple[TargetBytes, ...] | None = None
    """Most device memory of every pipeline rank, such as 26GiB; or one size for each."""

    max_cost: Annotated[float, BeforeValidator(_without_sign), Field(ge=0, le=1000)] | None = None
    """Percent that the step may take longer at most; 1 unless set."""

    modules: tuple[str, ...] | None = None
    """Names or patterns of groups."""

    fraction: float | None = None
    """Share of each chunk's groups that moves."""

    ratio: float | None = None
    """Share of each rank's bytes that moves."""

    output: Path | None = None
    """Where the plan goes."""

    curve: int = Field(default=6, ge=0, le=64)
    """Memory targets on the trade-off curve; 0 for none."""

    groups: CliToggleFlag[bool] = False
    """List every group with its reason."""


@dataclass(frozen=True)
class Outcome:
    """A plan, and what simulating says of it."""

    source: Source
    plan: OffloadPlan
    step: Simulation
    """With the plan."""
    without: Simulation
    """The same step without offload."""
    points: tuple[TradeOffPoint, ...]
    """Of the trade-off curve."""


def run(given: Given) -> int:
    """Plan, print and write; return 0."""
    output = given.output or (given.folder and given.folder / PLAN_NAME)
    check_place("--output", output)
    kind, keys = _policy_of(given)
    with progress("planning") as say:
        source = load_source(given)
        recorded = source.recorded
        if recorded is not None and recorded.own_plan == output:
            raise ConfigError(
                f"{output} is the plan that the run made and followed; --output FILE takes another"
            )
        outcome = make(source, policy_config(source, kind, keys), given.curve, say)
    out = console()
    _show(outcome, out, lists_groups=given.groups)
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
    """Return a plan with what is predicted of it, and of others.

    Args:
        source: the job.
        config: the policy.
        num_targets: memory targets that the trade-off curve has; 0 leaves it out.
        say: told how far it is.

    Raises:
        ConfigError: as for `run`.
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
    """Write a plan with what is predicted of it, and the trade-off curve beside it.

    Returns:
        The curve's file, which a report looks for; None where there is no curve.

    Raises:
        ConfigError: a file can't be written.
    """
    with writing(path):
        save_plan(outcome.plan, path)
    if not outcome.points:
        return None
    curve = path.parent / "tradeoff.json"
    with writing(curve):
        write_tradeoff(curve, outcome.source.memory, outcome.points)
    return curve


def _show(outcome: Outcome, out: Console, *, lists_groups: bool) -> None:
    """Print ranks, groups and reasons, and what all of it rests on."""
    plan, step, without = outcome.plan, outcome.step, outcome.without
    for line in outcome.source.misfits(step):
        out.print(line, style="bold red")
    title = f"Plan of {outcome.source.title}, policy {plan.policy}: PREDICTED"
    peak = f"peak {outcome.source.memory}"
    ranks = plain_table(
        title, ["rank", "moved", "made again", "kept", peak, "with the plan", "host"]
    )
    for index, (rank, before, after) in enumerate(
        zip(plan.ranks, without.ranks, step.ranks, strict=True)
    ):
        peaks = (before.peak_reserved_bytes, after.peak_reserved_bytes, after.peak_host_bytes)
        sizes = (rank.moved_bytes, rank.remade_bytes, rank.saved_bytes - rank.moved_bytes, *peaks)
        ranks.add_row(str(index), *map(format_bytes, sizes))
    out.print(ranks)
    change = 100 * (step.step_us / without.step_us - 1)
    out.print(
        f"step time: {without.step_us / 1e3:.1f} ms without offload, "
        f"{step.step_us / 1e3:.1f} ms with the plan ({change:+.2f} %)"
    )
    out.print(outcome.source.host_memory(step))
    if outcome.source.recorded is not None:
        host_bytes = max(rank.peak_host_bytes for rank in step.ranks)
        for setting in outcome.source.recorded.not_simulated(host_bytes):
            out.print(f"not simulated of what the run was set to: {setting}")
    out.print(plan_list(plan) if lists_groups else plan_table(plan))
    out.print(f"bandwidths: {plan.bandwidths}")
    out.print(PREDICTED, style="yellow")


def _policy_of(given: Given) -> tuple[str, dict[str, Any]]:
    """Return the kind of the policy, and the keys that were given of it."""
    flags = [name for name in _FLAGS if getattr(given, name) is not None]
    kind = given.policy or next((_FLAGS[name][0] for name in flags), "auto")
    if kind not in _KINDS:
        raise ConfigError(f"unknown --policy {kind!r}{did_you_mean(kind, _KINDS)}")
    for name in flags:
        if _FLAGS[name][0] != kind:
            raise ConfigError(
                f"--{name.replace('_', '-')} belongs to --policy {_FLAGS[name][0]}, not to {kind}"
            )
    needed = _NEEDED.get(kind)
    if needed and needed not in flags:
        raise ConfigError(f"--policy {kind} needs --{needed.replace('_', '-')}")
    keys = {_FLAGS[name][1]: getattr(given, name) for name in flags}
    if len(keys.get("target_bytes", ())) == 1:
        (keys["target_bytes"],) = keys["target_bytes"]
    return kind, keys


def policy_config(
    source: Source, kind: str = "auto", keys: Mapping[str, Any] | None = None
) -> PolicyConfig:
    """Return the section ``policy`` of a kind, for the machine and the budgets of a job.

    Raises:
        ConfigError: a key is wrong, or one of its ``modules`` is no group of the job.
    """
    keys = keys or {}
    names = {group.name for profile in source.profiles for group in profile.groups}
    for pattern in keys.get("modules", ()):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"no group is called {pattern!r}{did_you_mean(pattern, names)}")
    return validate(_KINDS[kind], {"kind": kind, **keys}, f"--policy {kind}")


def _curve(
    source: Source, chooser: Chooser, num_targets: int, say: Callable[[str], None]
) -> Iterator[TradeOffPoint]:
    """Yield what other settings bring: none, the run's own, and targets from the lowest up."""
    without = chooser.without
    yield _point("no offload", without, without)
    if source.recorded is not None:
        step = simulate(source.job, source.as_run())
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
