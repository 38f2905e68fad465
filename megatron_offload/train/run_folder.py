"""A run's folder: its files' names, who may write into it, and what an earlier run has left there.

Invariants: one run at a time writes into a folder, and what is refused is left as it was.
``config.yaml`` holds what was given and nothing else, so that the same command with it does the
same run; which settings were left to the package matters to some of them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import stat
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import yaml
from filelock import FileLock, Timeout
from pydantic import Field

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, read_model
from megatron_offload.files.text import replace_text
from megatron_offload.machine.checks import found_version
from megatron_offload.planning.bandwidths import BANDWIDTHS_NAME
from megatron_offload.train.checkpoint_folder import CheckpointFolder, read_checkpoint
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import COMPARISON_NAME, FOLDERS, LOG_NAME, read_steps

CONFIG_NAME = "config.yaml"

_FACTS_NAME, _LOCK_NAME = "run.json", ".lock"
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


@contextlib.contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Make folders, and let no other process run into them inside this context.

    The locks are those of open files, so that they end with the process, however it ends.
    """
    with contextlib.ExitStack() as stack:
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(folder / _LOCK_NAME, blocking=False))
            except Timeout as error:
                raise ConfigError(
                    f"run.output {folder}: another run writes into it; wait until it is done, or "
                    f"choose another run.output"
                ) from error
            except OSError as error:
                raise ConfigError(
                    f"run.output {folder} can't be written: {error.strerror}; choose another one"
                ) from error
        yield


def check_output(config: TrainConfig, world_size: int, *, is_restarted: bool) -> None:
    """Check that a run may write into its folder: no other run and no comparison lies there.

    With ``run.resume``, or ``is_restarted`` by its launcher, it goes on from a checkpoint where
    there is one.
    """
    folder = config.run.output
    other = f"choose another run.output, or remove {folder}"
    logs = [folder / name / LOG_NAME for name in FOLDERS]
    if any(os.path.lexists(path) for path in (folder / COMPARISON_NAME, *logs)):
        raise ConfigError(f"run.output {folder} holds a comparison; {other}")
    latest = CheckpointFolder(folder).latest()
    is_resumed = config.run.resume or is_restarted
    if latest is not None:
        if not is_resumed:
            raise ConfigError(
                f"run.output {folder} holds checkpoints up to {latest.name}; go on from there with "
                f"--resume, {other} to start over"
            )
        read_steps(folder, read_checkpoint(latest, config, world_size).step, world_size)
    elif not is_restarted and _has_steps(folder):
        if not is_resumed:
            raise ConfigError(f"run.output {folder} holds an earlier run; {other} to start over")
        steps, _ = read_steps(folder)
        if steps and steps[-1].step >= config.run.steps:
            raise ConfigError(
                f"run.output {folder} holds a run whose {steps[-1].step} steps are done, and no "
                f"checkpoint to go on from (run.checkpoint_interval); {other} to start over"
            )


def check_comparison(folder: Path) -> None:
    """Check that a comparison may write into a folder, where it replaces an earlier comparison."""
    found = [path for name in FOLDERS if (path := CheckpointFolder(folder / name).latest())]
    if found or _has_steps(folder):
        raise ConfigError(
            f"run.output {folder} holds a run ({found[0] if found else LOG_NAME}) and not a "
            f"comparison; choose another run.output, or remove {folder}"
        )


def _has_steps(folder: Path) -> bool:
    """Return whether a step was taken; a run that failed before its first is none."""
    try:
        found = os.lstat(folder / LOG_NAME)
    except FileNotFoundError:
        return False
    return found.st_size > 0 or not stat.S_ISREG(found.st_mode)


def prepare_folder(config: TrainConfig, gpu: str | None, ranks: int, *, is_new: bool) -> None:
    """Write down what is about to run; for one rank of a run alone.

    Timelines, profiles and bandwidths of an earlier run go where this one ``is_new``. ``gpu`` is
    what rank 0's is called.
    """
    folder = config.run.output
    if is_new:
        for path in list(folder.iterdir()):
            if _RANK_NAME.fullmatch(path.name) or path.name == BANDWIDTHS_NAME:
                path.unlink()
    facts = RunFacts(
        device=gpu or f"simulated on {os.cpu_count()} CPU cores",
        is_simulated=gpu is None,
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
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = found_version(package)
    return versions


def write_config(config: TrainConfig, folder: Path) -> None:
    """Write what was given of a configuration, as a file for ``--config``."""
    given = config.model_dump(mode="json", exclude_unset=True)
    replace_text(folder / CONFIG_NAME, yaml.safe_dump(given, sort_keys=False))


def read_facts(folder: Path) -> RunFacts | None:
    """Read what `prepare_folder` wrote; None where there is no such file."""
    path = folder / _FACTS_NAME
    return read_model(RunFacts, path) if path.exists() else None


def main_folder(folder: Path) -> Path:
    """Return the folder that a report is about: of a comparison, that with offload."""
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


def plan_path(folder: Path) -> Path:
    """Return the file of the plan that a run has made and follows."""
    return folder / "plan.json"


def trace_paths(folder: Path) -> dict[int, Path]:
    """Return the timelines that a folder holds by rank, in the order of ranks."""
    found = ((_RANK_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(x[2]), path) for x, path in found if x and x[1] == "trace"))
