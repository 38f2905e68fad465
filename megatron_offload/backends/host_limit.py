"""How much host memory a process may pin where nobody said.

The tightest account counts: the machine's free memory, and the limits of the control groups
(version 1, version 2, or both) that this process is in, as far up as can be seen. One that is
missing, unreadable or makes no sense counts as absent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron_offload.config import environment_int
from megatron_offload.files.kernel import read_field, read_int, read_kernel_text


class _Version(NamedTuple):
    """What one version of control groups calls its files."""

    filesystem: str
    default_mount: str
    limits: tuple[str, ...]
    usage: str
    droppable: str


_VERSIONS = (
    _Version(
        filesystem="cgroup2",
        default_mount="/sys/fs/cgroup",
        limits=("memory.max", "memory.high"),  # over the second the kernel slows all down
        usage="memory.current",
        droppable="inactive_file",
    ),
    _Version(
        filesystem="cgroup",
        default_mount="/sys/fs/cgroup/memory",
        limits=("memory.limit_in_bytes",),
        usage="memory.usage_in_bytes",
        droppable="total_inactive_file",
    ),
)


def default_cap_bytes(
    share: float = 0.5, environ: Mapping[str, str] | None = None, *, root: Path = Path("/")
) -> int:
    """Return this process's part of the memory that the machine has free, in bytes.

    A control group's limit counts where there is one; its page cache, which it can drop, does not.

    Args:
        share: what all local ranks together may take, as a part of what is free.
        environ: where ``LOCAL_WORLD_SIZE`` stands; None takes the process's environment.
        root: the folder in which ``proc`` and ``sys`` lie.

    Raises:
        ConfigError: ``LOCAL_WORLD_SIZE`` is not a positive integer.
    """
    num_ranks = environment_int("LOCAL_WORLD_SIZE", 1, least=1, environ=environ)
    available_kib = read_field(root / "proc/meminfo", "MemAvailable:")
    if available_kib is not None:
        free_bytes = available_kib * 1024
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for version in _VERSIONS:
        for folder in _group_folders(root, version):
            free_bytes = min(free_bytes, _room_bytes(folder, version, free_bytes))
    return int(free_bytes * share) // num_ranks


def _group_folders(root: Path, version: _Version) -> Iterator[Path]:
    """Yield the folder of the process's own group and of each group above it, up to the mount.

    A mount may show a part of the hierarchy only, as in a container: then what lies under that part
    is found, and a group outside of it is not seen, only the mount itself.
    """
    group = _own_group(root, version)
    if group is None:
        return
    for mount, shown in _mounts(root, version):
        try:
            inside = group.relative_to(shown)
        except ValueError:
            inside = PurePosixPath()
        for path in (inside, *inside.parents):
            yield root / mount.lstrip("/") / path


def _own_group(root: Path, version: _Version) -> PurePosixPath | None:
    """Return the process's group in this version's hierarchy, as the kernel names it."""
    for line in read_kernel_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if version.filesystem == "cgroup2":
            is_ours = number == "0" and not controllers
        else:
            is_ours = "memory" in controllers.split(",")
        if is_ours and path.startswith("/"):
            # A group outside of the namespace has a name that leads up and out.
            return PurePosixPath("/" if ".." in path.split("/") else path)
    return None


def _mounts(root: Path, version: _Version) -> list[tuple[str, PurePosixPath]]:
    """Return where this version is mounted, each with the group that the mount shows."""
    found = []
    for line in read_kernel_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, source = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(source) < 3:
            continue
        # A space is written as "\040".
        shown, mount = (
            re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), field)
            for field in fields[3:5]
        )
        is_ours = source[0] == version.filesystem and (
            version.filesystem == "cgroup2" or "memory" in source[2].split(",")
        )
        if is_ours and ".." not in f"{shown}/{mount}".split("/"):
            found.append((mount, PurePosixPath(shown)))
    return found or [(version.default_mount, PurePosixPath("/"))]


def _room_bytes(folder: Path, version: _Version, no_limit_bytes: int) -> int:
    """Return what a group may still take."""
    limits = [read_int(folder / name) for name in version.limits]
    limit_bytes = min((limit for limit in limits if limit is not None), default=None)
    if limit_bytes is None:
        return no_limit_bytes
    used_bytes = read_int(folder / version.usage) or 0
    droppable_bytes = read_field(folder / "memory.stat", version.droppable) or 0
    return max(limit_bytes - max(used_bytes - droppable_bytes, 0), 0)
