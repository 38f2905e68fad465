"""A layer group: the saved tensors between `group_start` and `group_commit`, and the pack hook.

Invariant: a group refers to its blocks weakly, so that it never keeps memory alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from megatron_offload.core.group import MOVES, Group, GroupState
from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.saved_tensor import Block, BlockRef, SavedTensor
from megatron_offload.memory.storage import span_bytes

if TYPE_CHECKING:
    from megatron_offload.engine.chunk import ChunkOffloadHandler
    from megatron_offload.engine.transfers import Transfers

__all__ = ["MOVES", "READY_MARK", "GroupState", "OffloadGroup"]


READY_MARK = "_offload_ready"
"""The attribute of a tensor that holds its version and the event behind its producer, once told."""


class OffloadGroup(Group):
    """One layer group of one chunk.

    Args:
        chunk: the chunk whose forward it is of.
        key, name: see `Group`.
        transfers: what moves it.

    Attributes:
        elsewhere_bytes: bytes besides that something else keeps; set at commit.
        small_bytes: bytes besides of tensors that are too small to move.
        shared_bytes: of both, what a group before it has as well and left there; set at commit.
        leaf_hook: the hook at the group's start where that is a leaf of the graph.
    """

    __slots__ = (
        "_blocks",
        "_num_lost",
        "_num_saved",
        "chunk",
        "elsewhere_bytes",
        "leaf_hook",
        "shared_bytes",
        "small_bytes",
        "transfers",
    )

    def __init__(
        self, chunk: ChunkOffloadHandler, key: GroupKey, name: str, transfers: Transfers
    ) -> None:
        super().__init__(key, name, transfers.budget)
        self.chunk = chunk
        self.transfers = transfers
        self.elsewhere_bytes = 0
        self.shared_bytes = 0
        self.small_bytes = 0
        self.leaf_hook: RemovableHandle | None = None
        self._blocks: list[BlockRef] = []
        # Two counts, because one may be added to while the other is.
        self._num_saved = 0
        self._num_lost = 0

    @property
    def is_spent(self) -> bool:
        """Whether no record needs any of its own blocks any more."""
        return self._num_lost == self._num_saved

    def lose_block(self, num_bytes: int) -> None:
        """Take note that no record needs one of its own blocks any more."""
        self._num_lost += 1
        if self.held_bytes:
            if self._num_lost == self._num_saved or num_bytes >= self.held_bytes:
                self.let_go()
            else:
                self.held_bytes -= num_bytes
                self.budget.held_bytes -= num_bytes

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
