"""A layer group: the saved tensors between `group_start` and `group_commit`.

Owns the state of a group, with one `advance()` through the table of
`megatron_offload.core.states`, and the pack hook. Must not know streams or pools; see
`megatron_offload.engine.transfers` for those.

Invariants: a move that is not in `MOVES` raises and changes nothing; a group refers to its blocks
weakly, so that it never keeps memory alive. Read next: `megatron_offload.engine.chunk`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from megatron_offload.core.profile import GroupKey
from megatron_offload.core.states import MOVES, GroupState
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.saved_tensor import Block, BlockRef, SavedTensor
from megatron_offload.errors import StateError
from megatron_offload.memory.storage import span_bytes

if TYPE_CHECKING:
    from megatron_offload.engine.chunk import ChunkOffloadHandler
    from megatron_offload.engine.transfers import Transfers

__all__ = ["MOVES", "READY_MARK", "GroupState", "OffloadGroup"]


READY_MARK = "_offload_ready"
"""The attribute of a tensor that holds its version and the event behind its producer, once told."""


# A group's past is kept as text: unlike a list, the garbage collector need not look at it.
_LETTERS = {state: str(index) for index, state in enumerate(GroupState)}
_STATES = {letter: state for state, letter in _LETTERS.items()}


class OffloadGroup:
    """One layer group of one chunk.

    Attributes:
        key: position in the step, a hint for prefetch and planning only.
        name: the module's name, such as ``core_attn``; groups of one name are counted together.
        num_bytes: bytes that moving the group copies; set at commit.
        elsewhere_bytes: bytes besides that something else keeps; set at commit.
        staying_bytes: bytes besides that were chosen to stay; set at commit.
        small_bytes: bytes besides of tensors that are too small to move.
        shared_bytes: of both, what a group before it has as well and left there; set at commit.
        committed_at_bytes: when its forward ended, by the step's clock.
        is_resident: whether the plan keeps it in the room for groups that never move.
        held_bytes: what it takes of the device budget just now.
        leaf_hook: the hook at the group's start where that is a leaf of the graph.
    """

    __slots__ = (
        "_blocks",
        "_moves",
        "_num_lost",
        "_num_saved",
        "chunk",
        "committed_at_bytes",
        "elsewhere_bytes",
        "held_bytes",
        "is_resident",
        "key",
        "leaf_hook",
        "name",
        "num_bytes",
        "shared_bytes",
        "small_bytes",
        "state",
        "staying_bytes",
        "transfers",
    )

    def __init__(
        self, chunk: ChunkOffloadHandler, key: GroupKey, name: str, transfers: Transfers
    ) -> None:
        self.chunk = chunk
        self.key = key
        self.name = name
        self.transfers = transfers
        self.state = GroupState.RECORDING
        self._moves = _LETTERS[GroupState.RECORDING]
        self.num_bytes = 0
        self.elsewhere_bytes = 0
        self.shared_bytes = 0
        self.staying_bytes = 0
        self.small_bytes = 0
        self.committed_at_bytes = 0
        self.held_bytes = 0
        self.is_resident = False
        self.leaf_hook: RemovableHandle | None = None
        self._blocks: list[BlockRef] = []
        # Two counts, because one may be added to while the other is.
        self._num_saved = 0
        self._num_lost = 0

    @property
    def label(self) -> str:
        """What to call the group in messages and traces."""
        return f"{self.name}[chunk {self.key.chunk}, group {self.key.order}]"

    def advance(self, to: GroupState) -> None:
        """Move to state ``to``.

        Raises:
            StateError: the table has no such move; nothing has changed.
        """
        if to not in MOVES[self.state]:
            past = " -> ".join(state.name for state in self.moves)
            raise StateError(f"group {self.label} can't move to {to.name}; its moves were {past}")
        self.state = to
        self._moves += _LETTERS[to]

    @property
    def moves(self) -> list[GroupState]:
        """Every state that the group has been in, in order."""
        return [_STATES[letter] for letter in self._moves]

    def hold(self) -> None:
        """Count the group's bytes as held on the device until no one needs them any more."""
        if self.held_bytes == 0 and self._num_saved > self._num_lost:
            self.held_bytes = self.num_bytes
            self.transfers.budget.held_bytes += self.num_bytes

    def let_go(self) -> None:
        """Count nothing of the group as held any more."""
        self.transfers.budget.held_bytes -= self.held_bytes
        self.held_bytes = 0

    def lose_block(self, num_bytes: int) -> None:
        """Take note that no record needs one of its own blocks any more."""
        self._num_lost += 1
        if self.held_bytes:
            if self._num_lost == self._num_saved or num_bytes >= self.held_bytes:
                self.let_go()
            else:
                self.held_bytes -= num_bytes
                self.transfers.budget.held_bytes -= num_bytes

    @property
    def passing_bytes(self) -> int:
        """What the step's clock counts of it, in forward and in backward."""
        return self.num_bytes + self.staying_bytes

    @property
    def is_spent(self) -> bool:
        """Whether no record needs any of its own blocks any more."""
        return self._num_lost == self._num_saved

    def drop_dead_blocks(self) -> None:
        """Forget the blocks that no record needs any more."""
        self._blocks = [reference for reference in self._blocks if reference() is not None]

    def unhook(self) -> None:
        """Take the hook off the leaf that the group started with; leaves outlive graphs."""
        if self.leaf_hook is not None:
            self.leaf_hook.remove()
            self.leaf_hook = None

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks that some record still needs."""
        for reference in self._blocks:
            block = reference()
            if block is not None:
                yield block

    @graph_break
    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Record a tensor that autograd saves; the pack hook.

        Returns:
            The record that autograd keeps; `SavedTensor.unpack` gives the tensor back.
        """
        chunk = self.chunk
        for observer in self.transfers.observers:
            if not isinstance(tensor, torch.nn.Parameter):
                observer.tensor_saved(tensor)
        storage_key = chunk.activation_storage(tensor)
        if storage_key is None:
            return SavedTensor(tensor, None, self.name)
        if chunk.is_small(tensor):
            self.small_bytes += chunk.small_bytes(storage_key, tensor)
            return SavedTensor(tensor, None, self.name)
        offset = int(tensor.storage_offset())
        low = offset * tensor.itemsize
        is_contiguous = tensor.is_contiguous()
        high = low + (tensor.nbytes if is_contiguous else span_bytes(tensor))
        reference = chunk.blocks.get(storage_key)
        block = reference() if reference is not None else None
        if block is not None:
            if block.d2h is None:
                record = SavedTensor(tensor, block, self.name, offset)
                block.add(record.alias, low, high, is_contiguous=is_contiguous)
                block.ready = None  # told of one of them only, maybe
                self._adopt(block)
                return record
            if block.covers(low, high) and block.version == tensor._version:
                record = SavedTensor(tensor, block, self.name, offset)
                if block.released:
                    self.transfers.sources.empty(record.alias)
                else:
                    block.aliases.append(record.alias)
                self._adopt(block)
                return record
        block = Block(self, len(self._blocks), storage_key, tensor._version)
        reference = weakref.ref(block)
        chunk.blocks[storage_key] = reference
        self._blocks.append(reference)
        self._num_saved += 1
        record = SavedTensor(tensor, block, self.name, offset)
        block.add(record.alias, low, high, is_contiguous=is_contiguous)
        told = tensor.__dict__.pop(READY_MARK, None)  # once: who writes to it again tells again
        if told is not None and told[0] == tensor._version:
            block.ready = told[1]
        if chunk.chooses is not None and not self.transfers.owners.knows(block):
            block.stays = not chunk.chooses(block.num_bytes)
        return record

    def _adopt(self, block: Block) -> None:
        """Make a shared block one of this group's too: whoever needs it first reloads it."""
        if block.group is self:
            return
        if not any(reference() is block for reference in self._blocks):
            self._blocks.append(weakref.ref(block))
