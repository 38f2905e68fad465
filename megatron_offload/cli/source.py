"""The described job that ``plan`` and ``simulate`` are about.

What was assumed of a machine is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

from pydantic_settings import CliPositionalArg
from rich.table import Table

from megatron_offload.cli.options import OptionsWithKeys
from megatron_offload.config import find_config
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import read_json
from megatron_offload.machine.profile import MachineProfile
from megatron_offload.planning.description import JobDescription, load_description
from megatron_offload.planning.job import Job
from megatron_offload.planning.simulate import Simulation, fair_rates
from megatron_offload.report.console import console, plain_table


@dataclass(frozen=True)
class Source:
    """A described job."""

    title: str
    described: JobDescription
    job: Job
    machine: str
    """Where the bandwidths come from, in words."""

    def show(
        self, without: Simulation, step: Simulation, what: str, tables: Iterable[Table]
    ) -> int:
        """Print whether a step ``what`` fits, its memory, tables, time, and what that rests on.

        Returned is 1 where it doesn't fit, else 0.
        """
        out, misfits = console(), list(self.misfits(step))
        change = 100 * (step.step_us / without.step_us - 1)
        for line in misfits or [self._fit(without, step, f"{what} at {change:+.2f} %")]:
            line = f"does not fit {what}: {line}" if misfits else line
            out.print(line, style="bold red" if misfits else "bold green")
        for table in (self._memory(without, step, what), *tables):
            out.print(table)
        out.print(
            f"step time: {without.step_us / 1e3:.1f} ms without offload, "
            f"{step.step_us / 1e3:.1f} ms {what} ({change:+.2f} %)"
        )
        host_bytes, node = self._on_node([rank.peak_host_bytes for rank in step.ranks])
        out.print(f"host memory: up to {format_bytes(host_bytes)} pinned on {node}")
        own_bytes, _ = self._on_node(self.job.optimizer_host_bytes)
        if own_bytes:
            out.print(
                f"optimizer offload: {format_bytes(own_bytes)} of host memory besides, and after "
                f"each step at least {self._optimizer_us(own_bytes) / 1e3:.1f} ms of copies"
            )
        out.print(f"bandwidths: {self.machine}")
        out.print(
            "predicted by simulation, not measured: hold it against a run before you rely on it",
            style="yellow",
        )
        return int(bool(misfits))

    def _memory(self, without: Simulation, step: Simulation, what: str) -> Table:
        rows = []
        for index, (before, after) in enumerate(zip(without.ranks, step.ranks, strict=True)):
            sizes = [before.peak_reserved_bytes, after.peak_reserved_bytes, after.peak_host_bytes]
            sizes += [after.offloaded_bytes, after.reloaded_bytes, after.recomputed_bytes]
            rows.append([index, *map(format_bytes, sizes), after.num_late])
        columns = ["rank", "peak reserved memory", what, "peak host", "offloaded", "reloaded"]
        title = f"Memory of {self.title}: PREDICTED"
        return plain_table(title, [*columns, "recomputed", "late"], 0, rows)

    def _fit(self, without: Simulation, step: Simulation, what: str) -> str:
        steps, there = (without, step), self.job.machine.device_bytes
        sizes = [max(rank.peak_reserved_bytes for rank in one.ranks) for one in steps]
        bare, size = map(format_bytes, sizes)
        of_all = f"of {format_bytes(there)} (machine.device_bytes)"
        if sizes[0] > there:
            return f"fits {what}: {size} reserved {of_all}, {bare} without"
        return f"fits without offload: {bare} reserved {of_all}, {size} {what}"

    def misfits(self, step: Simulation) -> Iterator[str]:
        """Yield what a step needs more of than there is."""
        device_bytes = max(rank.peak_reserved_bytes for rank in step.ranks)
        pinned = (rank.peak_host_bytes for rank in step.ranks)
        held = [*map(add, pinned, self.job.optimizer_host_bytes)]
        needs = {"device_bytes": (device_bytes, "a GPU"), "host_bytes": self._on_node(held)}
        for key, (needed, where) in needs.items():
            there = getattr(self.job.machine, key)
            if needed > there:
                sizes = f"{format_bytes(needed)} of {where}, which has {format_bytes(there)}"
                yield f"{sizes} (machine.{key})"

    def _optimizer_us(self, node_bytes: int) -> float:
        """Return what copying takes at least: a quarter of what lies there, each way."""
        job, machine = self.job, self.job.machine
        num_gpus = min(job.gpus_per_rank, machine.gpus_per_node)
        rank_rate = min(fair_rates(machine, num_gpus, 0, 0, 1)[2:])
        ways = (machine.node_d2h_gbps, machine.node_h2d_gbps)
        node_rate = 1e3 * min(machine.node_gbps / 2, *filter(None, ways))
        return max(max(job.optimizer_host_bytes) / rank_rate, node_bytes / node_rate) / 4

    def _on_node(self, sizes: Sequence[int]) -> tuple[int, str]:
        """Return what GPUs hold on a node's host at most, by rank; and what a node is."""
        job, size = self.job, self.job.ranks_per_node
        gpus_per_node = job.machine.gpus_per_node
        peaks = [num_bytes * min(job.gpus_per_rank, gpus_per_node) for num_bytes in sizes]
        nodes = [sum(peaks[first : first + size]) for first in range(0, len(peaks), size)]
        num_gpus = min(gpus_per_node, len(peaks) * job.gpus_per_rank)
        return max(nodes, default=0), f"a node of {num_gpus} GPU{'' if num_gpus == 1 else 's'}"


class SourceOptions(OptionsWithKeys):
    """What says which job it is."""

    keys = JobDescription

    folder: CliPositionalArg[Path | None] = None
    """Of a run that has found rows; ``plan`` alone reads it."""

    model: Path | None = None
    """A described job: a file, or the name of one in configs/models/."""

    machine: Path | None = None
    """Bandwidths: the JSON of 'doctor --output FILE'; else those of the description, else those
    measured with four H200s. Keys of the section 'machine' win."""


def load_source(given: SourceOptions) -> Source:
    """Return the job that the options name; `ConfigError` says all that is wrong with the input."""
    if given.model is None or given.folder is not None:
        raise ConfigError(
            "give a described job, --model FILE; what a run has found is shown by: "
            "megatron-offload plan --from RUN"
        )
    path = find_config(given.model, kind="models")
    machine = [f"machine={json.dumps(_read_machine(given.machine))}"] if given.machine else []
    described = load_description(path, [*machine, *given.set], given.typed)
    origin = str(given.machine or f"{path}, what it leaves out as measured with four H200s")
    return Source(path.stem, described, described.job(), with_flags(origin, "machine", given))


def with_flags(what: str, section: str, given: SourceOptions) -> str:
    """Return what counts in words, with the flags that say something else of a section."""
    flags = [item.strip() for item in given.set if re.match(rf"\s*{section}[.\s=]", item)]
    return "; ".join([what, *flags])


def _read_machine(path: Path) -> dict[str, Any]:
    data = read_json(path)
    found = data.get("profile") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not found.get("gpus"):
        raise ConfigError(
            f"{path} holds no bandwidths of GPUs; where there are some, run: megatron-offload "
            "doctor --output FILE; without --machine those of four H200s count"
        )
    return validate(MachineProfile, found, f"{path}: profile").machine().model_dump()
