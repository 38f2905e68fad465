"""Where checkpoints lie, which of them are whole, and what their plain files say.

Invariants: a folder under its final name is whole, because it gets that name by one rename after
everything in it is on disk; a whole one is removed only by first taking that name away. What is
read is data: nothing in it is imported, called or unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, read_model, validate
from megatron_offload.files.text import open_regular, read_json, replace_text, sync_folder
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import Bits

FORMAT = 3
"""Of the files in a checkpoint; others are refused."""

_NAME = re.compile(r"step_([0-9]{6,15})")
_PART_NAME = re.compile(r"\.step_[0-9]{6,15}\.part")
_MANIFEST, _CONFIG = "checkpoint.json", "config.json"
_MAX_MANIFEST_BYTES = 256 * 1024**2

_FileName = Annotated[str, Field(pattern=r"^(stage|rank)_[0-9]{1,9}_[0-9]{1,9}\.safetensors$")]


class Manifest(StrictModel):
    """What a checkpoint holds."""

    format: int
    step: Annotated[int, Field(ge=1, lt=10**15)]
    """Training steps that were done."""
    ranks: Annotated[int, Field(ge=1)]
    device: str
    """Kind of device, ``cpu`` or ``cuda``."""
    data: str
    """Digest of the training data."""
    evaluations: dict[int, Bits]
    """Evaluation losses so far, by step."""
    versions: dict[str, str]
    """What wrote it, for people."""
    files: dict[_FileName, str]
    """Digest of every file that holds tensors, by `digest_of_file`."""


class CheckpointFolder:
    """The checkpoints of the run whose folder, ``run.output``, is given."""

    def __init__(self, output: Path) -> None:
        self.path = output / "checkpoints"

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint, or None.

        A folder that is none, or something that only looks like a checkpoint, is a `ConfigError`.
        """
        found = [entry for entry in self._entries() if entry.name.startswith("step_")]
        for entry in found:
            if _step(entry.name) is None:
                raise ConfigError(
                    f"{entry} is no name of a checkpoint (step_000010 is one); move it elsewhere"
                )
            if entry.is_symlink() or not entry.is_dir():
                raise ConfigError(f"{entry} is no folder; move it elsewhere")
        return max(found, key=lambda entry: (len(entry.name), entry.name), default=None)

    def path_of(self, step: int) -> Path:
        """Return where the whole checkpoint of a step lies."""
        return self.path / _name(step)

    def part_of(self, step: int) -> Path:
        """Return where the checkpoint of a step lies while it is written or removed."""
        return self.path / f".{_name(step)}.part"

    def begin(self, step: int) -> Path:
        """Make the empty folder that a checkpoint is written into; raises as `latest` does."""
        self._entries()
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.part_of(step)
        _remove(part)
        part.mkdir()
        return part

    def publish(self, manifest: Manifest, config: TrainConfig) -> None:
        """Describe a checkpoint whose tensors are on disk, and give it its final name."""
        part, path = self.part_of(manifest.step), self.path_of(manifest.step)
        replace_text(part / _MANIFEST, manifest.model_dump_json())
        replace_text(part / _CONFIG, config.model_dump_json(indent=2))
        os.rename(part, path)
        for folder in (self.path, self.path.parent):
            sync_folder(folder)

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints; what has another name is left alone."""
        steps = (_step(entry.name) for entry in self._entries())
        for step in sorted(step for step in steps if step is not None)[:-keep]:
            part = self.part_of(step)
            _remove(part)
            os.rename(self.path_of(step), part)
            _remove(part)

    def clean(self) -> None:
        """Remove what a killed run left half written or half removed."""
        for entry in self._entries():
            if _PART_NAME.fullmatch(entry.name):
                _remove(entry)

    def _entries(self) -> list[Path]:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise ConfigError(
                f"{self.path} is a link or no folder; checkpoints need a folder of that name: move "
                f"it elsewhere or choose another run.output"
            )
        try:
            return list(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"can't read {self.path}: {error.strerror}") from error


def read_checkpoint(path: Path, config: TrainConfig, world_size: int) -> Manifest:
    """Return what a whole checkpoint holds, if this run may go on from it."""
    data = read_json(path / _MANIFEST, limit_bytes=_MAX_MANIFEST_BYTES)
    form = data.get("format") if isinstance(data, dict) else None
    if form != FORMAT:
        raise ConfigError(
            f"{path / _MANIFEST} is of format {str(form)[:20]}, this version reads {FORMAT}; go on "
            f"with the version that wrote it, or start over in another run.output"
        )
    manifest = validate(Manifest, data, str(path / _MANIFEST))
    if path.name != _name(manifest.step):
        raise ConfigError(
            f"{path / _MANIFEST} is of step {manifest.step}, but its folder is {path.name}"
        )
    check_same_run(path, read_model(TrainConfig, path / _CONFIG), config, manifest.step)
    if manifest.ranks != world_size:
        raise ConfigError(
            f"{path} was written by {manifest.ranks} ranks, this run has {world_size}; start "
            f"{manifest.ranks}"
        )
    if manifest.step > config.run.steps:
        raise ConfigError(
            f"{path} is of step {manifest.step}, but run.steps is {config.run.steps}; set it to "
            f"{manifest.step} or more"
        )
    return manifest


def digest_of_file(path: Path) -> str:
    """Return a digest of 128 bits of a regular file's bytes. It tells accidents, not intent."""
    with open_regular(path, follow_link=False) as file:
        try:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise ConfigError(f"can't read {path}: {error.strerror}") from error


_OF_THE_NUMBERS = frozenset({"run.deterministic", "run.seed", "run.threads"})
"""What of the section ``run`` decides what a step computes."""

_MAY_DIFFER = frozenset({"data.indexed", "data.text", "parallel.ranks"})
"""The digest of the data counts, not where it lies, and so does the number of ranks. What devices
and types come to is compared besides."""


def check_same_run(path: Path, saved: TrainConfig, config: TrainConfig, step: int) -> None:
    """Check that ``config`` goes on computing what ``saved`` began, by the checkpoint of ``step``.

    Offload settings may differ: they don't change a bit. ``run.steps`` may, unless the learning
    rate hangs on it and steps are left, or the order of an indexed dataset does: after the last
    step of ``saved`` more steps extend a whole run, with the learning rates of the longer one.
    """
    before, now = _values(saved), _values(config)
    keys = [
        key
        for key in now
        if (not key.startswith("run.") or key in _OF_THE_NUMBERS)
        and (key not in _MAY_DIFFER and before[key] != now[key])
    ]
    indexed = config.data.indexed is not None
    extends = step == saved.run.steps < config.run.steps
    hangs = indexed or (config.schedule.decay != "constant" and not extends)
    if saved.run.steps != config.run.steps and hangs:
        keys.append("run.steps")
    if indexed and bool(saved.run.eval_interval) != bool(config.run.eval_interval):
        keys.append("run.eval_interval")
    if keys:
        lines = [f"{key} was {before[key]!r}, this run has {now[key]!r}" for key in keys]
        raise ConfigError(
            f"{path} is of a run with other settings, so going on would not give its numbers: "
            + "; ".join(lines)
            + ". Set them back, or start over in another run.output"
        )


def _values(config: TrainConfig) -> dict[str, Any]:
    """Return all keys but those of offload."""
    return {
        f"{section}.{key}": value
        for section, values in config.model_dump(exclude={"offload"}).items()
        for key, value in values.items()
    }


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _step(name: str) -> int | None:
    """Return the step whose checkpoint has this name; None where it is no such name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and name == _name(int(match[1])) else None


def _remove(path: Path) -> None:
    """Remove a folder with all in it, or whatever else has that name; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
