"""How much host memory a process may pin where nobody said.

Owns the reading of the kernel's accounts. Must not know the pool. Read next:
`megatron_offload.memory.host_pool`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_offload.errors import ConfigError

__all__ = ["default_cap_bytes"]


def default_cap_bytes(
    environ: Mapping[str, str] | None = None,
    *,
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return half of the memory that the machine has free, shared by its local ranks, in bytes.

    A control group's limit counts where there is one; its page cache, which it can drop, does not.

    Args:
        environ: where ``LOCAL_WORLD_SIZE`` stands; None takes the process's environment.
        meminfo: the kernel's account of the machine's memory.
        cgroup: the folder of the control group (version 2) that this process is in.

    Raises:
        ConfigError: ``LOCAL_WORLD_SIZE`` is not a positive integer.
    """
    text = (os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "1")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"LOCAL_WORLD_SIZE must be a positive integer, got {text!r}")
    free_bytes = _machine_free_bytes(meminfo)
    limit_bytes = _read_int(cgroup / "memory.max")
    used_bytes = _read_int(cgroup / "memory.current")
    if limit_bytes is not None and used_bytes is not None:
        cached_bytes = _read_field(cgroup / "memory.stat", "inactive_file") or 0
        free_bytes = min(free_bytes, max(limit_bytes - used_bytes + cached_bytes, 0))
    return free_bytes // 2 // int(text)


def _machine_free_bytes(meminfo: Path) -> int:
    available_kib = _read_field(meminfo, "MemAvailable:")
    if available_kib is not None:
        return available_kib * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_text(path: Path) -> str:
    """Return a small file's text, empty where there is no such file."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _read_int(path: Path) -> int | None:
    """Return the integer that a file holds; None for no file or another word, such as "max"."""
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_field(path: Path, name: str) -> int | None:
    """Return the integer behind ``name`` in a file of one name and one number a line."""
    for line in _read_text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
