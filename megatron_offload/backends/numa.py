"""Places host memory on the memory node that a device is attached to.

A wish, never a need: with one node, an unknown node or a kernel that refuses, nothing is done, and
the memory comes from wherever the kernel takes it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

from megatron_offload.files.kernel import read_kernel_text, read_members, to_int

_logger = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of mbind(2), by machine."""

_MPOL_PREFERRED = 1
_MAX_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of_device(address: str | None, *, sysfs: Path = Path("/sys")) -> int | None:
    """Return the memory node next to a PCI device; None where there is no choice.

    Its address is as the kernel writes it, such as ``0000:dc:02.0``; None where it is unknown.
    """
    nodes = online_nodes(sysfs=sysfs)
    if address is None or len(nodes) < 2:
        return None
    text = read_kernel_text(sysfs / "bus/pci/devices" / address / "numa_node").strip()
    node = to_int(text)
    if node not in nodes:
        _logger.debug("the memory node of device %s is unknown (%r)", address, text[:20])
        return None
    return node


def online_nodes(*, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Return the machine's memory nodes; none where the kernel doesn't say."""
    return read_members(read_kernel_text(sysfs / "devices/system/node/online"))


def prefer_node(
    address: int, num_bytes: int, node: int, *, syscall: Callable[..., int] | None = None
) -> bool:
    """Have pages that nobody has touched yet come from ``node``, as long as it has any.

    Args:
        address: where they begin; a multiple of the page size.
        num_bytes: their size; the kernel rounds it up to whole pages.
        node: the memory node.
        syscall: C's ``syscall``; None takes the process's own.

    Returns whether the kernel agreed; if not, all is as it was.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        return False
    words = (ctypes.c_ulong * (node // _BITS + 1))()
    words[node // _BITS] = 1 << node % _BITS
    if syscall is None:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    result = syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(len(words) * _BITS + 1),  # the kernel reads one bit less than it is told
        ctypes.c_uint(0),
    )
    if result != 0:
        reason = os.strerror(ctypes.get_errno())
        _logger.debug("%d bytes can't be placed on memory node %d: %s", num_bytes, node, reason)
    return result == 0
