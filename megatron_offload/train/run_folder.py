"""A run's folder: its files' names, who may write into it, and what an earlier run has left there.

What is refused is left as it was.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import yaml
from filelock import FileLock, Timeout
from pydantic import Field

from megatron_offload.core.trace import StepTrace, read_traces
from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, write_model
from megatron_offload.files.text import replace_text
from megatron_offload.planning.found import NAME as FRONTIER_NAME
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import COMPARISON_NAME, FOLDERS, LOG_NAME

CONFIG_NAME = "config.yaml"
FACTS_NAME = "run.json"


class RunFacts(StrictModel):
    """Where and with what a run was done."""

    device: str = Field(max_length=200)
    is_simulated: bool
    """Whether there was no GPU: times then say nothing about one."""
    ranks: int = Field(ge=1)
    date: datetime
    versions: dict[str, str] = Field(max_length=100)
    """Of Python and of the packages that decide what a run computes."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and lock it inside this context; the lock ends with the process, too."""
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"run.output {folder}: another run writes into it; wait until it is done, or "
            f"choose another run.output"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run.output {folder} can't be written: {error.strerror}; choose another one"
        ) from error
    try:
        yield
    finally:
        lock.release()


def check_output(folder: Path, *, is_for_comparison: bool = False) -> None:
    """Check that no other run has left anything in a folder; a comparison replaces another."""
    other = f"choose another run.output, or remove {folder} to start over"
    logs = [folder / name / LOG_NAME for name in FOLDERS]
    is_compared = any(os.path.lexists(path) for path in (folder / COMPARISON_NAME, *logs))
    if is_compared and not is_for_comparison:
        raise ConfigError(f"run.output {folder} holds a comparison; {other}")
    log = folder / LOG_NAME  # a run that failed before its first step is none
    if log.stat().st_size > 0 if log.is_file() else os.path.lexists(log):
        raise ConfigError(f"run.output {folder} holds an earlier run; {other}")


def prepare_folder(config: TrainConfig, gpu: str | None, ranks: int) -> None:
    """Write down what is about to run; what an earlier one measured goes."""
    from megatron_offload.machine.examine import found_versions  # imports torch

    folder = config.run.output
    folder.mkdir(exist_ok=True)
    (folder / FRONTIER_NAME).unlink(missing_ok=True)
    for path in trace_files(folder).values():
        path.unlink()
    facts = RunFacts(
        device=gpu or f"simulated on {os.cpu_count()} CPU cores",
        is_simulated=gpu is None,
        ranks=ranks,
        date=datetime.now(UTC).replace(microsecond=0),
        versions=found_versions(),
    )
    write_model(folder / FACTS_NAME, facts)
    write_config(config, folder)


def write_config(config: TrainConfig, folder: Path) -> None:
    """Write what was given, which may matter, as a file for ``--config`` that does the same."""
    given = config.model_dump(mode="json", exclude_unset=True)
    replace_text(folder / CONFIG_NAME, yaml.safe_dump(given, sort_keys=False))


def main_folder(folder: Path) -> Path:
    """Return the folder that a report is about: of a comparison, that with offload."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give run.output of a run")
    offloaded = folder / FOLDERS[1]
    return offloaded if offloaded.is_dir() else folder


def trace_files(folder: Path) -> dict[int, Path]:
    """Return the traces in a run's own folder, by rank."""
    name = re.compile(r"trace_(0|[1-9]\d{0,5})\.json")
    found = {path: name.fullmatch(path.name) for path in folder.glob("trace_*")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def read_timelines(folder: Path) -> list[StepTrace]:
    """Read the traces in a run's own folder, by rank; `ConfigError` for a damaged one."""
    traces: list[StepTrace] = []
    for rank, path in trace_files(folder).items():
        found = read_traces(path)
        if [one.rank for one in found] != [rank]:
            raise ConfigError(f"{path} must hold the timeline of rank {rank} alone")
        traces += found
    return traces
