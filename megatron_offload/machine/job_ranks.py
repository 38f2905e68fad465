"""The ranks of a job: what each of them says, and which of them run under one kernel."""

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

    ``machines`` tells each rank's machine from others, ``turn`` is this rank's place among those of
    its machine, and ``num_turns`` the most ranks that any machine has.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, root: Path = Path("/")) -> None:
        self._group = group
        self._is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = rank = 0 if self._is_alone else dist.get_rank(group)
        boot = read_kernel_text(root / "proc/sys/kernel/random/boot_id").strip()  # drawn at start
        self.machines = self.gather(boot or platform.node())
        self.turn = self.machines[:rank].count(self.machines[rank])
        self.num_turns = max(Counter(self.machines).values())

    def gather(self, mine: _Said) -> list[_Said]:
        """Return what every rank says, as `gather` does; collective."""
        return gather(mine, self._group)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        if not self._is_alone:
            dist.barrier(self._group)
