"""The ranks of a job: what each of them says, and which of them share a machine.

Ranks share a machine where they run under one kernel, in whatever containers.
"""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megatron_offload.files.kernel import read_kernel_text

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


class JobRanks:
    """All ranks of a group, which make it together; or this process alone.

    Args:
        group: None for all ranks.
        root: the folder in which ``proc`` lies.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, root: Path = Path("/")) -> None:
        self._group = group
        self._is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._is_alone else dist.get_rank(group)
        boot = read_kernel_text(root / "proc/sys/kernel/random/boot_id").strip()
        self.machines = self.gather(boot or platform.node())
        """What tells each rank's machine from others: drawn by its kernel at its start."""

    @property
    def turn(self) -> int:
        """This rank's place among those of its machine."""
        return self.machines[: self.rank].count(self.machines[self.rank])

    @property
    def num_turns(self) -> int:
        """The most ranks that any machine has."""
        return max(Counter(self.machines).values())

    def gather(self, mine: _Said) -> list[_Said]:
        """Return what every rank says, as `gather` does; collective."""
        return gather(mine, self._group)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        if not self._is_alone:
            dist.barrier(self._group)
