"""The described job that ``plan`` and ``simulate`` are about.

What was assumed of a machine is said.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field
from pydantic_settings import CliPositionalArg, CliToggleFlag
from rich.table import Table

from megatron_offload.cli.options import OptionsWithKeys
from megatron_offload.config import apply_overrides, find_config, load_yaml
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import read_json, read_text
from megatron_offload.machine.profile import MachineProfile
from megatron_offload.planning import foreign
from megatron_offload.planning.advice import advice
from megatron_offload.planning.description import JobDescription, load_description
from megatron_offload.planning.found import Alternative, Alternatives
from megatron_offload.planning.job import Job, node_bytes
from megatron_offload.planning.simulate import Simulation
from megatron_offload.report.console import console, plain_table

_IN_A_STEP = "offloaded a step", "recomputed a step", "late reloads"
NEARLY = 0.96
"""Of a GPU's memory, above which a prediction is too near to be sure (docs/simulation.md)."""


@dataclass(frozen=True)
class Source:
    """A described job."""

    title: str
    described: JobDescription
    job: Job
    machine: str
    """Where the bandwidths come from, in words."""
    data: dict[str, Any]
    """The description, as it was given."""
    as_json: bool = False
    """Whether results are printed as JSON alone."""
    targets: tuple[int, ...] = ()
    """What each pipeline rank may reserve; none for what a GPU has."""

    @property
    def limits(self) -> list[int]:
        """What each pipeline rank may reserve and has."""
        there, num_ranks = self.job.machine.device_bytes, self.job.schedule.num_ranks
        return [min(there, target) for target in self.targets or [there] * num_ranks]

    def print_description(self) -> int:
        """Print the description as YAML that can be given in its place, or as JSON; return 0."""
        as_yaml = yaml.safe_dump(self.data, sort_keys=False)
        console().print(json.dumps(self.data, indent=1) + "\n" if self.as_json else as_yaml, end="")
        return 0

    def show(
        self,
        without: Simulation,
        step: Simulation,
        what: str,
        tables: Iterable[Table],
        verdict: str,
        found: Mapping[str, Any] | None = None,
    ) -> int:
        """Print the verdict on a step ``what``, tables, time, and what that rests on.

        As JSON it is numbers, and what was ``found`` besides. Returned is 1 where it doesn't fit,
        else 0.
        """
        out, misfits = console(), [*self.misfits(step)]
        if self.as_json:
            keys = ["peak_reserved_bytes", "peak_host_bytes", "num_late"]
            keys += [f"{x}_bytes" for x in ("offloaded", "reloaded", "recomputed")]
            said = self.summary(what, step, without).model_dump()
            said |= {"fits": not misfits, "misfits": misfits}
            said |= {"verdict": verdict, **(found or {})}
            said["without_offload"] = self.summary("nothing", without, without).model_dump()
            said |= {"step_ms": step.step_us / 1e3, "step_ms_without": without.step_us / 1e3}
            said["ranks"] = [{key: getattr(rank, key) for key in keys} for rank in step.ranks]
            out.print(json.dumps(said, indent=1))
            return int(bool(misfits))
        out.print(verdict, style="bold red" if misfits else "bold green")
        for table in tables:
            out.print(table)
        change = 100 * (step.step_us / without.step_us - 1)
        out.print(
            f"step time: {without.step_us / 1e3:.1f} ms without offload, "
            f"{step.step_us / 1e3:.1f} ms {what} ({change:+z.2f} %)"
        )
        host_bytes = node_bytes(self.job, [rank.peak_host_bytes for rank in step.ranks])
        out.print(f"host memory: up to {format_bytes(host_bytes)} pinned on {self._node}")
        out.print(f"GPUs: {self.job.gpus_per_rank * len(step.ranks)} in all")
        out.print(f"bandwidths: {self.machine}")
        out.print(
            "predicted by simulation, not measured: hold it against a run before you rely on it",
            style="yellow",
        )
        return int(bool(misfits))

    def summary(
        self, what: str, step: Simulation, without: Simulation, kind: str = ""
    ) -> Alternative:
        """Return what is done in a step, and what that needs and takes at most."""
        peaks = [rank.peak_host_bytes for rank in step.ranks]
        does = ["recompute"] if any(rank.recomputed_bytes for rank in step.ranks) else []
        does += ["offload"] if any(rank.offloaded_bytes for rank in step.ranks) else []
        return Alternative(
            what=what,
            kind=kind or " and ".join(does) or "nothing",
            fits=not any(self.misfits(step)),
            reserved_bytes=max(rank.peak_reserved_bytes for rank in step.ranks),
            node_host_bytes=node_bytes(self.job, peaks),
            takes_longer_percent=100 * (step.step_us / without.step_us - 1),
        )

    def verdict(
        self,
        without: Simulation,
        step: Simulation,
        what: str,
        first: Iterable[str] = (),
    ) -> str:
        """Return whether a step ``what`` fits; if not, also what to try, ``first`` before all."""
        there = self.job.machine.device_bytes
        (more, bare, limit), (_, size, own_limit) = self.tightest(without), self.tightest(step)
        if misfits := [f"does not fit {what}: {line}" for line in self.misfits(step)]:
            host = "\nto fit: give machine.host_bytes if a node has more"
            return "\n".join(misfits) + (self.to_fit(there, first) if size > there else host)
        what += f" at {100 * (step.step_us / without.step_us - 1):+z.2f} % of the step's time"
        needed, limit = (size, own_limit) if more > 0 else (bare, limit)
        barely = "barely " if needed > NEARLY * limit else ""
        of_all = f"{format_bytes(needed)} reserved of {self.named(limit)}"
        if more > 0:
            return f"{barely}fits {what}: {of_all}, {format_bytes(bare)} without"
        return f"{barely}fits without offload: {of_all}, {format_bytes(size)} {what}"

    def alternatives(self, verdict: str, each: Iterable[Alternative]) -> Alternatives:
        """Return what may be done, side by side, and what is said of it."""
        found, there = tuple(each), self.job.machine.device_bytes
        return Alternatives(title=self.title, verdict=verdict, device_bytes=there, each=found)

    def to_fit(self, device_bytes: int, first: Iterable[str] = ()) -> str:
        """Return a line of what lets a job fit so much memory of a GPU; "" if nothing is known."""
        helps = [*first, *filter(None, [advice(self.described, device_bytes)])]
        return f"\nto fit: {', or '.join(helps)}" if helps else ""

    def memory_table(self, without: Simulation, step: Simulation, what: str) -> Table:
        """Return what each rank needs without anything, and with ``what`` is done in a step."""
        rows = []
        for index, (plain, rank) in enumerate(zip(without.ranks, step.ranks, strict=True)):
            sizes = [plain.peak_reserved_bytes, rank.peak_reserved_bytes, rank.peak_host_bytes]
            sizes += [rank.offloaded_bytes, rank.recomputed_bytes]
            rows.append([index, *map(format_bytes, sizes), rank.num_late])
        columns = ["rank", "without", what, "host", *_IN_A_STEP]
        title = f"Reserved memory and pinned host of a GPU of each rank of {self.title}: PREDICTED"
        return plain_table(title, columns, 0, rows)

    def misfits(self, step: Simulation) -> Iterator[str]:
        """Yield what a step needs more of than there is."""
        more, size, limit = self.tightest(step)
        if more > 0:
            may = "has" if limit == self.job.machine.device_bytes else "may take"
            yield f"{format_bytes(size)} of a GPU, which {may} {self.named(limit)}"
        needed = node_bytes(self.job, [rank.peak_host_bytes for rank in step.ranks])
        if needed > (there := self.job.machine.host_bytes):
            sizes = f"{format_bytes(needed)} of {self._node}, which has {format_bytes(there)}"
            yield f"{sizes} (machine.host_bytes)"

    def tightest(self, step: Simulation) -> tuple[int, int, int]:
        """Return by how much the rank exceeds its limit that has least to spare, and both."""
        pairs = zip((rank.peak_reserved_bytes for rank in step.ranks), self.limits, strict=True)
        return max((size - limit, size, limit) for size, limit in pairs)

    def named(self, limit: int) -> str:
        """Return what a rank may reserve, with what says so."""
        is_all = limit == self.job.machine.device_bytes
        which = "machine.device_bytes" if is_all else "--memory-target"
        return f"{format_bytes(limit)} ({which})"

    @property
    def _node(self) -> str:
        """What a node is, in words."""
        job = self.job
        num_gpus = min(job.machine.gpus_per_node, job.schedule.num_ranks * job.gpus_per_rank)
        return f"a node of {num_gpus} GPU{'' if num_gpus == 1 else 's'}"


class SourceOptions(OptionsWithKeys):
    """What says which job it is."""

    keys = JobDescription

    job: CliPositionalArg[Path | None] = None
    """A described job: a file, or the name of one in configs/models/."""

    hf: Path | None = None
    """The config.json of a model of transformers, or its folder, of which a job is made."""

    megatron: str | None = None
    """The arguments of a Megatron-LM job, in one text, or a script with them, likewise."""

    print_: CliToggleFlag[bool] = Field(default=False, alias="print")
    """Print the description, to be edited, and nothing else."""

    json_: CliToggleFlag[bool] = Field(default=False, alias="json")
    """Print JSON in place of tables."""

    machine: Path | None = None
    """Bandwidths: the JSON of 'doctor --output FILE'; else those of the description, else those of
    its machine.gpu, else those measured with four H200s. Keys of the section 'machine' win."""


def load_source(given: SourceOptions) -> Source:
    """Return the job that the options name; `ConfigError` says all that is wrong with the input."""
    measured = _read_machine(given.machine) if given.machine else {}
    machine = [f"machine.{key}={json.dumps(value)}" for key, value in measured.items()]
    overrides, names, job = [*machine, *given.set], dict[str, str](), given.job
    if (job and job.is_dir()) or sum(map(bool, (job, given.hf, given.megatron))) != 1:
        raise ConfigError(
            "give one described job, NAME, a FILE, --hf config.json or --megatron ARGUMENTS; "
            "what a run has found is shown by: megatron-offload plan --from RUN"
        )
    if job is not None:
        path = find_config(job, kind="models")
        title, name, data = path.stem, str(path), load_yaml(path)
        if "model_type" in data:
            raise ConfigError(f"{path} is a config.json of transformers: give it behind --hf")
        rates = ("model.peak_tflops", "model.memory_gbps")
        names = {key: f"{path.name}: machine.gpu (or {key})" for key in rates}
    elif given.hf is not None:
        path = given.hf / "config.json" if given.hf.is_dir() else given.hf
        title = name = str(path)
        data = foreign.describe(foreign.from_hugging_face, read_json(path), name)
        names = foreign.names_in("hugging_face", path.name)
    else:
        title, name, text = "the Megatron job", "--megatron", given.megatron or ""
        if os.path.isfile(text):
            title, text = text, read_text(text)
        elif "--" not in text:
            raise ConfigError(f"--megatron: no script {text!r}, and no argument in it")
        replicas = apply_overrides({"model": {}}, given.set)["model"].get("data_parallel")
        data = foreign.describe(partial(foreign.from_megatron, replicas=replicas), text, name)
        names = foreign.names_in("megatron", name, "--")
    described = load_description(name, overrides, {**names, **given.typed}, data)
    gpu, data = described.machine.gpu, apply_overrides(data, overrides)
    others = f"by the data sheet of {gpu}" if gpu else "as measured with four H200s"
    origin = str(given.machine or f"{name}, what it leaves out {others}")
    origin = with_flags(origin, "machine", given)
    return Source(title, described, described.job(), origin, data, given.json_)


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
            "doctor --output FILE; without --machine those of the description or its GPU count"
        )
    profile = validate(MachineProfile, found, f"{path}: profile")
    return profile.machine().model_dump(exclude_unset=True)
