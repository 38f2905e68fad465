"""Which blocks something other than autograd keeps on the device: moving them frees nothing.

Owns what was learned of that, from step to step. Must not know copies or streams.

A storage's other owners can't be told at the commit, where the frames of the forward still hold
theirs. They can when backward is there: a schedule that keeps a chunk's input until its backward
holds it then, and a finished frame doesn't.
"""

from __future__ import annotations

import torch

from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.saved_tensor import Block
from megatron_offload.planning.profile import GroupKey

__all__ = ["ForeignOwners", "num_owners"]


class ForeignOwners:
    """The blocks, by group and place in it, that have another owner until their backward."""

    def __init__(self) -> None:
        self._known: set[tuple[GroupKey, int]] = set()

    def knows(self, block: Block) -> bool:
        """Whether something else kept this block in the last step."""
        return bool(self._known) and block.identity in self._known

    def learn(self, group: OffloadGroup) -> None:
        """See, now that backward is here, which blocks something else has kept on the device.

        There is nothing to gain from moving those in the next step. One that stayed for that reason
        and has no other owner any more moves again.
        """
        for block in group.blocks():
            stayed = block.d2h is None and self.knows(block)
            revived = block.target is not None and block.reload is None
            if not (stayed or revived):
                continue
            own = block.aliases if block.target is None else [block.target]
            # One more is the Python handle of this line.
            if num_owners(own[0].untyped_storage()) > len(own) + 1:
                self._known.add(block.identity)
            else:
                self._known.discard(block.identity)

    def forget(self) -> None:
        """Learn anew: the program has changed."""
        self._known.clear()


def num_owners(storage: torch.UntypedStorage) -> int:
    """Count the owners of a storage: tensors, and the Python handle itself."""
    return int(torch._C._storage_Use_Count(storage._cdata))
