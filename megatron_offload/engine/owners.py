"""Which blocks something other than autograd keeps on the device: offloading them frees nothing.

A storage's other owners are unknown at the commit, where the frames of the forward still hold
it. They are known when backward begins: a schedule that keeps a chunk's input until its backward
holds it then, and a finished frame doesn't.
"""

from __future__ import annotations

from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.group import Block, OffloadGroup
from megatron_offload.memory.tensor_pool import num_owners


class ForeignOwners:
    """The blocks, by group and place in it, that have another owner until their backward."""

    def __init__(self) -> None:
        self.known: set[tuple[GroupKey, int]] = set()

    def knows(self, block: Block) -> bool:
        """Whether something else kept this block in the last step."""
        return bool(self.known) and block.identity in self.known

    def learn(self, group: OffloadGroup) -> None:
        """See, now that backward is here, which blocks something else has kept on the device.

        Those are kept in the next step: nothing is gained by offloading them. One that was kept for
        that reason and has no other owner any more is offloaded again.
        """
        for found in group.references:
            block = found()
            if block is None or block.reload is not None or block.was_reached:
                continue  # it left, or what another group has read of it is an owner now
            block.was_reached = True
            if block.flight is not None or block.released or self.knows(block):
                is_held = is_externally_referenced(block)
                if is_held:
                    self.known.add(block.identity)
                elif is_held is not None:
                    self.known.discard(block.identity)


def is_externally_referenced(block: Block) -> bool | None:
    """Whether something else keeps a block on the device, when backward has come to it.

    None where it left, or may have.
    """
    if block.flight is None and block.released:  # it was dropped, to be recomputed
        return block.live_source() is not None or None
    if block.flight is None:
        own = [block.alias, *block.others]
    elif block.target is not None and block.reload is None:
        own = [block.target]  # it was to leave, and its source was still there
    else:
        return None
    own += (block.handed or {}).values()
    return num_owners(own[0].untyped_storage()) > len(own) + 1  # and this line's handle
