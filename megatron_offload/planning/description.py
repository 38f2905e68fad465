"""A training job as a YAML file: a model, the machine that it runs on, and what offload may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ByteSize, Field

from megatron_offload.config import apply_overrides, load_yaml
from megatron_offload.core.machine import Machine
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import Bytes, StrictModel, validate
from megatron_offload.planning.job import Job, RankSettings
from megatron_offload.planning.memory_target import Resources
from megatron_offload.planning.model_cost import ModelDescription, job_from_model

_TRAINERS = frozenset({"data", "optimizer", "parallel", "run", "schedule"})
"""Sections of the trainer's configuration that no description has."""

_SETTINGS = RankSettings()


class Budgets(StrictModel):
    """The device memory of copies, and the pieces of host memory, as in ``OffloadConfig``."""

    max_inflight_bytes: Bytes | None = None
    """Device memory for groups on their way out. None leaves it to the package."""

    prefetch_bytes: Bytes | None = None
    """Device memory for groups that are back ahead of their use. None leaves it to the package."""

    host_slab_bytes: Bytes = Field(default=ByteSize(_SETTINGS.host_slab_bytes), gt=0)
    """Pinned memory comes in pieces of this."""

    def over(self, settings: RankSettings) -> RankSettings:
        """Return settings with those replaced that were given here."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return replace(settings, **given)


class Surroundings(StrictModel):
    """What stands around a model: machine and budgets."""

    machine: Machine = Machine()
    offload: Budgets = Budgets()

    def resources(self, gpus_per_rank: int = 1) -> Resources:
        """Return what a plan may use."""
        budgets = self.offload
        return Resources(
            self.machine, gpus_per_rank, budgets.max_inflight_bytes, budgets.prefetch_bytes
        )


class JobDescription(Surroundings):
    """A model and what stands around it."""

    model: ModelDescription

    def job(self) -> Job:
        """Return the step that it describes; `ConfigError` where no schedule has these sizes."""
        return job_from_model(self.model, self.machine)


def load_description(
    path: str | Path, overrides: Sequence[str] = (), *, machine: Mapping[str, Any] | None = None
) -> JobDescription:
    """Read a job; `ConfigError` says all that is wrong, one line each.

    Args:
        path: the file's.
        overrides: ``section.key=value`` pairs that win over the file.
        machine: a section in the place of the file's.
    """
    data = load_yaml(path)
    if data.keys() & _TRAINERS:
        raise ConfigError(
            f"{path} is a configuration of 'train' (it has the section "
            f"{min(data.keys() & _TRAINERS)!r}), and no description of a job; run it with "
            "run.profile_step=3 and give its folder, or write a file as configs/models/ has them"
        )
    if machine is not None:
        data["machine"] = dict(machine)
    return validate(JobDescription, apply_overrides(data, overrides), str(path))
