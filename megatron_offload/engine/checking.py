"""Checking mode: what came back is compared with what left, and what stayed behind is named.

Owns the checksums and the leak report. Must not know streams: both sums are taken on the compute
stream, before the copy to the host is issued and after the wait for the copy back.

A checksum is the sum of all 64-bit words, each times an odd number of its own, modulo 2^64: any
change of one word changes it, and so does an exchange of two. Comparing makes the host wait, once
for each block. Read next: `megatron_offload.engine.transfers`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_offload.engine.group import GroupState, OffloadGroup
from megatron_offload.engine.saved_tensor import Block
from megatron_offload.errors import CorruptionError
from megatron_offload.memory.storage import span_bytes

__all__ = ["checksum", "compare", "leaks_of", "note_source"]

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 20
"""Words summed at a time: what is allocated for it stays small beside a block."""


def note_source(block: Block, source: torch.Tensor) -> None:
    """Take the checksum of what is about to be copied.

    Args:
        block: gets the sum, and the parts of its region that hold saved tensors: what lies between
            them may change any time.
        source: the block's region, contiguous.
    """
    parts: list[tuple[int, int]] = []
    for low, high in sorted(_span(alias) for alias in block.aliases):
        low, high = max(low, block.low) - block.low, min(high, block.high) - block.low
        if parts and low <= parts[-1][1]:
            parts[-1] = parts[-1][0], max(high, parts[-1][1])
        else:
            parts.append((low, high))
    block.checked_parts = tuple(parts)
    block.checksum = _sum_of(source, block.checked_parts)


def compare(block: Block, target: torch.Tensor) -> None:
    """Compare what has come back; the host waits for the result. A second time does nothing.

    Raises:
        CorruptionError: a bit differs.
    """
    expected, block.checksum = block.checksum, None
    if expected is None:
        return
    actual = _sum_of(target, block.checked_parts)
    if torch.equal(expected, actual):
        return
    what = f"a region of {block.num_bytes} bytes"
    if block.like is not None:
        what = f"a tensor of shape {list(block.like[0])} and dtype {block.like[1]}"
    raise CorruptionError(
        f"group {block.group.label}: {what} (number {block.index} that {block.group.name!r} saved) "
        f"came back from the host with other bits than it left with: checksum "
        f"{actual.item():#x}, expected {expected.item():#x}; its gradients would be wrong"
    )


def leaks_of(groups: Iterable[OffloadGroup]) -> tuple[str, ...]:
    """Describe the groups that still hold memory: some graph of the step is alive."""
    found = []
    for group in groups:
        host_bytes = sum(b.num_bytes for b in group.blocks() if b.host is not None)
        device_bytes = sum(
            b.num_bytes for b in group.blocks() if b.reload is not None and b.target is not None
        )
        if host_bytes or device_bytes:
            left = "backward has left it" if group.state is GroupState.DONE else group.state.name
            found.append(
                f"{group.label}: {host_bytes} bytes on the host, {device_bytes} reloaded ({left})"
            )
    return tuple(found)


def checksum(region: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a flat uint8 tensor, an int64 of shape [] on its device."""
    head = -int(region.storage_offset()) % _WORD_BYTES
    words_end = head + (region.numel() - head) // _WORD_BYTES * _WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=region.device)
    if words_end > head:
        words = region[head:words_end].view(torch.int64)
        for start in range(0, words.numel(), _CHUNK_WORDS):
            chunk = words[start : start + _CHUNK_WORDS]
            end = start + chunk.numel()
            weights = torch.arange(2 * start + 1, 2 * end + 1, 2, device=region.device)
            total += (chunk * weights).sum()
    else:
        words_end = head = 0
    for rest, weight in ((region[:head], 3), (region[words_end:], 5)):
        if rest.numel():
            weights = torch.arange(rest.numel(), dtype=torch.int64, device=region.device)
            total += ((rest.to(torch.int64) + 1) * (256 * weights + weight)).sum()
    return total


def _sum_of(region: torch.Tensor, parts: Iterable[tuple[int, int]]) -> torch.Tensor:
    flat = region.detach().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for low, high in parts:
        total = total * 3 + checksum(flat[low:high])
    return total


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor lies in."""
    low = int(tensor.storage_offset()) * tensor.itemsize
    return low, low + span_bytes(tensor)
