"""A run's folder: its files' names, who may write into it, and what an earlier run has left there.

What is refused is left as it was. A checkpoint's folder gets its final name by one rename when all
in it is on disk, and loses it first. What is read is data: nothing in it is imported or unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from filelock import FileLock, Timeout
from pydantic import Field

from megatron_offload.errors import ConfigError, shorten
from megatron_offload.files.strict_model import StrictModel, read_model, write_model
from megatron_offload.files.text import replace_text, sync_folder
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import COMPARISON_NAME, FOLDERS, LOG_NAME, read_steps

CONFIG_NAME = "config.yaml"
FACTS_NAME = "run.json"
PLAN_NAME = "plan.json"
"""The plan that a run has made and follows."""
_NUM_KEPT = 2
"""Newest checkpoints that are kept."""

_NAME = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,14})")
_MANIFEST = "checkpoint.json"


class RunFacts(StrictModel):
    """Where and with what a run was done."""

    device: str = Field(max_length=200)
    is_simulated: bool
    """Whether there was no GPU: times then say nothing about one."""
    ranks: int = Field(ge=1)
    date: datetime
    """When it was started, or resumed."""
    versions: dict[str, str] = Field(max_length=100)
    """Of Python and of the packages that decide what a run computes."""


@contextlib.contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Make folders, and lock them inside this context; their locks end with the process, too."""
    with contextlib.ExitStack() as stack:
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(folder / ".lock", blocking=False))
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


def check_output(config: TrainConfig, world_size: int) -> None:
    """Check that a run may write into its folder, or go on from a checkpoint there."""
    folder = config.run.output
    other = f"choose another run.output, or remove {folder}"
    logs = [folder / name / LOG_NAME for name in FOLDERS]
    if any(os.path.lexists(path) for path in (folder / COMPARISON_NAME, *logs)):
        raise ConfigError(f"run.output {folder} holds a comparison; {other}")
    latest = CheckpointFolder(folder).latest()
    if latest is None and not _has_steps(folder):
        return
    if not config.run.resume:
        found = (
            f"checkpoints up to {latest.name}; --resume goes on;" if latest else "an earlier run;"
        )
        raise ConfigError(f"run.output {folder} holds {found} {other} to start over")
    last = None if latest is None else read_checkpoint(latest, deciding(config, world_size)).step
    steps = read_steps(folder, last)
    if latest is None and steps and steps[-1].step >= config.run.steps:
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
    log = folder / LOG_NAME
    return log.stat().st_size > 0 if log.is_file() else os.path.lexists(log)


def prepare_folder(config: TrainConfig, gpu: str | None, ranks: int, *, is_new: bool) -> None:
    """Write down what is about to run; where it ``is_new``, what an earlier one measured goes."""
    from megatron_offload.machine.examine import found_versions  # imports torch

    folder = config.run.output
    CheckpointFolder(folder).clean()
    if is_new:
        for path in rank_files(folder, "trace") + rank_files(folder, "profile"):
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


def rank_files(folder: Path, kind: str) -> list[Path]:
    """Return the traces or profiles in a run's own folder, by rank."""
    name = re.compile(rf"{kind}_(0|[1-9]\d{{0,5}})\.json")
    found = {path: name.fullmatch(path.name) for path in folder.glob(f"{kind}_*")}
    ranks = {int(match[1]): path for path, match in found.items() if match}
    return [ranks[rank] for rank in sorted(ranks)]


class Manifest(StrictModel):
    """What a checkpoint holds."""

    format: Literal[7]
    """Of the files; a checkpoint of another one is refused."""
    step: Annotated[int, Field(ge=1, lt=10**15)]
    decides: dict[str, Any]
    """By `deciding`."""


class CheckpointFolder:
    """The checkpoints of the run whose folder, ``run.output``, is given."""

    def __init__(self, output: Path) -> None:
        self.path = output / "checkpoints"

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint, or None; `ConfigError` where they can't be read."""
        return next(reversed(self._whole()), None)

    def _whole(self) -> list[Path]:
        """Return what has the name of a checkpoint, oldest first."""
        try:
            entries = list(self.path.iterdir()) if self.path.exists() else []
        except OSError as error:
            raise ConfigError(f"can't read {self.path}: {error.strerror}") from error
        found = [entry for entry in entries if _NAME.fullmatch(entry.name)]
        return sorted(found, key=lambda entry: (len(entry.name), entry.name))

    def path_of(self, step: int) -> Path:
        """Return where the whole checkpoint of a step lies."""
        return self.path / f"step_{step:06d}"

    def part_of(self, step: int) -> Path:
        """Return where the checkpoint of a step lies while it is written or removed."""
        return self.path / f".step_{step:06d}.part"

    def begin(self, step: int) -> Path:
        """Make the empty folder that a checkpoint is written into."""
        part = self.part_of(step)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def publish(self, manifest: Manifest) -> None:
        """Describe a checkpoint whose tensors are on disk, name it, and remove what is too old."""
        part, path = self.part_of(manifest.step), self.path_of(manifest.step)
        write_model(part / _MANIFEST, manifest)
        os.rename(part, path)
        for folder in (self.path, self.path.parent):
            sync_folder(folder)
        for path in self._whole()[:-_NUM_KEPT]:
            part = path.with_name(f".{path.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            os.rename(path, part)
            shutil.rmtree(part, ignore_errors=True)

    def clean(self) -> None:
        """Remove what a killed run left half written or half removed."""
        for part in self.path.glob(".step_[0-9]*.part"):
            shutil.rmtree(part, ignore_errors=True)


_DECIDING: dict[str, Any] = {
    "model": True,
    "parallel": {"pipeline", "virtual"},
    "data": {"micro_batch_size", "microbatches"},
    "schedule": True,
    "run": {"seed", "steps"},
}


def deciding(config: TrainConfig, ranks: int, **more: str) -> dict[str, Any]:
    """Return what decides what a step computes, under its keys; all else may change in a resume."""
    chosen = config.model_dump(mode="json", include=_DECIDING)
    keys = {f"{name}.{key}": value for name, x in chosen.items() for key, value in x.items()}
    return keys | {"the number of ranks": ranks} | more


def read_checkpoint(path: Path, decides: dict[str, Any]) -> Manifest:
    """Return what a whole checkpoint holds, if a run that ``decides`` so computes may go on.

    ``run.steps``, on which the learning rate hangs, may be more where no steps were left.
    """
    manifest = read_model(Manifest, path / _MANIFEST)
    before = manifest.decides
    differing = {key for key, value in decides.items() if before.get(key) != value}
    if manifest.step == before.get("run.steps") and manifest.step < decides["run.steps"]:
        differing.remove("run.steps")
    if differing:
        lines = [
            f"{key} was {shorten(repr(before.get(key)))}, this run has {decides[key]!r}"
            for key in sorted(differing)
        ]
        raise ConfigError(
            f"{path} is of another run, so going on would not give its numbers: "
            f"{'; '.join(lines)}. Set that back, or start over in another run.output"
        )
    return manifest
