"""The command ``simulate``: what a step takes without and with offload, with no GPU at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from megatron_offload.cli.output import PREDICTED, check_place, draw_timelines, progress, writing
from megatron_offload.cli.source import Source, SourceOptions, load_source
from megatron_offload.core.trace import write_traces
from megatron_offload.core.units import format_bytes
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.plan_file import load_plan
from megatron_offload.planning.simulate import Simulation, settings_of, simulate
from megatron_offload.planning.streams import PIPELINE, RELEASE, RELOAD
from megatron_offload.report.console import console, plain_table

ABOUT = """\
Predict one training step without and with offload, with no GPU: time, stalls by cause, memory.

reads    the YAML of --model, or RUN_FOLDER/profile_<rank>.json and bandwidths.json, which
         run.profile_step makes a run leave (of a comparison, its run with offload); of a run also
         config.yaml, and the plan that it followed: what moves, and within which budgets, is what
         the run did, unless --plan, a file of 'megatron-offload plan', or --set offload.KEY=VALUE
         says otherwise; of a described model everything that can move does
prints   what was simulated, the step's time, and for every pipeline rank: compute, the part of it
         that makes again what was not kept, what it waits for other stages (pipeline), for copies
         to the host whose memory is wanted (W2) and for reloads (W4), peak device and host bytes,
         what moved and what was made again; all predicted, not measured
writes   --trace: the timeline with offload for https://ui.perfetto.dev; --png: a picture of it

exit status: 0 simulated, 2 bad input

example: megatron-offload simulate --model gpt_16x8192_pp4_vpp2 \\
             --set offload.max_inflight_bytes=3GiB offload.prefetch_bytes=2GiB --png step.png
"""


class Given(SourceOptions):
    """The options of ``simulate``."""

    plan: Path | None = None
    """Follow this plan."""

    trace: Path | None = None
    """Write the timeline (JSON)."""

    png: Path | None = None
    """Draw the timeline, of the first 16 ranks."""


def run(given: Given) -> int:
    """Simulate both steps, print them and write what was asked for; return 0."""
    check_place("--trace", given.trace)
    check_place("--png", given.png, draws=True)
    with progress("simulating") as say:
        source = load_source(given)
        settings = _settings(source, given.plan)
        say("the step without offload")
        without = simulate(source.job)
        say("the step with offload")
        offloaded = simulate(source.job, settings, record=bool(given.trace or given.png))
    out = console()
    for line in source.misfits(offloaded):
        out.print(line, style="bold red")
    _show(source, without, offloaded, out)
    for line in _describe(source, given, offloaded):
        out.print(line)
    out.print(f"bandwidths: {source.machine}")
    out.print(PREDICTED, style="yellow")
    traces = [rank.trace for rank in offloaded.ranks if rank.trace is not None]
    if given.trace is not None:
        with writing(given.trace):
            write_traces(given.trace, traces)
        out.print(f"trace: {given.trace}, for https://ui.perfetto.dev")
    if given.png is not None:
        out.print(draw_timelines(traces, given.png, f"{source.title}, predicted"))
    return 0


def _settings(source: Source, plan_path: Path | None) -> Sequence[RankSettings]:
    """Return what each rank does: what the plan says, or what the run did, or all that can move."""
    if plan_path is None:
        return source.as_run()
    plan = load_plan(plan_path)
    for profile in source.profiles:
        plan.check(profile)
    return settings_of(plan, source.default)


def _describe(source: Source, given: Given, step: Simulation) -> Iterator[str]:
    """Yield what the step with offload is, and what of a run it leaves out."""
    recorded = source.recorded
    if given.plan is not None:
        what = f"the plan {given.plan}"
    elif recorded is not None:
        what = f"as the run did, by {recorded.path}: {recorded.describe()}"
    else:
        what = "everything that can move"
    flags = [one for one in given.set if one.strip().startswith("offload.")]
    yield f"with offload: {'; '.join([what, *flags])}"
    if recorded is not None and given.plan is None:
        left_out = recorded.not_simulated(max(rank.peak_host_bytes for rank in step.ranks))
        if left_out:
            yield f"not simulated of what the run was set to: {', '.join(left_out)}"


def _show(source: Source, without: Simulation, offloaded: Simulation, out: Console) -> None:
    times = plain_table(
        f"Time of {source.title} in ms: PREDICTED",
        [
            "rank",
            "ends without",
            "with offload",
            "compute",
            "made again",
            "pipeline",
            "W2 release",
            "W4 reload",
        ],
    )
    memory = plain_table(
        f"Memory of {source.title}: PREDICTED",
        [
            "rank",
            f"peak {source.memory}",
            "with offload",
            "peak host",
            "out",
            "back",
            "made again",
            "late",
        ],
    )
    for index, (plain, rank) in enumerate(zip(without.ranks, offloaded.ranks, strict=True)):
        stalls = (rank.stall_us[cause] for cause in (PIPELINE, RELEASE, RELOAD))
        spent_us = (plain.end_us, rank.end_us, rank.compute_us, rank.remade_us, *stalls)
        times.add_row(str(index), *(f"{us / 1e3:.1f}" for us in spent_us))
        sizes = (
            *(plain.peak_reserved_bytes, rank.peak_reserved_bytes, rank.peak_host_bytes),
            *(rank.offloaded_bytes, rank.reloaded_bytes, rank.remade_bytes),
        )
        memory.add_row(str(index), *map(format_bytes, sizes), str(rank.num_late))
    out.print(times)
    out.print(memory)
    out.print(
        f"step time: {without.step_us / 1e3:.1f} ms without offload, "
        f"{offloaded.step_us / 1e3:.1f} ms with it "
        f"({100 * (offloaded.step_us / without.step_us - 1):+.2f} %)"
    )
