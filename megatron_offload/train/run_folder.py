"""A run's folder: its files' names, who may write into it, and what an earlier run has left there.

What is refused is left as it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_offload.errors import ConfigError
from megatron_offload.observe.run_report import FACTS_NAME, LOG_NAME, trace_files, write_config
from megatron_offload.planning.found import NAME as FRONTIER_NAME
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.records import COMPARISON_NAME, FOLDERS


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and lock it inside this context; the lock ends with the process, too."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115 - open inside
        with contextlib.suppress(ImportError):  # Windows has none
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"run.output {folder}: another run writes into it; wait until it is done, or choose "
            "another run.output"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run.output {folder} can't be written: {error.strerror}; choose another one"
        ) from error
    with file:
        yield


def check_output(folder: Path, *, is_for_comparison: bool = False) -> None:
    """Check that no other run has left anything in a folder; a comparison replaces another."""
    names = (LOG_NAME, COMPARISON_NAME, *(f"{name}/{LOG_NAME}" for name in FOLDERS))
    for name in names[:1] if is_for_comparison else names:
        path = folder / name  # a run that failed before its first step is none
        if path.stat().st_size > 0 if path.is_file() else os.path.lexists(path):
            raise ConfigError(
                f"run.output {folder} holds an earlier run ({name}); choose another run.output, "
                f"or remove {folder} to start over"
            )


def prepare_folder(config: TrainConfig) -> None:
    """Write down what is about to run; what an earlier one measured goes."""
    folder = config.run.output
    folder.mkdir(exist_ok=True)
    for path in (folder / FRONTIER_NAME, folder / FACTS_NAME, *trace_files(folder).values()):
        path.unlink(missing_ok=True)
    write_config(config, folder)


def main_folder(folder: Path) -> Path:
    """Return the folder that a report is about: of a comparison, that with offload."""
    if not folder.is_dir():
        what = f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"
        raise ConfigError(f"{what}; give run.output of a run")
    offloaded = folder / FOLDERS[1]
    return offloaded if offloaded.is_dir() else folder
