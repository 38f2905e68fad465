"""One microbatch on one virtual pipeline stage: its groups, and which tensors may move.

Owns the open groups, the blocks found by live storage, and the rules of what is never moved. Must
not know streams, or the order of backwards: chunks are made new for every forward and found again
through the autograd graph alone.

Invariant: a chunk takes a position in the step with its first group, so that passes that save
nothing (evaluation) shift no keys. Read next: `megatron_offload.engine.boundary`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.marks import has_mark
from megatron_offload.engine.saved_tensor import Block, BlockRef

if TYPE_CHECKING:
    from megatron_offload.engine.manager import PipelineOffloadManager

__all__ = ["ChunkOffloadHandler"]


class ChunkOffloadHandler:
    """The groups of one forward of one model chunk.

    Args:
        manager: whose streams and pools are used.
        vp_stage: virtual pipeline stage, 0 without virtual stages.
        min_tensor_bytes: smaller tensors stay on the device.
        min_tensor_elements: the same in elements; both must hold.
    """

    def __init__(
        self,
        manager: PipelineOffloadManager,
        *,
        vp_stage: int = 0,
        min_tensor_bytes: int = 0,
        min_tensor_elements: int = 0,
    ) -> None:
        self.manager = manager
        self.vp_stage = vp_stage
        self.min_tensor_bytes = min_tensor_bytes
        self.min_tensor_elements = min_tensor_elements
        self.max_inflight_groups: int | None = None
        """Most groups of one name whose device memory is held for their copies."""
        self.max_inflight_blocks: int | None = None
        """The same for blocks, of all names."""
        self.chooses: Callable[[int], bool] | None = None
        """Is asked for each new block, with its bytes, whether it moves, be it needed soon or not.
        None for all, as far as that is of use."""
        self.groups: list[OffloadGroup] = []
        self.open_groups: list[OffloadGroup] = []
        self.blocks: dict[int, BlockRef] = {}
        self._small_keys: set[int] = set()
        self._position: int | None = None

    def start_group(self, name: str) -> OffloadGroup:
        """Open a group; tensors saved under the manager's hooks belong to it from here on."""
        self.manager.guard.refuse_other_threads()
        if self._position is None:
            self._position = self.manager.enter_chunk(self)
        key = GroupKey(self._position, len(self.groups))
        group = OffloadGroup(self, key, name, self.manager.transfers)
        self.groups.append(group)
        self.open_groups.append(group)
        for observer in self.manager.observers:
            observer.group_starts(group)
        self.manager.decisions.start(group)
        return group

    def close_group(self, name: str | None) -> OffloadGroup | None:
        """Take the open group of this name that was started last; None where there is none."""
        for index in range(len(self.open_groups) - 1, -1, -1):
            if name is None or self.open_groups[index].name == name:
                return self.open_groups.pop(index)
        return None

    def forget_groups(self) -> None:
        """Let go of the groups, whose step is over, so that no cycle keeps a manager alive."""
        for groups in (self.groups, self.open_groups):
            groups.clear()

    def find_block(self, storage_key: int) -> Block | None:
        """Return the live block of a storage of this chunk."""
        reference = self.blocks.get(storage_key)
        return reference() if reference is not None else None

    def may_move(self, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor is an activation that this chunk can move."""
        return self.activation_storage(tensor) is not None and not self.is_small(tensor)

    def activation_storage(self, tensor: torch.Tensor) -> int | None:
        """Return the identity of an activation's storage; None where the tensor can't move.

        Never moved: parameters and what shares their storage, tensors that are not on the
        backend's device, subclasses (fake, functional, quantised, distributed), layouts other than
        strided, lazily conjugated or negated tensors, zeros without memory (forward-mode AD),
        opted-out tensors, and empty ones.
        """
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        if tensor.nbytes == 0:
            return None
        manager = self.manager
        if not manager.backend.owns(tensor) or tensor.is_quantized:
            return None
        if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
            return None
        base = tensor._base
        if base is not None and (isinstance(base, torch.nn.Parameter) or has_mark(base)):
            return None
        if has_mark(tensor):
            return None
        storage_key: int = tensor.untyped_storage()._cdata
        return None if manager.marks.holds(storage_key) else storage_key

    def is_small(self, tensor: torch.Tensor) -> bool:
        """Whether an activation is too small to move."""
        if tensor.nbytes < self.min_tensor_bytes:
            return True
        return self.min_tensor_elements > 0 and tensor.numel() < self.min_tensor_elements

    def small_bytes(self, storage_key: int, tensor: torch.Tensor) -> int:
        """Return the bytes of a small activation; 0 where its storage was asked for, or moves."""
        if storage_key in self._small_keys or self.find_block(storage_key) is not None:
            return 0
        self._small_keys.add(storage_key)
        return tensor.nbytes
