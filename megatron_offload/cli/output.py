"""Where the commands write, and what they say on the standard error stream while they work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from megatron_offload.errors import ConfigError
from megatron_offload.report.console import console


def check_output(path: Path) -> Path:
    """Refuse a file that couldn't be written; its folder need not exist."""
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; name a file")
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; choose another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} can't be written into; choose another file")
    return path


OutputFile = Annotated[Path, AfterValidator(check_output)]
"""An option: a file to write, which fails where it can't be before anything long begins."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make a file's folder; what the operating system refuses is a `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}; choose another file") from error


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show in a terminal what takes its time; yield what is to be told how far the work is."""
    with console(stderr=True).status(what, spinner="line") as status:
        yield lambda text: status.update(f"{what}: {text}")
