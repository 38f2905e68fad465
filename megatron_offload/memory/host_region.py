"""Stretches of pinned host memory: what a slab is cut into, and what a user of the pool holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron_offload.backends.base import Event
from megatron_offload.memory.layout import ALIGNMENT_BYTES, ViewSpec

_MOST_SHOWN = 8
"""Of the shapes that a program gives the same bytes in turn, so many are kept."""


@dataclass(slots=True, eq=False, repr=False)
class Piece:
    """A stretch of a slab, free without a ``region``.

    Pieces make no cycle, so a dropped slab is unpinned at once. What is cut and joined is right
    after each line, but for ``num_bytes``.
    """

    base: torch.Tensor
    offset: int
    num_bytes: int
    next: Piece | None = None
    event: Event | None = None
    turn: int = 0
    """Which of the pool's events that is: a later one stands for those before it. -1 where a graph
    has the bytes."""
    region: HostRegion | None = None
    views: dict[tuple[ViewSpec, ...], list[torch.Tensor]] = field(default_factory=dict)
    """What it was shown as: one step's regions are as the last one's, though not in its order.
    Sizes and the offset are the same whenever it is allocated for these parts."""

    def __iter__(self) -> Iterator[Piece]:
        piece: Piece | None = self
        while piece is not None:
            yield piece
            piece = piece.next

    def show(self, specs: tuple[ViewSpec, ...]) -> list[torch.Tensor]:
        """Return a tensor for each part."""
        views = []
        start = self.offset
        for num_bytes, like in specs:
            view = self.base[start : start + num_bytes]
            views.append(view if like is None else view.view(like[1]).view(like[0]))
            start += aligned(num_bytes)
        if len(self.views) >= _MOST_SHOWN:
            self.views.clear()
        self.views[specs] = views
        return views

    def cut(self, num_bytes: int) -> Piece:
        """Keep so many bytes; return the rest."""
        rest_bytes = self.num_bytes - num_bytes
        start = self.offset + num_bytes
        rest = Piece(self.base, start, rest_bytes, self.next, self.event, self.turn)
        self.next = rest
        self.num_bytes = num_bytes
        return rest

    def join(self, other: Piece) -> None:
        """Take over the bytes of the next piece; the newer of both events counts."""
        self.num_bytes += other.num_bytes
        self.next = other.next
        if other.turn > self.turn:
            self.event, self.turn = other.event, other.turn


@dataclass(slots=True, eq=False, repr=False)
class HostRegion:
    """Pinned bytes allocated by a `HostPool`, until they are given to `HostPool.free`.

    Each part is shown by one of ``views``; of the ``size_bytes`` of all, each rounded up to
    `ALIGNMENT_BYTES`, ``alone_bytes``, by name, are nowhere else. A new write must wait for
    ``ready_event``, the newest H2D event of any former user (W5). ``num_users`` parts were not
    freed.
    """

    _piece: Piece | None
    views: list[torch.Tensor]
    size_bytes: int
    ready_event: Event | None
    num_users: int
    alone_bytes: tuple[tuple[str, int], ...] = ()

    @property
    def tensor(self) -> torch.Tensor:
        """The first part; all of a region that was asked for by its bytes."""
        return self.views[0]


def aligned(num_bytes: int) -> int:
    """Round a size up to what a region takes."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
