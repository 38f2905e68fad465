"""Places host memory on the memory node that a device is attached to.

Owns the look-up of a PCI device's node and the one system call that asks for it. Must not know
torch, pools or what the memory is for.

Invariant: a wish, never a need. With one node, an unknown node or a kernel that refuses, nothing is
done, and the memory comes from wherever the kernel takes it. Read next:
`megatron_offload.backends.cuda`, which knows its device's address.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

from megatron_offload.errors import ConfigError
from megatron_offload.files import read_text

__all__ = ["node_of_device", "online_nodes", "prefer_node"]

_logger = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of mbind(2), by machine."""

_MPOL_PREFERRED = 1
_MAX_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of_device(domain: int, bus: int, device: int, *, sysfs: Path = Path("/sys")) -> int | None:
    """Return the memory node next to a PCI device; None where there is no choice.

    Args:
        domain: the first part of the device's PCI address.
        bus: its second part.
        device: its third part.
        sysfs: where the kernel shows devices and nodes.
    """
    nodes = online_nodes(sysfs=sysfs)
    if len(nodes) < 2:
        return None
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    text = _read(sysfs / "bus/pci/devices" / address / "numa_node")
    node = int(text) if _is_number(text) else -1
    if node not in nodes:
        _logger.debug("the memory node of device %s is unknown (%r)", address, text[:20])
        return None
    return node


def online_nodes(*, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Return the machine's memory nodes; none where the kernel doesn't say."""
    nodes: set[int] = set()
    for part in _read(sysfs / "devices/system/node/online").split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last) and int(last) < _MAX_NODES):
            return frozenset()
        nodes.update(range(int(first), int(last) + 1))
    return frozenset(nodes)


def prefer_node(
    address: int, num_bytes: int, node: int, *, syscall: Callable[..., int] | None = None
) -> bool:
    """Have pages that nobody has touched yet come from ``node``, as long as it has any.

    Args:
        address: where they begin; a multiple of the page size.
        num_bytes: their size; the kernel rounds it up to whole pages.
        node: the memory node.
        syscall: C's ``syscall``; None takes the process's own.

    Returns:
        Whether the kernel agreed; if not, all is as it was.
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


def _read(path: Path) -> str:
    try:
        return read_text(path, limit_bytes=4096).strip()
    except ConfigError:
        return ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
