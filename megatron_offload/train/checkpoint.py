"""Writes and reads the state of a run, as safetensors files beside a JSON description.

Invariants: nothing is unpickled, and a file counts only with the digest that was written down for
it. Every error is raised on all ranks, so that none waits for another.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_offload.errors import ConfigError, OffloadError
from megatron_offload.train.checkpoint_folder import (
    FORMAT,
    CheckpointFolder,
    Manifest,
    check_files,
    digest_of_file,
    read_checkpoint,
)
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.parallel import Parallel
from megatron_offload.train.random_state import random_states, restore_random_states
from megatron_offload.train.run_folder import found_versions

_FILE_BYTES = 1024**3
"""Tensors in one file, beyond the first; bounds the memory that their copies on the host take."""


class CheckpointError(OffloadError, RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


class Checkpoints:
    """Checkpoints of one run on this rank; all methods are collective.

    ``data`` returns a digest of the training data; it is called once, and only if need be.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        parallel: Parallel,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        data: Callable[[], str],
    ) -> None:
        self._config = config
        self._device = device
        self._parallel = parallel
        self._chunks = chunks
        self._optimizer = optimizer
        self._data = functools.cache(data)
        self._folder = CheckpointFolder(config.run.output)

    def clean(self) -> None:
        """Remove what a killed run left half written."""
        self._parallel.on_owner(self._folder.clean)

    def save(self, step: int, evaluations: Mapping[int, float]) -> Path:
        """Write the state after ``step``, make it current, and remove what is too old.

        A file's tensors at a time are copied to the host. What can't be written, for lack of space
        for example, is a `CheckpointError`.
        """
        try:
            self._parallel.on_owner(lambda: self._folder.begin(step))
            torch.get_device_module(self._device).synchronize()
            mine = self._parallel.agreed(lambda: self._write(self._folder.part_of(step)))
            files = {k: v for each in self._parallel.gather(mine) for k, v in each.items()}
            self._parallel.on_owner(lambda: self._publish(step, evaluations, files))
        except (OSError, ConfigError) as error:
            if self._parallel.is_owner:
                with contextlib.suppress(OSError, ConfigError):
                    self._folder.clean()
            raise CheckpointError(
                f"can't write the checkpoint {self._folder.path_of(step)}: {error}; those before "
                f"it are untouched"
            ) from error
        return self._folder.path_of(step)

    def load(self) -> tuple[Path, Manifest] | None:
        """Restore the newest whole checkpoint; return its folder and what it says, if there is one.

        One that is damaged or of another run is a `ConfigError`; the model may be half loaded then.
        """
        parallel = self._parallel
        path = parallel.agreed(self._folder.latest)
        paths = parallel.gather(path)
        if len(set(paths)) > 1:
            raise ConfigError(
                f"ranks see different checkpoints in {self._folder.path}: {paths}; run.output must "
                f"be a folder that all machines share"
            )
        if path is None:
            return None
        manifest = parallel.agreed(lambda: self._examined(path))
        place, places = parallel.rank, parallel.world_size
        parallel.agreed(lambda: check_files(path, manifest, part=place, parts=places))
        _make_optimizer_states(self._optimizer)
        parallel.agreed(lambda: self._read(path, manifest))
        return path, manifest

    def _examined(self, path: Path) -> Manifest:
        manifest = read_checkpoint(path, self._config, self._parallel.world_size)
        if manifest.device != self._device.type:
            raise ConfigError(
                f"{path}: run.device was {manifest.device}, this run's is {self._device.type}"
            )
        if manifest.data != self._data():
            raise ConfigError(
                f"{path}: the data that data.text or data.indexed names has digest {self._data()}, "
                f"but {manifest.data} when the checkpoint was written; give the same data"
            )
        return manifest

    def _publish(self, step: int, evaluations: Mapping[int, float], files: dict[str, str]) -> None:
        manifest = Manifest(
            format=FORMAT,
            step=step,
            ranks=self._parallel.world_size,
            device=self._device.type,
            data=self._data(),
            evaluations=dict(evaluations),
            versions=found_versions(),
            files=files,
        )
        self._folder.publish(manifest, self._config)
        self._folder.prune(self._config.run.keep_checkpoints)

    def _write(self, folder: Path) -> dict[str, str]:
        """Write this rank's files; return their digests by name.

        Of the ranks that hold the same stage the first data-parallel one writes it.
        """
        parts = {f"rank_{self._parallel.rank}": random_states(self._device)}
        if self._parallel.dp_rank == 0:
            parts[f"stage_{self._parallel.pp_rank}"] = self._state()
        return {
            path.name: digest_of_file(path)
            for name, tensors in parts.items()
            for path in _write_tensors(folder, name, tensors)
        }

    def _read(self, folder: Path, manifest: Manifest) -> None:
        """Put the tensors of this rank's files back where `_write` found them."""
        states = random_states(self._device)
        state = self._state()
        parts = {f"rank_{self._parallel.rank}_": states, f"stage_{self._parallel.pp_rank}_": state}
        for prefix, targets in parts.items():
            names = sorted(name for name in manifest.files if name.startswith(prefix))
            _read_tensors(folder, names, targets)
        for group, name in _groups_with_step(self._optimizer):
            if not isinstance(group["step"], torch.Tensor):
                group["step"] = int(state[name].item())
        restore_random_states(states, self._device)

    def _state(self) -> dict[str, torch.Tensor]:
        """Return all tensors of this rank's stage by name, the live ones where there are such."""
        return _model_tensors(self._chunks) | _optimizer_tensors(self._optimizer, self._chunks)


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[Path]:
    """Write tensors into as many files as it takes; yield each once it is on disk."""
    for index, names in enumerate(_shared_out(tensors)):
        path = folder / f"{name}_{index}.safetensors"
        copies = {key: tensors[key].to("cpu", copy=True).contiguous() for key in names}
        try:
            save_file(copies, path)
        except SafetensorError as error:
            raise OSError(f"{path.name}: {error}") from error
        with path.open("rb") as file:
            os.fsync(file.fileno())
        yield path


def _shared_out(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if names and num_bytes + tensor.nbytes > _FILE_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += tensor.nbytes
    yield names


def _read_tensors(folder: Path, names: Sequence[str], targets: Mapping[str, torch.Tensor]) -> None:
    """Fill ``targets`` from files that must hold them all, and nothing else."""
    missing = dict(targets)
    for path in (folder / name for name in names):
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - this is no mapping
                    target = missing.pop(key, None)
                    if target is None:
                        raise ConfigError(f"{path} holds {key[:200]!r}, which this model has not")
                    _fill(target, file.get_tensor(key), f"{path}: {key!r}")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
    if missing:
        raise ConfigError(f"{folder} holds no {next(iter(missing))!r}")


def _fill(target: torch.Tensor, stored: torch.Tensor, source: str) -> None:
    if (stored.dtype, stored.shape) != (target.dtype, target.shape):
        raise ConfigError(
            f"{source} is {stored.dtype} of shape {list(stored.shape[:8])}, this model's is "
            f"{target.dtype} of shape {list(target.shape)}"
        )
    target.copy_(stored)


def _model_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"chunk{index}.{name}": tensor.detach()
        for index, chunk in enumerate(chunks)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
    }


def _optimizer_tensors(
    optimizer: Any, chunks: Sequence[torch.nn.Module]
) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors under the names of the parameters that they belong to."""
    names: dict[int, str] = {}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            names[id(parameter)] = f"optimizer.chunk{index}.{name}"
            # Half-precision parameters have a float32 one beside them.
            main = getattr(parameter, "main_param", None)
            if main is not None:
                names[id(main)] = f"optimizer.chunk{index}.{name}"
    own = {id(parameter) for chunk in chunks for parameter in chunk.parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for inner in _inner_optimizers(optimizer):
        for held in _parameters(inner):
            name = names[id(held)]
            if id(held) not in own:
                tensors[f"{name}.main"] = held.detach()
            for key, value in inner.state[held].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}.{key}"] = value
    for group, name in _groups_with_step(optimizer):
        tensors[name] = torch.as_tensor(group["step"])
    return tensors


def _groups_with_step(optimizer: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every parameter group that counts its steps, and the count's name.

    TransformerEngine's Adam does; torch's keeps a tensor for each parameter.
    """
    for index, inner in enumerate(_inner_optimizers(optimizer)):
        for place, group in enumerate(inner.param_groups):
            if "step" in group:
                yield group, f"optimizer.{index}.group{place}.step"


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the torch optimizers inside megatron-core's."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def _parameters(inner: Any) -> list[torch.Tensor]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def _make_optimizer_states(optimizer: Any) -> None:
    """Let optimizers that make their state in the first step make it now.

    A step with gradients and a learning rate of zero: the optimizer itself knows best which tensors
    it wants, and where. All that it may change is loaded afterwards.
    """
    for inner in _inner_optimizers(optimizer):
        rates = [group["lr"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = 0.0
        for parameter in _parameters(inner):
            parameter.grad = torch.zeros_like(parameter)
        inner.step()
        for parameter in _parameters(inner):
            parameter.grad = None
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate
