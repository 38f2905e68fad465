r"""Predict one training step without and with offload, with no GPU: time, stalls by cause, memory.

reads    a described job: a YAML file or the name of one, or of what --hf and --megatron make one
prints   whether it fits, the step's time, and for every pipeline rank: compute, the part of it that
         recomputes what was not kept, what it waits for launches (host), for other stages
         (pipeline), for copies to the host whose memory is wanted (W2) and for reloads (W4), peak
         device and host bytes, what was offloaded and what was recomputed; all predicted, not
         measured. Norms and activations are recomputed, where they may be, and all others offloaded
         that can be, within the budgets that --set offload.KEY=VALUE gives
writes   --trace: the timeline with offload for https://ui.perfetto.dev

exit status: 0 it fits with offload, 1 it doesn't, 2 bad input

example: megatron-offload simulate gpt_16x8192_pp4_vpp2 \
             --set offload.max_inflight_bytes=3GiB offload.prefetch_bytes=2GiB --trace step.json
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from megatron_offload.cli.options import OutputFile, writing
from megatron_offload.cli.source import Source, SourceOptions, load_source, with_flags
from megatron_offload.core.trace import PIPELINE_WAIT, write_traces
from megatron_offload.planning.advice import fits
from megatron_offload.planning.job_rows import units_of, with_units
from megatron_offload.planning.simulate import RELEASE, RELOAD, Simulation, simulate
from megatron_offload.report.console import console, plain_table


class Given(SourceOptions):
    """The options of ``simulate``."""

    trace: OutputFile | None = None
    """Write the timeline (JSON)."""


def run(given: Given) -> int:
    """Simulate both steps, print them and write what was asked for; return 1 if it doesn't fit."""
    with console(stderr=True).status("simulating"):
        source = load_source(given)
        if given.print_:
            return source.print_description()
        without = simulate(source.job)
        settings = source.described.offload
        units = settings.recomputable(units_of(source.job))
        job = with_units(source.job, units)
        offloaded = simulate(job, settings, record=given.trace is not None)
    tables = _tables(source, without, offloaded)
    there = source.job.machine.device_bytes
    other = "megatron-offload plan, which recomputes layers too"
    first = (other for one in (source.described,) if fits(one, there))  # counted where it is asked
    verdict = source.verdict(without, offloaded, "with offload", first)
    status = source.show(without, offloaded, "with offload", tables, verdict)
    out = console(quiet=given.json_)
    again = f"others, recompute {', '.join(units)}" if units else "everything"
    what = with_flags(f"offload {again}", "offload", given)
    out.print(f"with offload: {what}")
    if given.trace is not None:
        traces = [rank.trace for rank in offloaded.ranks if rank.trace is not None]
        with writing(given.trace):
            write_traces(given.trace, traces)
        out.print(f"trace: {given.trace}, for https://ui.perfetto.dev")
    return status


def _tables(source: Source, without: Simulation, offloaded: Simulation) -> Iterator[Table]:
    times = []
    for index, (plain, rank) in enumerate(zip(without.ranks, offloaded.ranks, strict=True)):
        stalls = (rank.stall_us[cause] for cause in (PIPELINE_WAIT, RELEASE, RELOAD))
        spent_us = (plain.end_us, rank.end_us, rank.compute_us - rank.host_us, rank.recompute_us)
        times.append([index, *(f"{us / 1e3:.1f}" for us in (*spent_us, rank.host_us, *stalls))])
    columns = ["rank", "without", "offload", "compute", "recompute"]
    columns += ["host", "pipeline", "copies", "reloads"]
    title = f"Time of {source.title} in ms, in the end what it waits for: PREDICTED"
    yield plain_table(title, columns, 0, times)
    yield source.memory_table(without, offloaded, "with offload")
