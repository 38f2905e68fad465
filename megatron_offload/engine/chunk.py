"""One microbatch on one virtual pipeline stage: its groups, and which tensors may move.

Owns the open groups, the blocks found by live storage, and the rules of what is never moved. Must
not know streams, or the order of backwards: chunks are made new for every forward and found again
through the autograd graph alone.

Invariant: a chunk takes a position in the step with its first group, so that passes that save
nothing (evaluation) shift no keys. Read next: `megatron_offload.engine.boundary`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_offload.engine.group import OffloadGroup
from megatron_offload.engine.saved_tensor import Block, BlockRef
from megatron_offload.planning.profile import GroupKey

if TYPE_CHECKING:
    from megatron_offload.engine.manager import PipelineOffloadManager

__all__ = ["ChunkOffloadHandler"]

_OPT_OUT_MARKS = ("_do_not_offload", "_TE_do_not_offload")


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
        self.groups: list[OffloadGroup] = []
        self.open_groups: list[OffloadGroup] = []
        self.committed: list[OffloadGroup] = []
        self.blocks: dict[int, BlockRef] = {}
        self._position: int | None = None

    def start_group(self, name: str) -> OffloadGroup:
        """Open a group; tensors saved under the manager's hooks belong to it from here on."""
        if self._position is None:
            self._position = self.manager.enter_chunk(self)
        key = GroupKey(self._position, len(self.groups))
        group = OffloadGroup(self, key, name, self.manager.transfers)
        self.groups.append(group)
        self.open_groups.append(group)
        self.manager.prefetcher.register(group)
        return group

    def close_group(self, name: str | None) -> OffloadGroup | None:
        """Take the open group of this name that was started last; None where there is none."""
        for index in range(len(self.open_groups) - 1, -1, -1):
            if name is None or self.open_groups[index].name == name:
                return self.open_groups.pop(index)
        return None

    def find_block(self, storage_key: int) -> Block | None:
        """Return the live block of a storage of this chunk."""
        reference = self.blocks.get(storage_key)
        return reference() if reference is not None else None

    def observe(self, tensor: torch.Tensor) -> None:
        """Show a saved tensor to whoever measures, and count parameters out."""
        observer = self.manager.transfers.observer
        if observer is not None and not isinstance(tensor, torch.nn.Parameter):
            observer.observe(tensor)

    def may_move(self, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor is an activation that this chunk can move.

        Never moved: parameters and what shares their storage, tensors that are not on the
        backend's device, subclasses (fake, functional, quantised, distributed), layouts other than
        strided, lazily conjugated or negated tensors, opted-out tensors, and small ones.
        """
        if type(tensor) is not torch.Tensor or not self.manager.backend.owns(tensor):
            return False
        num_elements = tensor.numel()
        if num_elements == 0 or num_elements < self.min_tensor_elements:
            return False
        if num_elements * tensor.itemsize < self.min_tensor_bytes:
            return False
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if isinstance(tensor._base, torch.nn.Parameter) or tensor.is_conj() or tensor.is_neg():
            return False
        marks = tensor.__dict__
        if marks and (
            any(marks.get(mark, False) for mark in _OPT_OUT_MARKS)
            or marks.get("offloading_activation", True) is False
        ):
            return False
        return not self.manager.is_opted_out(tensor.untyped_storage())
