"""What the machine's memory allows: one small function for each question.

Owns the judgement of memory nodes, limits and swap. Must not know torch.

Invariant: nothing is changed, apart from one page that is asked from a node and given back. Read
next: `megatron_offload.machine.checks_software`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_offload.backends.host_limit import default_cap_bytes
from megatron_offload.backends.numa import node_of_device, online_nodes, prefer_node
from megatron_offload.files.kernel import read_field, read_kernel_text, read_members
from megatron_offload.machine.finding import Finding

__all__ = [
    "check_host_memory",
    "check_memlock",
    "check_memory_node",
    "check_swap",
    "may_place_pages",
]

_GIB = 1024**3
_MUCH_SWAP_BYTES = _GIB


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
        return Finding(
            "note",
            title,
            f"unknown; the machine has {len(nodes) or 'an unknown number'}",
            "bind each rank to the node next to its GPU (numactl, nvidia-smi topo -m)",
        )
    status = _status(root)
    memory_nodes = read_members(status.get("Mems_allowed_list", ""))
    if memory_nodes and node not in memory_nodes:
        return Finding(
            "warning",
            title,
            f"node {node} is next to it, and this process may only use {sorted(memory_nodes)}",
            f"give the job memory of node {node} (its cpuset, or the container's --cpuset-mems)",
        )
    near_cpus = read_members(read_kernel_text(root / f"sys/devices/system/node/node{node}/cpulist"))
    own_cpus = read_members(status.get("Cpus_allowed_list", ""))
    is_far = bool(near_cpus and own_cpus and not near_cpus & own_cpus)
    is_near = bool(own_cpus and own_cpus <= near_cpus)
    if is_near or (may_place or may_place_pages)(node):
        if is_far:
            return Finding(
                "note",
                title,
                f"pinned memory comes from node {node}, but no CPU of this process is there",
                "launches take longer from afar: bind the rank (numactl --cpunodebind)",
            )
        return Finding("ok", title, f"{node}, where pinned memory comes from")
    return Finding(
        "warning" if is_far else "note",
        title,
        f"{node}; the kernel refuses mbind(2), so memory comes from where the process happens to "
        + ("run, which is not there" if is_far else "run"),
        f"bind the rank (numactl --cpunodebind={node}), or let the container place memory "
        "(--cap-add SYS_NICE)",
    )


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
    found = f"{cap_bytes / _GIB:.1f} GiB may be pinned by "
    found += f"each of {num_ranks} ranks" if num_ranks > 1 else "one rank"
    found += f" ({share:.0%} of what is free)"
    if cap_bytes < slab_bytes:
        return Finding(
            "warning",
            "host memory",
            f"{found}, less than one slab of {slab_bytes / _GIB:g} GiB",
            "free memory, raise the control group's limit (the container's --memory), or set "
            "host_memory_bytes; over it, tensors stay on the device",
        )
    return Finding("ok", "host memory", found)


def check_memlock(limit_bytes: int | None) -> Finding:
    """Say what the limit of locked memory is, and for whom it counts.

    Args:
        limit_bytes: the soft RLIMIT_MEMLOCK; None for no limit.
    """
    if limit_bytes is None:
        return Finding("ok", "locked memory (RLIMIT_MEMLOCK)", "no limit")
    return Finding(
        "note",
        "locked memory (RLIMIT_MEMLOCK)",
        f"{limit_bytes} bytes",
        "CUDA doesn't count what it pins, but RDMA does: ulimit -l unlimited (the container's "
        "--ulimit memlock=-1)",
    )


def check_swap(*, root: Path = Path("/")) -> Finding:
    """Say whether the machine swaps: pinned memory stays, so that others' goes."""
    total_kib = read_field(root / "proc/meminfo", "SwapTotal:")
    free_kib = read_field(root / "proc/meminfo", "SwapFree:")
    if total_kib is None or free_kib is None:
        return Finding("note", "swap", "unknown")
    used_bytes = max(0, total_kib - free_kib) * 1024
    if used_bytes > _MUCH_SWAP_BYTES:
        return Finding(
            "note",
            "swap",
            f"{used_bytes / _GIB:.1f} GiB in use",
            "pinned memory pushes others out: lower host_memory_share, or see who needs so much",
        )
    return Finding("ok", "swap", f"{used_bytes / _GIB:.1f} GiB in use")


def _status(root: Path) -> dict[str, str]:
    lines = read_kernel_text(root / "proc/self/status").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}
