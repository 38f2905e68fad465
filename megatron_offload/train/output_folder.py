"""Who may write into a run's folder: one run at a time, and none over what another has left.

Owns the lock of ``run.output``, and what a folder may hold when a run begins. Must not know how
runs are done.

Invariant: what is refused is left as it was. Read next: `megatron_offload.train.run_folder`, for
the files themselves.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_offload.errors import ConfigError
from megatron_offload.train.checkpoint_folder import CheckpointFolder, read_checkpoint
from megatron_offload.train.comparison import COMPARISON_NAME, FOLDERS
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import LOG_NAME, read_steps

__all__ = ["check_comparison", "check_output", "locked"]

_LOCK_NAME = ".lock"


@contextlib.contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Make folders, and let no other process run into them inside this context.

    The locks are those of open files, so that they end with the process, however it ends.

    Raises:
        ConfigError: a folder can't be written, or another run writes into it.
    """
    with contextlib.ExitStack() as stack:
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):  # permissions alone don't tell
                    pass
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


def check_output(
    config: TrainConfig, world_size: int, *, is_resumed: bool, is_restarted: bool
) -> None:
    """Check that a run may write into its folder.

    Args:
        config: the run.
        world_size: its ranks over all machines.
        is_resumed: whether it goes on from a checkpoint where there is one.
        is_restarted: whether its launcher started it again by itself.

    Raises:
        ConfigError: the folder holds another run or a comparison, or a checkpoint from which this
            run can't go on.
    """
    folder = config.run.output
    logs = [folder / name / LOG_NAME for name in FOLDERS]
    if any(os.path.lexists(path) for path in (folder / COMPARISON_NAME, *logs)):
        raise ConfigError(
            f"run.output {folder} holds a comparison; choose another run.output, or remove {folder}"
        )
    latest = CheckpointFolder(folder).latest()
    if latest is not None:
        if not is_resumed:
            raise ConfigError(
                f"run.output {folder} holds checkpoints up to {latest.name}; go on from there with "
                f"--resume, choose another run.output, or remove {folder} to start over"
            )
        read_steps(folder, read_checkpoint(latest, config, world_size).step, world_size)
        return
    if is_restarted or not _has_steps(folder):
        return
    if not is_resumed:
        raise ConfigError(
            f"run.output {folder} holds an earlier run; choose another run.output, or remove "
            f"{folder} to start over"
        )
    steps, _ = read_steps(folder)
    if steps and steps[-1].step >= config.run.steps:
        raise ConfigError(
            f"run.output {folder} holds a run whose {steps[-1].step} steps are done, and no "
            f"checkpoint to go on from (run.checkpoint_interval); choose another run.output, or "
            f"remove {folder} to start over"
        )


def check_comparison(folder: Path) -> None:
    """Check that a comparison may write into a folder, where it replaces an earlier comparison.

    Raises:
        ConfigError: the folder, or one of those that the two runs write into, holds a run of
            another kind.
    """
    if _has_steps(folder):
        raise ConfigError(
            f"run.output {folder} holds a run ({LOG_NAME}) and not a comparison; choose another "
            f"run.output, or remove {folder}"
        )
    for name in FOLDERS:
        latest = CheckpointFolder(folder / name).latest()
        if latest is not None:
            raise ConfigError(
                f"run.output {folder}: {latest} is a checkpoint, which no comparison writes; "
                f"choose another run.output, or remove {folder / name}"
            )


def _has_steps(folder: Path) -> bool:
    """Return whether a step was taken; a run that failed before its first is none."""
    try:
        found = os.lstat(folder / LOG_NAME)
    except FileNotFoundError:
        return False
    return found.st_size > 0 or not stat.S_ISREG(found.st_mode)
