"""The record that autograd is handed in place of a saved tensor.

It finds its data through its own block, never by position, and knows nothing of chunks or order.
"""

from __future__ import annotations

import torch

from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.group import Block
from megatron_offload.errors import InPlaceModificationError


class SavedTensor:
    """The record that stands for one saved tensor in the autograd graph.

    It knows the tensor's own size, stride, offset and dtype, so that a transposed, expanded or
    overlapping view comes back exactly as it was.

    Args:
        tensor: what autograd saves.
        group_name: for messages.

    Attributes:
        alias: the tensor: a leaf itself, as autograd keeps it, else detached, because holding a
            node's own output from that node would be a cycle.
        block: where its bytes are; None while it stays as it is.
    """

    __slots__ = (
        *("__weakref__", "alias", "block", "dtype", "group_name", "is_detached"),
        *("offset", "size", "stride", "version"),
    )

    def __init__(self, tensor: torch.Tensor, group_name: str) -> None:
        self.version: int = tensor._version
        self.block: Block | None = None
        self.group_name = group_name
        self.is_detached = is_detached = not tensor.is_leaf
        self.alias = tensor.detach() if is_detached else tensor

    def note_form(self) -> torch.Tensor:
        """Note what to come back as; return an alias that may be emptied meanwhile."""
        alias = self.alias
        if not self.is_detached:
            self.alias = alias = alias.detach()
            self.is_detached = True
        self.size = alias.shape
        self.stride = alias.stride()
        self.offset = int(alias.storage_offset())
        self.dtype = alias.dtype
        return alias

    def _description(self) -> str:
        if self.block is None:
            shape, dtype = self.alias.shape, self.alias.dtype
        else:
            shape, dtype = self.size, self.dtype
        return f"of shape {list(shape)} and dtype {dtype}, saved in group {self.group_name!r},"

    @graph_break
    def unpack(self) -> torch.Tensor:
        """Return the saved tensor; the compute stream waits for its reload where there is one.

        Raises:
            InPlaceModificationError: the tensor was changed in place since it was saved. With
                hooks set autograd skips this check of its own, so it is made here.
        """
        alias = self.alias
        if alias._version != self.version:
            self.check_version()
        block = self.block
        if block is None:  # it may get one yet
            return alias.detach() if self.is_detached else alias
        if block.released:
            target = block.store.target_of(block)
            if block.size is self.size and block.reload is not None:
                return target.detach()  # it is all of the block
            is_whole = target.dtype is self.dtype and target.shape == self.size
            if is_whole and target.stride() == self.stride:
                return target.detach()
            return self.view_in(target, block.low)
        if block.flight is not None and not block.cancelled:
            block.store.keep_source(block)
        return alias.detach()  # the alias itself may be emptied, whoever holds what this returns

    def check_version(self) -> None:
        """Raise `InPlaceModificationError` where the tensor was changed since it was saved."""
        version = self.alias._version
        if version != self.version:
            raise InPlaceModificationError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor {self._description()} is at version {version}; "
                f"expected version {self.version} instead"
            )

    def view_in(self, memory: torch.Tensor, low: int) -> torch.Tensor:
        """Return the tensor in memory that begins with byte ``low`` of what was its storage."""
        shift = memory.storage_offset() * memory.itemsize - low
        offset = self.offset + shift // self.dtype.itemsize
        view = torch.empty(0, dtype=self.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), offset, self.size, self.stride)
