"""Which groups the program is in, and the boundaries of groups in its own order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias

from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.observer import Observer

Boundary: TypeAlias = Literal["start", "commit", "backward", "done"]
"""A forward enters and leaves a group, a backward does."""


class BoundaryObserver(Observer, ABC):
    """Tells `passed` of every boundary, in the order of the program.

    Of a group whose start needs no gradient nobody says that backward leaves it: the next boundary
    outside the group counts as its end.
    """

    def __init__(self) -> None:
        self.open: list[tuple[Literal["forward", "backward"], OffloadGroup]] = []
        """The passes and groups that the program is in, innermost last."""

    @abstractmethod
    def passed(self, boundary: Boundary, group: OffloadGroup) -> None:
        """The program has passed a boundary; ``open`` is up to date."""

    def group_starts(self, group: OffloadGroup) -> None:
        self.leave_backwards()
        self.open.append(("forward", group))
        self.passed("start", group)

    def group_commits(self, group: OffloadGroup, *, is_delayed: bool) -> None:
        if ("forward", group) in self.open:  # a commit that is put off comes twice
            self.open.remove(("forward", group))
            self.passed("commit", group)

    def backward_enters(self, group: OffloadGroup) -> None:
        self.leave_backwards(inner=group)
        self.open.append(("backward", group))
        self.passed("backward", group)

    def backward_leaves(self, group: OffloadGroup) -> None:
        # Of several, as through a graph that is kept, the last.
        if ("backward", group) in self.open:
            self.open.remove(("backward", group))
            self.passed("done", group)

    def leave_backwards(self, inner: OffloadGroup | None = None) -> None:
        """Leave the groups that backward is in, but for those around ``inner``."""
        for kind, group in list(self.open):
            is_around = inner is not None and (
                group.key.chunk == inner.key.chunk and group.key.order < inner.key.order
            )
            if kind == "backward" and not is_around:
                self.backward_leaves(group)
