"""What the engine reports to its observers, as it happens, and the one that checks it.

A watcher is attached with `PipelineOffloadManager.observed_by`; several may be at once. It is
called on the thread that runs the step: it must not block, and changes nothing of what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch

from megatron_offload.backends.base import Pair, Wait
from megatron_offload.engine.block_state import EXTERNAL
from megatron_offload.engine.group import NO_BASE, Block, OffloadGroup
from megatron_offload.errors import CorruptionError
from megatron_offload.memory.checksum import checksum
from megatron_offload.memory.layout import layout_of

Direction: TypeAlias = Literal["d2h", "h2d"]
_Parts: TypeAlias = set[tuple[int, int]]


class Observer:
    """Watches a manager; each method does nothing unless it is overridden.

    What takes the device's or the engine's time is reported before and after. While one watches
    that ``needs_groups``, groups are recorded where nothing would be offloaded, too.
    """

    needs_groups = True

    def group_starts(self, group: OffloadGroup) -> None:
        """A forward enters a group."""

    def group_commits(self, group: OffloadGroup) -> None:
        """A forward leaves a group; of a commit that is put off it is reported twice."""

    def backward_enters(self, group: OffloadGroup) -> None:
        """A backward reaches a group's end."""

    def backward_leaves(self, group: OffloadGroup) -> None:
        """A backward passes a group's start; never reported where the start needs no gradient."""

    def boundary_passed(self, group: OffloadGroup) -> None:
        """The engine has dealt with a commit, or with what was reported of a backward."""

    def tensor_saved(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor, other than a parameter, in a group."""

    def tensor_reloaded(self, tensor: torch.Tensor) -> None:
        """Bytes that were on the host are reloaded to this device memory."""

    def block_offloads(self, block: Block, source: torch.Tensor) -> None:
        """A block's region is about to be copied to the host, or dropped to be recomputed."""

    def block_read(self, block: Block, target: torch.Tensor) -> None:
        """A record reads the released block's bytes here, ordered behind their reload."""

    def recompute_starts(self, label: str) -> None:
        """What was dropped is about to be recomputed, of this group or, in none, of this site."""

    def recomputed(self, made: object) -> None:
        """It was: of a block, or of what a site returns, as this tensor."""

    def copy_starts(self, direction: Direction) -> None:
        """Copies are about to be queued on the stream of this direction."""

    def copy_issued(self, direction: Direction, pairs: Sequence[Pair], group: OffloadGroup) -> None:
        """Copies were queued for a group; of an offload the source is held from here on."""

    def wait_starts(self) -> None:
        """The compute stream is about to wait for a copy."""

    def wait_issued(self, why: Wait, group: OffloadGroup) -> None:
        """The compute stream waits: in W2 for a group's offload, whose source is then released."""


def recompute(observers: Sequence[Observer], label: str, run: Callable[[], Any]) -> Any:
    """Run again what makes something that was dropped, and report that."""
    for observer in observers:
        observer.recompute_starts(label)
    made = run()
    for observer in observers:
        observer.recomputed(made)
    return made


class Checker(Observer):
    """Compares each block that is reloaded, once, with what left: the checking mode.

    Both sums are taken on the compute stream; comparing makes the host wait, once for each block.
    """

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


def _sum_of(region: torch.Tensor, parts: Iterable[tuple[int, int]]) -> torch.Tensor:
    flat = region.detach().as_strided((region.numel(),), (1,)).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for low, high in sorted(parts):
        total = total * 3 + checksum(flat[low:high])
    return total
