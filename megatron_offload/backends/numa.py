"""Where a device is attached: the CPUs next to it, and memory that comes from there.

A wish, never a need: where the kernel doesn't say or refuses, memory comes from anywhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_offload.files.kernel import read_kernel_text, read_members


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

    The kernel takes memory that nobody has touched yet from where the thread runs that touches it.
    """
    before = os.sched_getaffinity(0)
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus:
            os.sched_setaffinity(0, before)
