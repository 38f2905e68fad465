"""Writes and reads the state of a run with ``torch.distributed.checkpoint`` (DCP).

Owns which tensors make up a run's state, and a storage writer and reader. Must not know the loop or
when a checkpoint is due.

Invariants: nothing is unpickled. DCP's own ``.metadata`` is a pickle that DCP's own reader loads
as such; it is written for DCP's tools and never read here, and neither is the little pickle in each
stored tensor: what lies where stands in ``checkpoint.json``, and a tensor's bytes are taken out of
their archive as bytes, whose checksum is compared. Every error is raised on all ranks, so that none
waits for another. Read next: `megatron_offload.train.checkpoint_folder`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from megatron_offload.errors import ConfigError, OffloadError
from megatron_offload.files.text import open_regular
from megatron_offload.machine.job_ranks import gather
from megatron_offload.train.checkpoint_folder import (
    CheckpointFolder,
    Manifest,
    StoredTensor,
    check_files,
    digest_of_file,
    read_checkpoint,
    write_config,
    write_manifest,
)
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.parallel import Device, Parallel
from megatron_offload.train.random_state import random_states, restore_random_states
from megatron_offload.train.run_folder import found_versions

__all__ = ["CheckpointError", "Checkpoints", "Restored"]

_ARCHIVE_BYTES = 64 * 1024
"""Most that torch's archive of one tensor adds to the tensor's own bytes."""

_PIECE_BYTES = 16 * 1024**2
"""Read at a time; bounds the memory that loading takes."""


class CheckpointError(OffloadError, RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a loaded checkpoint says besides its tensors."""

    path: Path
    step: int
    evaluations: dict[int, float]


class Checkpoints:
    """Checkpoints of one run on this rank; all methods are collective.

    Args:
        config: the run.
        device: where this rank trains.
        parallel: this rank's place.
        chunks: the model chunks of this rank.
        optimizer: megatron-core's.
        data: returns a digest of the training data; called once, and only if need be.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
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
        self._owner = parallel.rank == 0

    def clean(self) -> None:
        """Remove what a killed run left half written."""
        self._on_owner(self._folder.clean)

    def save(self, step: int, evaluations: dict[int, float]) -> Path:
        """Write the state after ``step``, make it current, and remove what is too old.

        Memory: the state is copied to the host about one tensor at a time.

        Raises:
            CheckpointError: it could not be written, for lack of space for example.
        """
        try:
            part = self._folder.part_of(step)
            self._on_owner(lambda: self._folder.begin(step))
            manifest = Manifest(
                format=2,
                step=step,
                ranks=self._parallel.world_size,
                device=self._device.device.type,
                data=self._data(),
                evaluations={key: float(loss).hex() for key, loss in evaluations.items()},
                versions=found_versions(),
                tensors={},
                files={},
            )
            writer = _Writer(part)
            self._device.synchronize()
            dcp.save(
                self._state(),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._parallel.host_group,
            )
            mine = self.agreed(lambda: {name: digest_of_file(part / name) for name in writer.files})
            files = {
                k: v for each in gather(mine, self._parallel.host_group) for k, v in each.items()
            }
            manifest = manifest.model_copy(update={"tensors": writer.tensors, "files": files})
            self._on_owner(lambda: self._publish(part, manifest))
        except (OSError, ConfigError, CheckpointException) as error:
            if self._owner:
                with contextlib.suppress(OSError):
                    self._folder.discard(step)
            raise CheckpointError(
                f"can't write the checkpoint {self._folder.path_of(step)}: {_reason(error)}; those "
                f"before it are untouched"
            ) from error
        return self._folder.path_of(step)

    def load(self) -> Restored | None:
        """Restore the newest whole checkpoint; None where there is none.

        Raises:
            ConfigError: it is damaged, or of another run. Model and optimizer may be half loaded.
        """
        path = self.agreed(self._folder.latest)
        paths = gather(path, self._parallel.host_group)
        if len(set(paths)) > 1:
            raise ConfigError(
                f"ranks see different checkpoints in {self._folder.path}: {paths}; run.output must "
                f"be a folder that all machines share"
            )
        if path is None:
            return None
        manifest = self.agreed(lambda: self._examined(path))
        place, places = self._parallel.rank, self._parallel.world_size
        self.agreed(lambda: check_files(path, manifest, part=place, parts=places))
        _make_optimizer_states(self._optimizer)
        state = self._state()
        self.agreed(lambda: _check_tensors(path, manifest, state, self._prefixes()))
        try:
            dcp.load(
                state,
                storage_reader=_Reader(path, manifest),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._parallel.host_group,
            )
        except CheckpointException as error:
            raise ConfigError(
                f"can't load the checkpoint {path}: {_reason(error)}; remove that folder to go on "
                f"from the one before"
            ) from error
        self.agreed(lambda: self._restore(state))
        return Restored(
            path=path,
            step=manifest.step,
            evaluations={k: float.fromhex(loss) for k, loss in manifest.evaluations.items()},
        )

    def agreed(self, action: Callable[[], Any]) -> Any:
        """Return what ``action`` returns, or raise on all ranks what it raised on one.

        Args:
            action: called without arguments; may raise `ConfigError` or OSError.
        """
        result, mine = None, None
        try:
            result = action()
        except (ConfigError, OSError) as error:
            mine = error
        for failure in gather(mine, self._parallel.host_group):
            if failure is not None:
                raise mine or failure
        return result

    def _examined(self, path: Path) -> Manifest:
        manifest = read_checkpoint(path, self._config, self._parallel.world_size)
        if manifest.device != self._device.device.type:
            raise ConfigError(
                f"{path}: run.device was {manifest.device}, this run's is "
                f"{self._device.device.type}"
            )
        if manifest.data != self._data():
            raise ConfigError(
                f"{path}: the data that data.text or data.indexed names has digest {self._data()}, "
                f"but {manifest.data} when the checkpoint was written; give the same data"
            )
        return manifest

    def _publish(self, part: Path, manifest: Manifest) -> None:
        write_manifest(part, manifest)
        write_config(part, self._config)
        self._folder.publish(manifest.step)
        self._folder.prune(self._config.run.keep_checkpoints)

    def _prefixes(self) -> tuple[str, str]:
        """Return how names of this rank's tensors begin: those of its stage, and its own."""
        return f"stage{self._parallel.pp_rank}.", f"rank{self._parallel.rank}."

    def _state(self) -> dict[str, torch.Tensor]:
        """Return all tensors of this rank by name; those of model and optimizer are the live ones.

        Data-parallel ranks of one stage give the same names, of which DCP writes each once.
        """
        stage, mine = self._prefixes()
        state = {f"{stage}{name}": x for name, x in _model_tensors(self._chunks).items()}
        state |= {
            f"{stage}optimizer.{name}": x
            for name, x in _optimizer_tensors(self._optimizer, self._chunks).items()
        }
        state |= {
            f"{mine}random.{name}": x for name, x in random_states(self._device.device).items()
        }
        assert all(tensor.is_contiguous() for tensor in state.values())
        return state

    def _restore(self, state: dict[str, torch.Tensor]) -> None:
        """Put back what `_state` had to copy."""
        stage, mine = self._prefixes()
        for group, name in _groups_with_step(self._optimizer):
            if not isinstance(group["step"], torch.Tensor):
                group["step"] = int(state[f"{stage}optimizer.{name}"].item())
        prefix = f"{mine}random."
        states = {
            name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)
        }
        restore_random_states(states, self._device.device)

    def _on_owner(self, action: Callable[[], Any]) -> None:
        """Have rank 0 do something; its OSError or ConfigError is raised on all ranks."""
        self.agreed(action if self._owner else lambda: None)


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
            names[id(parameter)] = f"chunk{index}.{name}"
            # Half-precision parameters have a float32 one beside them.
            main = getattr(parameter, "main_param", None)
            if main is not None:
                names[id(main)] = f"chunk{index}.{name}"
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
        step = group["step"]
        is_tensor = isinstance(step, torch.Tensor)
        tensors[name] = step if is_tensor else torch.tensor(step, dtype=torch.int64)
    return tensors


def _groups_with_step(optimizer: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every parameter group that counts its steps, and the count's name.

    TransformerEngine's Adam does; torch's keeps a tensor for each parameter.
    """
    for index, inner in enumerate(_inner_optimizers(optimizer)):
        for place, group in enumerate(inner.param_groups):
            if "step" in group:
                yield group, f"{index}.group{place}.step"


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


def _check_tensors(
    path: Path, manifest: Manifest, state: dict[str, torch.Tensor], prefixes: tuple[str, str]
) -> None:
    """Check that a checkpoint holds exactly this rank's tensors, in files that are there.

    Raises:
        ConfigError: the first thing that doesn't fit.
    """
    sizes: dict[str, int] = {}
    for name in manifest.tensors:
        if name.startswith(prefixes) and name not in state:
            raise ConfigError(f"{path} holds {name[:200]!r}, which this model has not")
    for name, tensor in state.items():
        stored = manifest.tensors.get(name)
        if stored is None:
            raise ConfigError(f"{path} holds no {name!r}")
        if (stored.dtype, stored.shape) != (_dtype_name(tensor.dtype), tuple(tensor.shape)):
            raise ConfigError(
                f"{path}: {name!r} is {stored.dtype[:20]} of shape {list(stored.shape[:8])}, this "
                f"model's is {_dtype_name(tensor.dtype)} of shape {list(tensor.shape)}"
            )
        if not tensor.nbytes <= stored.length <= tensor.nbytes + _ARCHIVE_BYTES:
            raise ConfigError(
                f"{path}: {name!r} takes {stored.length} bytes of {stored.file}, which can't be "
                f"its {tensor.nbytes} and their frame"
            )
        if stored.file not in sizes:
            with open_regular(path / stored.file, follow_link=False) as file:
                sizes[stored.file] = os.fstat(file.fileno()).st_size
        if stored.offset + stored.length > sizes[stored.file]:
            raise ConfigError(
                f"{path / stored.file} holds {sizes[stored.file]} bytes, but {name!r} ends at "
                f"{stored.offset + stored.length}: the file is cut off"
            )


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which also knows what lies where, for ``checkpoint.json``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files: list[str] = []
        """Names of the files that this rank has written."""
        self.tensors: dict[str, StoredTensor] = {}
        """Places of the tensors of all ranks; on the rank that finishes."""

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        """Write this rank's files."""
        written = super().write_data(plan, planner)
        self.files = sorted({result.storage_data.relative_path for result in written.wait()})
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write DCP's own description; on one rank, after all ranks have written."""
        super().finish(metadata, results)
        for result in (result for rank in results for result in rank):
            stored: Any = metadata.state_dict_metadata[result.index.fqn]
            place = result.storage_data
            self.tensors[result.index.fqn] = StoredTensor(
                dtype=_dtype_name(stored.properties.dtype),
                shape=tuple(stored.size),
                file=place.relative_path,
                offset=place.offset,
                length=place.length,
            )


class _Reader(dcp.FileSystemReader):
    """DCP's reader, led by ``checkpoint.json`` in the place of DCP's pickle."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._tensors = manifest.tensors

    # Without DCP's further arguments, so that it doesn't look for a pickle where this one fails.
    def read_metadata(self) -> Metadata:
        """Return DCP's description of the checkpoint."""
        tensors: dict[str, Any] = {}
        places = {}
        for name, stored in self._tensors.items():
            start, size = torch.Size([0] * len(stored.shape)), torch.Size(stored.shape)
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, stored.dtype)),
                size,
                [ChunkStorageMetadata(offsets=start, sizes=size)],
            )
            places[MetadataIndex(name, start)] = stored
        return Metadata(state_dict_metadata=tensors, storage_data=places)

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Fill the tensors that the plan asks for.

        Raises:
            ConfigError: a tensor is damaged.
        """
        items: dict[str, list[Any]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].file, []).append(item)
        for name, wanted in items.items():
            with open_regular(Path(self.path) / name, follow_link=False) as file:
                for item in wanted:
                    stored = self.storage_data[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    try:
                        _read_tensor(_Section(file, stored.offset, stored.length), target)
                    except _DAMAGES as error:
                        raise ConfigError(
                            f"{name}: {item.storage_index.fqn!r} is damaged: {error}"
                        ) from error
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


_DAMAGES = (zipfile.BadZipFile, OSError, EOFError, RuntimeError, struct.error, ValueError)


def _read_tensor(file: io.RawIOBase, target: torch.Tensor) -> None:
    """Fill a contiguous tensor with the bytes of the one in an archive that torch wrote.

    Such an archive holds a pickle, which is left alone, and the bytes, neither compressed nor
    encrypted.
    """
    flat = target.view(-1).view(torch.uint8)
    with zipfile.ZipFile(io.BufferedReader(file)) as archive:
        members = [x for x in archive.infolist() if x.filename.endswith("/data/0")]
        if len(members) != 1 or members[0].compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile("its archive holds other than one plain tensor")
        if members[0].file_size != flat.numel():
            raise zipfile.BadZipFile(f"{members[0].file_size} bytes in place of {flat.numel()}")
        with archive.open(members[0]) as content:
            position = 0
            while position < flat.numel():
                piece = bytearray(content.read(min(_PIECE_BYTES, flat.numel() - position)))
                if not piece:
                    raise EOFError("it ends early")
                part = torch.frombuffer(piece, dtype=torch.uint8)
                flat[position : position + len(piece)].copy_(part)
                position += len(piece)


class _Section(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("a place before the beginning")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._position))
        content = os.pread(self._file.fileno(), wanted, self._offset + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _dtype_name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


def _reason(error: BaseException) -> str:
    """Return what went wrong without DCP's tracebacks of every rank."""
    if isinstance(error, CheckpointException):
        for rank, (cause, _) in sorted(error.failures.items()):
            return f"rank {rank}: {cause}"
    return str(error)
