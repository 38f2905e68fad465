"""What the engine reports to its observers, as it happens.

A watcher is attached with `PipelineOffloadManager.observed_by`; several may be at once. It is
called on the thread that runs the step: it must not block, and changes nothing of what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch

from megatron_offload.backends.base import Pair, Wait
from megatron_offload.engine.group import Block, OffloadGroup

Direction: TypeAlias = Literal["d2h", "h2d"]


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
