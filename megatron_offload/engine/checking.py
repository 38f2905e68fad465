"""Checking mode: what was reloaded is compared with what left, and what was kept behind is named.

Both sums are taken on the compute stream; comparing makes the host wait, once for each block.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from megatron_offload.core.group import GroupState
from megatron_offload.engine.block_state import EXTERNAL, RELOADED
from megatron_offload.engine.group import NO_BASE, Block, OffloadGroup
from megatron_offload.engine.observer import Observer
from megatron_offload.errors import CorruptionError
from megatron_offload.memory.checksum import checksum
from megatron_offload.memory.layout import layout_of

_Parts = set[tuple[int, int]]


class Checker(Observer):
    """Compares each block that is reloaded, once, with what left."""

    def __init__(self) -> None:
        self._left: WeakKeyDictionary[Block, tuple[_Parts, torch.Tensor]] = WeakKeyDictionary()

    def block_offloads(self, block: Block, source: torch.Tensor) -> None:
        """Sum the parts that hold saved tensors: what lies between them may change any time.

        So may the rest of a row, where a part of it is no view: it has a version of its own.
        """
        parts: _Parts = set()
        for alias in block.aliases:
            layout = layout_of(alias)
            low, high = layout.low - block.low, layout.high - block.low
            if block.base != NO_BASE or high - low <= layout.num_bytes:
                parts.add((max(low, 0), min(high, block.high - block.low)))
        self._left[block] = parts, _sum_of(source, parts)

    def block_read(self, block: Block, target: torch.Tensor) -> None:
        """Compare the sums; the host waits for the result.

        Raises:
            CorruptionError: a bit differs.
        """
        if block.state is EXTERNAL or block not in self._left:  # it was compared
            return
        parts, expected = self._left.pop(block)
        actual = _sum_of(target, parts)
        if torch.equal(expected, actual):
            return
        came = "was reloaded from the host"
        if block.recipe is not None:
            came = f"was recomputed ({block.recipe.unit!r})"
        what = f"a region of {block.high - block.low} bytes"
        if block.spec[1] is not None:
            size, dtype = block.spec[1]
            what = f"a tensor of shape {list(size)} and dtype {dtype}"
        raise CorruptionError(
            f"group {block.group.label}: {what} (number {block.index} that {block.group.name!r} "
            f"saved) {came} with other bits than it left with: checksum "
            f"{actual.item():#x}, expected {expected.item():#x}; its gradients would be wrong"
        )


def leaks_of(groups: Iterable[OffloadGroup]) -> tuple[str, ...]:
    """Describe the groups that still hold memory: some graph of the step is alive."""
    found = []
    for group in groups:
        blocks = group.blocks()
        host_bytes = sum(block.num_bytes for block in blocks if block.host is not None)
        device_bytes = sum(block.num_bytes for block in blocks if block.state is RELOADED)
        if host_bytes or device_bytes:
            left = "backward has left it" if group.state is GroupState.DONE else group.state.name
            found.append(
                f"{group.label}: {host_bytes} bytes on the host, {device_bytes} reloaded ({left})"
            )
    return tuple(found)


def _sum_of(region: torch.Tensor, parts: Iterable[tuple[int, int]]) -> torch.Tensor:
    flat = region.detach().as_strided((region.numel(),), (1,)).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for low, high in sorted(parts):
        total = total * 3 + checksum(flat[low:high])
    return total
