"""What ``plan`` and ``simulate`` are about: the profiles of a run's folder, or a described model.

Profiles are those of one whole run, one of each pipeline rank. They hold no temporaries, and not
what the allocator wastes: all that a run's groups don't explain of each rank's measured peak counts
as always there. Peaks are those of reserved memory where the run had a GPU; of saved activations
alone where it had none. What was assumed of a machine is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_settings import CliPositionalArg

from megatron_offload.cli.options import OptionsWithKeys
from megatron_offload.config import OffloadConfig, apply_overrides, find_config, load_yaml
from megatron_offload.core.machine import Machine
from megatron_offload.core.policy_config import AutoConfig, MemoryTargetConfig, PlanFileConfig
from megatron_offload.core.profile import StepProfile
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError, did_you_mean
from megatron_offload.files.strict_model import validate
from megatron_offload.files.text import read_json
from megatron_offload.machine.profile import MachineProfile
from megatron_offload.planning.bandwidths import (
    BANDWIDTHS_NAME,
    DEFAULTS,
    link_machine,
    load_bandwidths,
    measured_machine,
)
from megatron_offload.planning.description import (
    Budgets,
    JobDescription,
    Surroundings,
    load_description,
)
from megatron_offload.planning.job import Job, RankSettings
from megatron_offload.planning.plan import OffloadPlan, check_profiles
from megatron_offload.planning.plan_file import load_plan
from megatron_offload.planning.policy import ModulesPolicy, plan_by_rule
from megatron_offload.planning.profile_file import load_profile
from megatron_offload.planning.profiled_job import job_of, profiles_of, schedule_of
from megatron_offload.planning.schedule import make_schedule
from megatron_offload.planning.simulate import Simulation, settings_of

_PROFILE_NAME = re.compile(r"profile_(0|[1-9]\d{0,5})\.json")
PLAN_NAME = "plan.json"
_SIZES = ("max_inflight_bytes", "prefetch_bytes", "host_slab_bytes")
_RUN_FIELDS = ("num_microbatches", "pp_size", "vp_size", "modules", "versions")


@dataclass(frozen=True)
class Recorded:
    """The settings of a run."""

    path: Path
    """Of the file that holds them."""
    offload: OffloadConfig

    @property
    def own_plan(self) -> Path | None:
        """The file of the plan that the run made and followed, if it came to that."""
        path = self.path.parent / PLAN_NAME
        return path if self.offload.tuned_policy is not None and path.exists() else None

    def settings(
        self, profiles: Sequence[StepProfile], default: RankSettings
    ) -> list[RankSettings]:
        """Return what each pipeline rank did, with these budgets where no plan says others."""
        plan = self._plan(profiles)
        if plan is None:
            return [self._by_numbers(profile, default) for profile in profiles]
        for profile in profiles:
            plan.check(profile)
        return settings_of(plan, default)

    def describe(self) -> str:
        """Return what decided in the run, in words."""
        config = self.offload
        if isinstance(config.policy, PlanFileConfig):
            return f"the plan {config.policy.path}"
        if self.own_plan is not None:
            return f"its own plan {self.own_plan}"
        words = [f"policy {config.policy.kind}"] if config.policy is not None else []
        for name in ("fraction", *_SIZES, "delta_bytes_across_pp_ranks"):
            value = getattr(config, name)
            if name in config.model_fields_set and value is not None:
                words.append(f"{name} {value if name == 'fraction' else format_bytes(value)}")
        return ", ".join(words) or "the package's own budgets"

    def not_simulated(self, peak_host_bytes: int) -> list[str]:
        """Return which settings the simulation leaves out, with the most that a rank's host had."""
        config = self.offload
        found = []
        if config.host_memory_bytes is not None and config.host_memory_bytes < peak_host_bytes:
            found.append(f"host_memory_bytes {format_bytes(config.host_memory_bytes)}")
        if config.device_target_bytes is not None and config.policy is None:
            found.append(f"device_target_bytes {format_bytes(config.device_target_bytes)}")
        switches = ("pin_memory", "copy_streams")
        return found + [f"{name} false" for name in switches if not getattr(config, name)]

    def _plan(self, profiles: Sequence[StepProfile]) -> OffloadPlan | None:
        """Return the plan that decided, if one did."""
        policy = self.offload.policy
        if self.own_plan is not None:
            return load_plan(self.own_plan)
        if policy is None or isinstance(policy, AutoConfig | MemoryTargetConfig):
            return None
        try:
            return plan_by_rule(policy, profiles)
        except ConfigError as error:
            raise ConfigError(
                f"{self.path}: offload.policy: {error}; --plan FILE takes another"
            ) from error

    def _by_numbers(self, profile: StepProfile, default: RankSettings) -> RankSettings:
        """Return what Megatron's numbers decide on a rank."""
        config, pp_rank = self.offload, profile.run.pp_rank
        policy = ModulesPolicy(config.fraction, pp_rank * config.delta_bytes_across_pp_ranks)
        unlisted = {group.key for group in profile.groups if group.name not in config.modules}
        kept = unlisted.union(policy.plan(profile))
        return replace(default, kept=frozenset(kept))


@dataclass(frozen=True)
class Source:
    """A job, and what its ranks have seen of a step without offload."""

    title: str
    job: Job
    profiles: tuple[StepProfile, ...]
    """Of each pipeline rank, in order."""
    around: Surroundings
    memory: str
    """Which memory peaks are of, such as "reserved memory"."""
    machine: str
    """Where the bandwidths come from, in words."""
    recorded: Recorded | None = None
    """What the run was set to; None for a job that was only described, or by another program."""

    @property
    def default(self) -> RankSettings:
        """What counts where no plan says something else: the flags', then the run's."""
        given: dict[str, Any] = {}
        run = self.recorded.offload if self.recorded else Budgets()
        for section in (run, self.around.offload):
            given |= {n: getattr(section, n) for n in _SIZES if n in section.model_fields_set}
        chosen = self.around.offload.recompute
        if "recompute" not in self.around.offload.model_fields_set:
            return RankSettings(**given)
        units = {unit.unit for stage in self.job.stages for g in stage.groups for unit in g.units}
        for name in set(chosen) - units:
            raise ConfigError(
                f"offload.recompute: the job has no unit {name!r}{did_you_mean(name, units)}"
            )
        num_virtual = len(self.job.schedule.stages_of(0))
        return RankSettings(**given, recompute=(frozenset(chosen),) * num_virtual)

    def as_run(self) -> list[RankSettings]:
        """Return what each rank does, as the run did it; flags win. Without a run, `default`.

        Raises:
            ConfigError: the run followed a plan that can't be read, or is another run's.
        """
        if self.recorded is None:
            return [self.default] * self.job.schedule.num_ranks
        return self.recorded.settings(self.profiles, self.default)

    def misfits(self, step: Simulation) -> Iterator[str]:
        """Yield what of a step doesn't fit into a GPU or a node."""
        machine = self.job.machine
        device_bytes = max(rank.peak_reserved_bytes for rank in step.ranks)
        host_bytes, num_gpus = self._host_bytes(step)
        for needed, where, there, key in (
            (device_bytes, "of a GPU", machine.device_bytes, "device_bytes"),
            (host_bytes, f"of a node of {num_gpus} GPUs", machine.host_bytes, "host_bytes"),
        ):
            if there is not None and needed > there:
                yield (
                    f"DOES NOT FIT: {format_bytes(needed)} {where}, which has "
                    f"{format_bytes(there)} (machine.{key})"
                )

    def host_memory(self, step: Simulation) -> str:
        """Return what a step takes of the host, in words."""
        num_bytes, num_gpus = self._host_bytes(step)
        return f"host memory: up to {format_bytes(num_bytes)} pinned on a node of {num_gpus} GPUs"

    def _host_bytes(self, step: Simulation) -> tuple[int, int]:
        """Return the most that is pinned on a node, and how many GPUs that is for."""
        job, size = self.job, self.job.ranks_per_node
        gpus_per_node = job.machine.gpus_per_node
        peaks = [
            rank.peak_host_bytes * min(job.gpus_per_rank, gpus_per_node) for rank in step.ranks
        ]
        nodes = [sum(peaks[first : first + size]) for first in range(0, len(peaks), size)]
        return max(nodes), min(gpus_per_node, len(peaks) * job.gpus_per_rank)


class SourceOptions(OptionsWithKeys):
    """What says which job it is. Of a run's folder only the keys of machine and offload count."""

    keys = JobDescription

    folder: CliPositionalArg[Path | None] = None
    """run.output of a train or compare run that had run.profile_step."""

    model: Path | None = None
    """A described job instead: a file, or the name of one in configs/models/."""

    schedule: str | None = None
    """gpipe, 1f1b, interleaved or zb-h1; of a run, what it was seen to run."""

    machine: Path | None = None
    """Bandwidths: the JSON of 'doctor --output FILE', or YAML with keys of the section 'machine';
    else those of the description or that the run has left, else those measured with four H200s."""


def load_source(given: SourceOptions) -> Source:
    """Return the job that the options name.

    Raises:
        ConfigError: everything that is wrong with the input.
    """
    if given.model is not None and given.folder is None:
        return _described(find_config(given.model, kind="models"), given)
    if given.folder is not None and given.model is None:
        return _profiled(given.folder, given)
    raise ConfigError("give either a run's folder or --model FILE")


def _described(path: Path, given: SourceOptions) -> Source:
    overrides = given.set
    if given.schedule is not None:
        overrides = (*overrides, f"model.schedule={given.schedule}")
    section = None if given.machine is None else _read_machine(given.machine)
    described = load_description(path, overrides, machine=section)
    job = described.job()
    origin = str(given.machine or f"{path}, what it leaves out as measured with four H200s")
    num_gpus = job.machine.gpus_per_node
    if num_gpus != described.machine.gpus_per_node:
        origin += f"; taken for a node of {num_gpus} GPUs, unless machine.gpus_per_node says other"
    return Source(
        title=path.stem,
        job=job,
        profiles=tuple(profiles_of(job)),
        around=described,
        memory="reserved memory",
        machine=origin,
    )


def _profiled(folder: Path, given: SourceOptions) -> Source:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give run.output of a run")
    paths = find_profiles(folder)
    if not paths:
        raise ConfigError(
            f"{folder} holds no profile_<rank>.json; run again with offload and run.profile_step=3"
        )
    profiles, place = _of_one_run(paths), paths[0].parent
    facts = place / "run.json"
    data = read_json(facts) if facts.exists() else None
    is_simulated = isinstance(data, dict) and data.get("is_simulated") is True
    path = place / "config.yaml"
    recorded = None
    if path.exists():
        given_then = load_yaml(path).get("offload") or {}
        recorded = Recorded(path, validate(OffloadConfig, given_then, str(path)))
    measured = place / BANDWIDTHS_NAME
    bandwidths = load_bandwidths(measured) if measured.exists() else None
    gpus_per_rank = bandwidths.gpus_per_rank if bandwidths else 1
    section: dict[str, Any] = {}
    if given.machine is not None:
        section, origin = _read_machine(given.machine), str(given.machine)
    elif bandwidths is not None:
        section, origin = bandwidths.machine.model_dump(), f"{measured}: {bandwidths.origin}"
    elif is_simulated and recorded is not None:
        device = recorded.offload.simulated
        section = link_machine(device.d2h_gbps, device.h2d_gbps).model_dump()
        origin = f"the simulated device's, by {recorded.path}"
    else:
        origin = f"{DEFAULTS}; --machine FILE takes others"
    around = validate(Surroundings, apply_overrides({"machine": section}, given.set), "--set")
    passes, shape = schedule_of(profiles), profiles[0].run
    if given.schedule is not None:
        sizes = shape.pp_size, shape.num_microbatches, shape.vp_size
        passes = make_schedule(given.schedule, *sizes)
    return Source(
        title=folder.resolve().name,
        job=job_of(profiles, passes, around.machine, gpus_per_rank=gpus_per_rank),
        profiles=profiles,
        around=around,
        memory="saved activations" if is_simulated else "reserved memory",
        machine=origin,
        recorded=recorded,
    )


def find_profiles(folder: Path) -> list[Path]:
    """Return the profiles that a run has left, in the order of ranks."""
    for place in (folder, folder / "with_offload"):  # where a comparison keeps the run that moves
        paths = {
            int(match[1]): path
            for path in (place.iterdir() if place.is_dir() else ())
            if (match := _PROFILE_NAME.fullmatch(path.name))
        }
        if paths:
            return [paths[rank] for rank in sorted(paths)]
    return []


def _read_machine(path: Path) -> dict[str, Any]:
    """Return the section ``machine`` of a YAML file, or of the doctor's JSON."""
    if path.suffix != ".json":
        section = load_yaml(path)
        if section and not section.keys() & Machine.model_fields.keys():
            raise ConfigError(
                f"{path} holds no bandwidths; give YAML with keys such as d2h_gbps, or the JSON of "
                "'megatron-offload doctor --output FILE'"
            )
        return validate(Machine, section, str(path)).model_dump(exclude_unset=True)
    data = read_json(path)
    if isinstance(data, dict) and "profile" in data:
        data = data["profile"]
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no measured bandwidths; run: megatron-offload doctor")
    profile = validate(MachineProfile, data, str(path))
    if not profile.gpus:
        raise ConfigError(f"{path} is of a machine without a GPU")
    return measured_machine([profile.gpus]).model_dump()


def _of_one_run(paths: Sequence[Path]) -> tuple[StepProfile, ...]:
    by_rank: dict[int, StepProfile] = {}
    first = None
    for path in paths:
        profile = load_profile(path)
        if path.name != f"profile_{profile.run.rank}.json":
            raise ConfigError(
                f"{path} is of rank {profile.run.rank}; put the file back or run again"
            )
        first = first or profile
        for name in _RUN_FIELDS:
            ours, others = getattr(profile.run, name), getattr(first.run, name)
            if ours != others:
                raise ConfigError(
                    f"{path} and {paths[0].name} are of different runs: {name} {ours} and {others}"
                )
        replica = by_rank.setdefault(profile.run.pp_rank, profile)
        if not replica.has_groups_of(profile):
            raise ConfigError(
                f"{path} and profile_{replica.run.rank}.json are of the same pipeline rank and "
                "have other groups: they are of different runs"
            )
    return check_profiles(by_rank.values())
