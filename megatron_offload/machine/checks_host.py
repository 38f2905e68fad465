"""What the machine's memory allows: one small function for each question.

Nothing is changed, apart from one page that is asked from a node and given back.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from megatron_offload.backends.host_limit import default_cap_bytes
from megatron_offload.backends.numa import node_of_device, online_nodes, prefer_node
from megatron_offload.core.units import format_bytes
from megatron_offload.files.kernel import read_kernel_text, read_members
from megatron_offload.machine.finding import Finding

_MUCH_SWAP_BYTES = 1024**3


def check_memory_node(
    index: int,
    address: str | None,
    *,
    root: Path = Path("/"),
    may_place: Callable[[int], bool] | None = None,
) -> Finding:
    """Say whether a GPU's pinned memory comes from the node next to it.

    Args:
        index: of the GPU.
        address: its PCI address.
        root: the folder in which ``proc`` and ``sys`` lie.
        may_place: whether memory can be asked from a node; None asks for a page.
    """
    title = f"GPU {index}: memory node"
    nodes = online_nodes(sysfs=root / "sys")
    if len(nodes) == 1:
        return Finding("ok", title, "the machine has one")
    node = node_of_device(address, sysfs=root / "sys")
    if node is None:
        found = f"unknown; the machine has {len(nodes) or 'an unknown number'}"
        advice = "bind each rank to the node next to its GPU (numactl, nvidia-smi topo -m)"
        return Finding("note", title, found, advice)
    status = read_kernel_text(root / "proc/self/status")
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.MULTILINE)
    memory_nodes = read_members(allowed[1] if allowed else "")
    if memory_nodes and node not in memory_nodes:
        found = f"node {node} is next to it, and this process may only use {sorted(memory_nodes)}"
        advice = f"give the job memory of node {node} (its cpuset, the container's --cpuset-mems)"
        return Finding("warning", title, found, advice)
    near_cpus = read_members(read_kernel_text(root / f"sys/devices/system/node/node{node}/cpulist"))
    own_cpus = frozenset(psutil.Process().cpu_affinity())
    is_far = bool(near_cpus) and not near_cpus & own_cpus
    if own_cpus <= near_cpus or (may_place or may_place_pages)(node):
        if not is_far:
            return Finding("ok", title, f"{node}, where pinned memory comes from")
        found = f"pinned memory comes from node {node}, but no CPU of this process is there"
        advice = "launches take longer from afar: bind the rank (numactl --cpunodebind)"
        return Finding("note", title, found, advice)
    found = (
        f"{node}; the kernel refuses mbind(2), so memory comes from where the process happens to "
    )
    found += "run, which is not there" if is_far else "run"
    advice = f"bind the rank (numactl --cpunodebind={node}), or let the container place memory "
    advice += "(--cap-add SYS_NICE)"
    return Finding("warning" if is_far else "note", title, found, advice)


def may_place_pages(node: int) -> bool:
    """Whether the kernel takes the wish for memory of a node (mbind), tried on one page."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = ctypes.c_char.from_buffer(page)
        placed = prefer_node(ctypes.addressof(view), mmap.PAGESIZE, node)
        del view  # the page can't be given back before
    return placed


def check_host_memory(
    num_ranks: int, slab_bytes: int, *, share: float = 0.5, root: Path = Path("/")
) -> Finding:
    """Say how much each rank may pin, by what the machine and its control groups have free.

    Args:
        num_ranks: ranks on this machine.
        slab_bytes: pinned memory is taken in pieces of this size.
        share: the part of the free memory that all of them may take (``host_memory_share``).
        root: the folder in which ``proc`` and ``sys`` lie.
    """
    environ: Mapping[str, str] = {"LOCAL_WORLD_SIZE": str(num_ranks)}
    cap_bytes = default_cap_bytes(share, environ, root=root)
    found = f"{format_bytes(cap_bytes)} may be pinned by "
    found += f"each of {num_ranks} ranks" if num_ranks > 1 else "one rank"
    found += f" ({share:.0%} of what is free)"
    if cap_bytes >= slab_bytes:
        return Finding("ok", "host memory", found)
    found += f", less than one slab of {format_bytes(slab_bytes)}"
    advice = "free memory, raise the control group's limit (the container's --memory), or set "
    advice += "host_memory_bytes; over it, tensors stay on the device"
    return Finding("warning", "host memory", found, advice)


def check_memlock(limit_bytes: int | None) -> Finding:
    """Say what the limit of locked memory is (soft RLIMIT_MEMLOCK; None for none), and for whom."""
    title = "locked memory (RLIMIT_MEMLOCK)"
    if limit_bytes is None:
        return Finding("ok", title, "no limit")
    advice = "CUDA doesn't count what it pins, but RDMA does: ulimit -l unlimited (the container's "
    advice += "--ulimit memlock=-1)"
    return Finding("note", title, format_bytes(limit_bytes), advice)


def check_swap() -> Finding:
    """Say whether the machine swaps: pinned memory stays, so that others' goes."""
    used_bytes = psutil.swap_memory().used
    found = f"{format_bytes(used_bytes)} in use"
    if used_bytes <= _MUCH_SWAP_BYTES:
        return Finding("ok", "swap", found)
    advice = "pinned memory pushes others out: lower host_memory_share, or see who needs so much"
    return Finding("note", "swap", found, advice)
