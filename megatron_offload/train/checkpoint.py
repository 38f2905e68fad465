"""Writes and reads the state of a run, as safetensors files beside a JSON description.

Every error is raised on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from megatron_offload.engine.random_states import RandomStates
from megatron_offload.errors import ConfigError, OffloadError, shorten
from megatron_offload.files.text import open_regular
from megatron_offload.train.parallel import Parallel
from megatron_offload.train.run_folder import CheckpointFolder, Manifest, read_checkpoint


class CheckpointError(OffloadError, RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints of one run on this rank; all methods are collective."""

    decides: dict[str, Any]
    """What decides what a step of this run computes."""
    folder: CheckpointFolder
    device: torch.device
    parallel: Parallel
    chunks: Sequence[torch.nn.Module]
    optimizer: Any

    def save(self, step: int) -> Path:
        """Write the state after ``step``, make it current, and remove what is too old."""
        try:
            self.parallel.on_owner(lambda: self.folder.begin(step))
            torch.get_device_module(self.device).synchronize()
            self.parallel.agreed(lambda: self._write(self.folder.part_of(step)))
            manifest = Manifest(format=7, step=step, decides=self.decides)
            self.parallel.on_owner(lambda: self.folder.publish(manifest))
        except (OSError, ConfigError) as error:
            if self.parallel.is_owner:
                self.folder.clean()
            raise CheckpointError(
                f"can't write the checkpoint {self.folder.path_of(step)}: {error}; those before "
                f"it are untouched"
            ) from error
        return self.folder.path_of(step)

    def load(self) -> tuple[Path, int] | None:
        """Restore the newest whole checkpoint; return its folder and step, if there is one.

        One that is damaged or of another run is a `ConfigError`.
        """
        agreed = self.parallel.agreed
        path = self.parallel.gather(agreed(self.folder.latest))[0]  # others must see it too
        if path is None:
            return None
        manifest = agreed(lambda: read_checkpoint(path, self.decides))
        _make_optimizer_states(self.optimizer)
        agreed(lambda: self._read(path))
        return path, manifest.step

    def _write(self, folder: Path) -> None:
        """Write this rank's files, a stage's if it is the first that holds it."""
        parts = {f"rank_{self.parallel.rank}": RandomStates([self.device.type]).tensors()}
        if self.parallel.dp_rank == 0:
            parts[f"stage_{self.parallel.pp_rank}"] = _stage_tensors(self.optimizer, self.chunks)
        for name, tensors in parts.items():
            _write_tensors(folder / f"{name}.safetensors", tensors)

    def _read(self, folder: Path) -> None:
        """Put the tensors of this rank's files back where `_write` found them."""
        states = RandomStates([self.device.type])
        state = _stage_tensors(self.optimizer, self.chunks)
        mine, stage = f"rank_{self.parallel.rank}", f"stage_{self.parallel.pp_rank}"
        for name, targets in ((mine, states.tensors()), (stage, state)):
            _read_tensors(folder / f"{name}.safetensors", targets)
        for group, name in _groups_with_step(self.optimizer):
            if not isinstance(group["step"], torch.Tensor):
                group["step"] = int(state[name].item())
        states.set()


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors; their file is on disk then."""
    try:
        save_file({key: x.to("cpu", copy=True).contiguous() for key, x in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_tensors(path: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill ``targets`` from a file, which must hold them all, and nothing else."""
    missing = dict(targets)
    with open_regular(path) as file:
        content = file.read()
    try:
        for key, stored in load(content).items():
            target = missing.pop(key, None)
            if _kind(stored) != _kind(target):
                raise ConfigError(
                    f"{path}: {shorten(repr(key))} is {_kind(stored)}, in this model "
                    f"{_kind(target)}"
                )
            targets[key].copy_(stored)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if missing:
        raise ConfigError(f"{path} holds no {next(iter(missing))!r}")


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape[:8])}"


def _stage_tensors(optimizer: Any, chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return a stage's tensors, the live ones where there are such, by names of parameters."""
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for index, chunk in enumerate(chunks):
        for name, buffer in chunk.named_buffers():
            tensors[f"chunk{index}.{name}"] = buffer
        for name, parameter in chunk.named_parameters():
            tensors[f"chunk{index}.{name}"] = parameter.detach()
            names[id(parameter)] = f"optimizer.chunk{index}.{name}"
            # Half-precision parameters have a float32 one beside them.
            main = getattr(parameter, "main_param", None)
            if main is not None:
                names[id(main)] = names[id(parameter)]
                tensors[f"{names[id(main)]}.main"] = main.detach()
    for inner in _inner_optimizers(optimizer):
        for held, state in inner.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{names[id(held)]}.{key}"] = value
    for group, name in _groups_with_step(optimizer):
        tensors[name] = torch.as_tensor(group["step"])
    return tensors


def _groups_with_step(optimizer: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield groups that count steps, as TransformerEngine's Adam does, and the count's name."""
    for index, inner in enumerate(_inner_optimizers(optimizer)):
        for place, group in enumerate(inner.param_groups):
            if "step" in group:
                yield group, f"optimizer.{index}.group{place}.step"


def _inner_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def _make_optimizer_states(optimizer: Any) -> None:
    """Let optimizers make their state now that do it in a step; what it changes is loaded later."""
    for inner in _inner_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        inner.zero_grad()
