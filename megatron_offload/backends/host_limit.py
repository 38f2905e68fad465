"""How much host memory a process may pin by default, and how to take it near a device.

The tightest account counts: the machine's free memory, and the limits of the control groups
(version 1, version 2, or both) that this process is in, as far up as can be seen. Memory near a
device is a wish, never a need: where the kernel doesn't say or refuses, it comes from anywhere.
Nothing that reads the kernel's small files raises: what is absent, unreadable or makes no sense is
empty text, no number, no members.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from megatron_offload.errors import ConfigError
from megatron_offload.files.text import read_text


def default_cap_bytes(share: float = 0.5, *, root: Path = Path("/")) -> int:
    """Return a share of the memory that the machine has free, in bytes.

    A control group's limit counts where there is one; its page cache, which it can drop, does not.
    ``root`` is the folder in which ``proc`` and ``sys`` lie.
    """
    available_kib = read_field(root / "proc/meminfo", "MemAvailable:")
    # Another system than Linux is taken to have 8 GiB.
    free_bytes: float = 8 << 30 if available_kib is None else available_kib * 1024
    for line in read_kernel_text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        # A container may see no more than its own group, at the mount; "/.." is outside of it.
        group = PurePosixPath("" if ".." in path else path.lstrip("/"))
        for place in (group, *group.parents):
            free_bytes = min(free_bytes, _free_bytes(mount / place))
    return int(free_bytes * share)


def _free_bytes(folder: Path) -> float:
    """Return what a group may still take; inf without a limit. Each version has its own files."""
    files = "memory.limit_in_bytes", "memory.max", "memory.high"
    limits = [read_int(folder / name) for name in files]  # over the last the kernel slows down
    limit_bytes = min((limit for limit in limits if limit is not None), default=math.inf)
    used_bytes = read_int(folder / "memory.usage_in_bytes") or read_int(folder / "memory.current")
    # Of version 1 the first has what groups below have too.
    names = "total_inactive_file", "inactive_file"
    droppable = (read_field(folder / "memory.stat", name) for name in names)
    droppable_bytes = next((found for found in droppable if found is not None), 0)
    return max(limit_bytes - max((used_bytes or 0) - droppable_bytes, 0), 0)


def near_cpus(address: str | None, *, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Return the CPUs next to a PCI device, which are all where the machine has one memory node.

    Its address is as the kernel writes it, such as ``0000:dc:02.0``; none where that is unknown.
    """
    if address is None:
        return frozenset()
    return read_members(read_kernel_text(sysfs / "bus/pci/devices" / address / "local_cpulist"))


@contextlib.contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Run this thread on some CPUs inside, if it may.

    The kernel takes untouched memory from where the thread runs that touches it.
    """
    if not cpus:  # as on systems that have no such calls
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def read_kernel_text(path: Path) -> str:
    """Return a file's text, empty where there is none that can be read."""
    try:
        return read_text(path)
    except ConfigError:
        return ""


def read_int(path: Path) -> int | None:
    """Return the integer that a file holds; None for no file or another word, such as "max"."""
    return to_int(read_kernel_text(path).strip())


def read_field(path: Path, name: str) -> int | None:
    """Return the integer behind ``name`` in a file of one name and one number a line."""
    lines = (line.split() for line in read_kernel_text(path).splitlines())
    return next((to_int(words[1]) for words in lines if len(words) > 1 and words[0] == name), None)


def read_members(text: str) -> frozenset[int]:
    """Return the members of a list such as ``0-3,8``; none where it is no such list."""
    members: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        start, end = to_int(first), to_int(last if dash else first)
        if start is None or end is None:
            return frozenset()
        members.update(range(start, end + 1))
    return frozenset(members)


def to_int(word: str) -> int | None:
    """Return a plain decimal number that is not negative; None for anything else."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 30 else None
