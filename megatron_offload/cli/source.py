"""What ``plan`` and ``simulate`` are about: the profiles of a run's folder, or a described model.

Peaks are those of reserved memory where the run had a GPU; of saved activations alone where it had
none. What was assumed of a machine is said.
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
from megatron_offload.config import LOSS, OffloadConfig, apply_overrides, find_config, load_yaml
from megatron_offload.core.machine import MachineProfile
from megatron_offload.core.policy_config import RatioConfig
from megatron_offload.core.profile import StepProfile
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import read_json
from megatron_offload.planning import description, profiled_job
from megatron_offload.planning.files import load_profile
from megatron_offload.planning.job import LIMITS, Job, RankSettings
from megatron_offload.planning.policy import ModulesPolicy, kept_by_rule
from megatron_offload.planning.simulate import Simulation, fair_rates, settings_of
from megatron_offload.report.console import console
from megatron_offload.train import run_folder


@dataclass(frozen=True)
class Recorded:
    """The settings of a run."""

    path: Path
    """Of the file that holds them."""
    offload: OffloadConfig

    @classmethod
    def read(cls, folder: Path) -> Recorded | None:
        """Return what a run's folder has of them, if it has."""
        path = folder / run_folder.CONFIG_NAME
        if not path.exists():
            return None
        return cls(path, validate(OffloadConfig, load_yaml(path).get("offload") or {}, str(path)))

    @property
    def policy(self) -> ModulesPolicy | RatioConfig:
        """What decided in the run: its policy, or Megatron's numbers.

        Raises:
            ConfigError: rows did.
        """
        config = self.offload
        if config.has_rows or config.tuned_policy is not None:
            raise ConfigError(f"{self.path}: the run had rows, which are not simulated")
        if isinstance(config.policy, RatioConfig):
            return config.policy
        delta_bytes = int(config.delta_bytes_across_pp_ranks)
        return ModulesPolicy(config.fraction, 0, config.modules, delta_bytes)

    def not_simulated(self, peak_host_bytes: int) -> Iterator[str]:
        """Yield what a simulated step leaves out, with the most that a rank has on its host."""
        config, cap = self.offload, self.offload.host_memory_bytes
        if cap is not None and cap < peak_host_bytes:
            yield f"host_memory_bytes {format_bytes(cap)}, which the step would exceed"
        for name in ("pin_memory", "copy_streams"):
            if not getattr(config, name):
                yield f"{name} false"


@dataclass(frozen=True)
class Source:
    """A job, and what its ranks have seen of a step without offload."""

    title: str
    job: Job
    profiles: tuple[StepProfile, ...]
    """Of each pipeline rank of a run, in order."""
    around: description.Surroundings
    memory: str
    """Which memory peaks are of, such as "reserved memory"."""
    machine: str
    """Where the bandwidths come from, in words."""
    recorded: Recorded | None = None
    """What the run was set to; None for a job that was only described, or by another program."""
    short: Job | None = None
    """A described job with fewer microbatches; see `JobDescription.short_job`."""

    @property
    def default(self) -> RankSettings:
        """What a rank does where its rule says nothing else: the flags', then the run's."""
        flags = self.around.offload
        given: dict[str, Any] = {}
        for section in (self.recorded.offload if self.recorded else description.Budgets(), flags):
            given |= section.model_dump(include={*LIMITS}, exclude_unset=True)
        if "recompute" not in flags.model_fields_set:
            return RankSettings(**given)
        kinds = {unit.unit for stage in self.job.stages for g in stage.groups for unit in g.units}
        for name in {*flags.recompute} - {*kinds, LOSS}:
            raise ConfigError(
                f"offload.recompute: the job has no kind {name!r}{did_you_mean(name, kinds)}"
            )
        return RankSettings(**given, recompute=kinds.intersection(flags.recompute))

    def settings(self) -> list[RankSettings]:
        """Return what each rank does: what it did in the run, else offload all that it can.

        Flags win over both. ConfigError: the run had rows.
        """
        if self.recorded is None:
            return [self.default] * self.job.schedule.num_ranks
        rule = self.recorded.policy
        ranks = ((profile, kept_by_rule(rule, profile)) for profile in self.profiles)
        return [settings_of(*rank, self.default) for rank in ranks]

    def show(
        self,
        without: Simulation,
        step: Simulation,
        what: str,
        tables: Iterable[Table],
        more: Iterable[str] = (),
    ) -> None:
        """Print a step ``what``: whether it fits, tables, time, and what all of it rests on."""
        out = console()
        for line in self._misfits(step):
            out.print(line, style="bold red")
        for table in tables:
            out.print(table)
        change = 100 * (step.step_us / without.step_us - 1)
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
        for line in more:
            out.print(line)
        if self.recorded is not None:
            most_bytes = max(rank.peak_host_bytes for rank in step.ranks)
            if left_out := "; ".join(self.recorded.not_simulated(most_bytes)):
                out.print(f"not simulated of the run's settings: {left_out}")
        out.print(f"bandwidths: {self.machine}")
        out.print(
            "predicted by simulation, not measured: hold it against a run before you rely on it",
            style="yellow",
        )

    def _misfits(self, step: Simulation) -> Iterator[str]:
        device_bytes = max(rank.peak_reserved_bytes for rank in step.ranks)
        held = [rank.peak_host_bytes for rank in step.ranks]
        if own := self.job.optimizer_host_bytes:
            held = [*map(add, held, own)]
        needs = {"device_bytes": (device_bytes, "a GPU"), "host_bytes": self._on_node(held)}
        for key, (needed, where) in needs.items():
            there = getattr(self.job.machine, key)
            if there is not None and needed > there:
                sizes = f"{format_bytes(needed)} of {where}, which has {format_bytes(there)}"
                yield f"DOES NOT FIT: {sizes} (machine.{key})"

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
    """What says which job it is. Of a run's folder only the keys of machine and offload count."""

    keys = description.JobDescription

    folder: CliPositionalArg[Path | None] = None
    """run.output of a train or compare run that had run.profile_step."""

    model: Path | None = None
    """A described job instead: a file, or the name of one in configs/models/."""

    machine: Path | None = None
    """Bandwidths: the JSON of 'doctor --output FILE'; else those of the description or of the
    profiles, else those measured with four H200s. Keys of the section 'machine' win."""


def load_source(given: SourceOptions) -> Source:
    """Return the job that the options name; `ConfigError` says all that is wrong with the input."""
    if given.model is not None and given.folder is None:
        return _described(find_config(given.model, kind="models"), given)
    if given.folder is not None and given.model is None:
        return _profiled(given.folder, given)
    raise ConfigError("give either a run's folder or --model FILE")


def _described(path: Path, given: SourceOptions) -> Source:
    machine = [f"machine={json.dumps(_read_machine(given.machine))}"] if given.machine else []
    described = description.load_description(path, [*machine, *given.set])
    job = described.job()
    origin = str(given.machine or f"{path}, what it leaves out as measured with four H200s")
    origin = with_flags(origin, "machine", given)
    memory, short = "reserved memory", described.short_job()
    return Source(path.stem, job, (), described, memory, origin, short=short)


def _profiled(folder: Path, given: SourceOptions) -> Source:
    place = run_folder.main_folder(folder)
    paths = run_folder.rank_files(place, "profile")
    if not paths:
        raise ConfigError(
            f"{folder} holds no profile_<rank>.json; run again with offload.policy: modules and "
            "run.profile_step: 3"
        )
    seen = [load_profile(path) for path in paths]
    profiles = profiled_job.check_profiles(
        {one.run.pp_rank: one for one in reversed(seen)}.values()
    )
    facts = place / run_folder.FACTS_NAME
    data = read_json(facts) if facts.exists() else None
    is_simulated = isinstance(data, dict) and data.get("is_simulated") is True
    machine = profiled_job.slowest_link(seen)
    if given.machine is not None:
        section, origin = _read_machine(given.machine), str(given.machine)
    elif machine is not None:
        section, origin = machine.model_dump(exclude_unset=True), profiled_job.FROM_COPIES
    else:
        section = {}
        origin = "the defaults, measured with four H200s; --machine FILE takes others"
    around = validate(
        description.Surroundings, apply_overrides({"machine": section}, given.set), "--set"
    )
    return Source(
        title=folder.resolve().name,
        job=profiled_job.job_of(profiles, profiled_job.schedule_of(profiles), around.machine),
        profiles=profiles,
        around=around,
        memory="saved activations" if is_simulated else "reserved memory",
        machine=with_flags(origin, "machine", given),
        recorded=Recorded.read(place),
    )


def with_flags(what: str, section: str, given: SourceOptions) -> str:
    """Return what counts in words, with the flags that say something else of a section."""
    flags = [item.strip() for item in given.set if re.match(rf"\s*{section}[.\s=]", item)]
    return "; ".join([what, *flags])


def _read_machine(path: Path) -> dict[str, Any]:
    data = read_json(path)
    found = data.get("profile") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not found.get("gpus"):
        raise ConfigError(
            f"{path} holds no bandwidths of GPUs; run: megatron-offload doctor --output FILE"
        )
    return validate(MachineProfile, found, f"{path}: profile").machine().model_dump()
