"""What the ranks of a job say to one another."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

_Said = TypeVar("_Said")


def gather(mine: _Said, group: dist.ProcessGroup | None = None) -> list[_Said]:
    """Return what every rank of the group says, in the order of ranks; collective.

    Without `torch.distributed` that is ``mine`` alone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    said = [mine] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's place in what `gather` returns."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
