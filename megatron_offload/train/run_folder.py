"""What a run's folder holds besides its steps: configuration, facts, timelines, profiles.

Owns the names of these files and how they are written and found. Must not know what is in a
trace or a profile, nor the loop.

Invariant: ``config.yaml`` holds what was given and nothing else, so that the same command with it
does the same run; which settings were left to the package matters to some of them.
Read next: `megatron_offload.cli.report`, which reads the folder.
"""

from __future__ import annotations

import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import yaml
from pydantic import Field

from megatron_offload.config import StrictModel, validate
from megatron_offload.errors import ConfigError
from megatron_offload.files.text import read_json, replace_text
from megatron_offload.machine.checks_software import found_version
from megatron_offload.planning.bandwidths import BANDWIDTHS_NAME
from megatron_offload.train.comparison import COMPARISON_NAME, FOLDERS
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.parallel import Device
from megatron_offload.train.records import LOG_NAME

__all__ = [
    "CONFIG_NAME",
    "RunFacts",
    "found_versions",
    "has_facts",
    "main_folder",
    "plan_path",
    "prepare_folder",
    "profile_path",
    "read_facts",
    "trace_path",
    "trace_paths",
    "write_config",
]

CONFIG_NAME = "config.yaml"

_FACTS_NAME = "run.json"
_RANK_NAME = re.compile(r"(trace|profile)_(0|[1-9]\d{0,5})\.json")
_PACKAGES = ("megatron-offload", "torch", "megatron-core", "transformer-engine", "numpy")


class RunFacts(StrictModel):
    """Where and with what a run was done."""

    device: str = Field(max_length=200)
    """Name of rank 0's device."""

    is_simulated: bool
    """Whether there was no GPU: times then say nothing about one."""

    ranks: int = Field(ge=1)
    """Processes of the run."""

    date: datetime
    """When it was started, or resumed."""

    versions: dict[str, str] = Field(max_length=100)
    """Of Python and of the packages that decide what a run computes."""


def prepare_folder(config: TrainConfig, device: Device, ranks: int, *, is_new: bool) -> None:
    """Write down what is about to run; for one rank of a run alone.

    Args:
        config: the run.
        device: this rank's.
        ranks: processes of the run.
        is_new: whether the run starts over, so that an earlier one's timelines, profiles and
            bandwidths are not its own.

    Raises:
        OSError: the folder can't be written.
    """
    folder = config.run.output
    folder.mkdir(parents=True, exist_ok=True)
    if is_new:
        for path in list(folder.iterdir()):
            if _RANK_NAME.fullmatch(path.name) or path.name == BANDWIDTHS_NAME:
                path.unlink()
    facts = RunFacts(
        device=device.name,
        is_simulated=not device.on_gpu,
        ranks=ranks,
        date=datetime.now(UTC).replace(microsecond=0),
        versions=found_versions(),
    )
    replace_text(folder / _FACTS_NAME, facts.model_dump_json(indent=2) + "\n")
    write_config(config, folder)


def found_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = found_version(package)
        except PackageNotFoundError:
            continue
    return versions


def write_config(config: TrainConfig, folder: Path) -> None:
    """Write what was given of a configuration, as a file for ``--config``."""
    given = config.model_dump(mode="json", exclude_unset=True)
    replace_text(folder / CONFIG_NAME, yaml.safe_dump(given, sort_keys=False))


def has_facts(folder: Path) -> bool:
    """Whether a run has left what `read_facts` reads."""
    return (folder / _FACTS_NAME).exists()


def read_facts(folder: Path) -> RunFacts:
    """Read what `prepare_folder` wrote.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    path = folder / _FACTS_NAME
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping, got a {type(data).__name__}")
    return validate(RunFacts, data, str(path))


def main_folder(folder: Path) -> Path:
    """Return the folder of the run that a report is about: of a comparison, the one with offload.

    Raises:
        ConfigError: there is no such folder, or it holds a comparison and a run of its own.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give run.output of a run")
    if not (folder / COMPARISON_NAME).exists():
        return folder
    if (folder / LOG_NAME).exists():
        raise ConfigError(
            f"{folder} holds a comparison ({COMPARISON_NAME}) and another run ({LOG_NAME}); remove "
            f"one of these files"
        )
    return folder / FOLDERS[1]


def trace_path(folder: Path, rank: int) -> Path:
    """Return the file of one rank's timeline."""
    return folder / f"trace_{rank}.json"


def profile_path(folder: Path, rank: int) -> Path:
    """Return the file of one rank's profile."""
    return folder / f"profile_{rank}.json"


def plan_path(folder: Path) -> Path:
    """Return the file of the plan that a run has made and follows."""
    return folder / "plan.json"


def trace_paths(folder: Path) -> dict[int, Path]:
    """Return the timelines that a folder holds by rank, in the order of ranks."""
    names = (_RANK_NAME.fullmatch(path.name) for path in folder.iterdir())
    ranks = sorted(int(match[2]) for match in names if match and match[1] == "trace")
    return {rank: trace_path(folder, rank) for rank in ranks}
