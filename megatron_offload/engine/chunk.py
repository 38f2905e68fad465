"""One microbatch on one virtual pipeline stage: its groups, and the pack hook.

Chunks are made new for every forward and found again through the autograd graph alone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch._C import _len_torch_dispatch_stack

from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.block_state import SAVED
from megatron_offload.engine.group import Block, OffloadGroup, Recipe, Rules
from megatron_offload.engine.hooks import apart, graph_break, must_be_apart
from megatron_offload.engine.marks import Marks, has_own_bytes, is_opted_out, is_parameter
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.engine.transfers import Transfers
from megatron_offload.memory.layout import LAYOUTS, TensorLayout, layout_of
from megatron_offload.memory.nested import inner_tensors, is_wrapper

_TOO_SMALL = "smaller than what is offloaded (min_tensor_bytes, min_tensor_elements)"
_IN_PARTS = (
    "made of other tensors, which groups leave whole; OffloadActivations offloads parts it can"
)
_OF_OTHER_CLASS = "of a class of tensors that doesn't say what it is made of"

_key_of = lru_cache(1 << 16)(GroupKey)  # one object in all steps is quicker to make and to look up

READY_MARK = "_offload_ready"
"""The attribute of a tensor that holds its version and the event behind its producer, once
given."""


@dataclass(eq=False, repr=False)
class ChunkOffloadHandler:
    """The groups of one forward of one model chunk."""

    transfers: Transfers
    marks: Marks
    """What is kept by request."""
    rules: Rules
    vp_stage: int
    """Virtual pipeline stage, 0 without virtual stages."""
    position: int | None = field(default=None, init=False)
    """Among the chunks of the step; None until it has a group, so that passes that save nothing
    (evaluation) shift no keys."""
    begun_behind: int | None = field(default=None, init=False)
    """Where the manager has begun it by itself, how many groups backward had reached before."""
    groups: list[OffloadGroup] = field(default_factory=list, init=False)
    open_groups: list[OffloadGroup] = field(default_factory=list, init=False)
    blocks: dict[int, weakref.ref[Block]] = field(default_factory=dict, init=False)
    """By the identity of the storage that they were saved in; some of them gone."""
    recipes: dict[int, Recipe] = field(default_factory=dict, init=False)
    """How what was made and not saved yet is recomputed, by the storage that it was made in; none
    once the forward is over."""
    saved_bytes: int = field(default=0, init=False)
    """What its groups have saved, and what went by in between, by the step's clock."""
    _counted_keys: set[int] = field(default_factory=set, init=False)

    def open_group(self, name: str) -> OffloadGroup:
        """Open a group; a chunk outside any step calls its position -1."""
        key = _key_of(-1 if self.position is None else self.position, len(self.groups))
        group = OffloadGroup(key, name, self.transfers.budget, self.rules)
        self.groups.append(group)
        self.open_groups.append(group)
        return group

    def close_group(self, name: str | None) -> OffloadGroup | None:
        """Take the open group of this name that was started last; None where there is none."""
        for index in range(len(self.open_groups) - 1, -1, -1):
            if name is None or self.open_groups[index].name == name:
                return self.open_groups.pop(index)
        return None

    def may_move(self, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor is an activation that this chunk can offload."""
        is_plain = type(tensor) is torch.Tensor and not is_opted_out(tensor)
        if not (is_plain and self.transfers.backend.owns(tensor) and has_own_bytes(tensor)):
            return False
        is_kept = self.marks.keeps(tensor.untyped_storage()._cdata)
        return not (is_kept or self.is_small(layout_of(tensor)))

    @graph_break
    def pack(self, group: OffloadGroup, tensor: torch.Tensor) -> SavedTensor:
        """Record a tensor that autograd saves in a group; the pack hook.

        Returns:
            The record that autograd keeps; `SavedTensor.unpack` gives the tensor back.
        """
        if must_be_apart():
            return apart(self.pack, group, tensor)
        record, pick = SavedTensor(tensor, group.name), group.pick
        is_plain = type(tensor) is torch.Tensor
        if not is_plain and is_parameter(tensor):
            return record
        for observer in self.transfers.observers:
            observer.tensor_saved(tensor)
        if (pick is not None and not pick.takes()) or _len_torch_dispatch_stack():
            return record  # else it were apart, but where it is traced
        if not is_plain:
            self.count_kept(group.name, tensor)
            return record
        marks, base = tensor.__dict__, tensor._base
        if (marks or base is not None) and is_opted_out(tensor):
            return record
        record.base = id(base)
        self._find_block_of(group, record)
        if pick is not None:
            pick.note(record)
        if marks:
            version, ready = marks.pop(READY_MARK, (None, None))  # a later write gives another
            block = record.block if version == record.version else None
            if block is not None and block.aliases[0] is record.alias:
                block.ready = ready
        return record

    @graph_break
    def pack_output(
        self, outputs: list[tuple[Recipe, SavedTensor]], tensor: torch.Tensor
    ) -> SavedTensor:
        """Record a tensor that autograd saves in no group; a pack hook.

        Those that can be recomputed are added to ``outputs``.
        """
        if must_be_apart():
            return apart(self.pack_output, outputs, tensor)
        record = SavedTensor(tensor, "kept")
        if is_parameter(tensor):
            return record
        for observer in self.transfers.observers:
            observer.tensor_saved(tensor)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if is_plain and not _len_torch_dispatch_stack():
            key = tensor.untyped_storage()._cdata
            block = self.find_block(key)  # where a group has saved it as well
            recipe = self.recipes.get(key) if block is None else block.recipe
            if recipe is not None and self.may_move(tensor):
                record.layout = layout_of(tensor)
                outputs.append((recipe, record))
        return record

    def count_kept(self, name: str, tensor: torch.Tensor, reason: str = "") -> None:
        """Count a tensor that is kept, for its own class if for nothing else, unless requested."""
        if is_opted_out(tensor):
            return
        reason = reason or (_IN_PARTS if is_wrapper(tensor) else _OF_OTHER_CLASS)
        for inner in inner_tensors([tensor]):
            if self.transfers.backend.owns(inner):
                self._count_once(name, inner, inner.nbytes, reason)

    def _count_once(self, name: str, tensor: torch.Tensor, num_bytes: int, reason: str) -> bool:
        """Count a tensor that is kept, unless that was requested or its storage is counted."""
        key = tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else -id(tensor)
        is_counted = key in self._counted_keys or self.find_block(key) is not None
        if is_counted or self.marks.keeps(key):
            return False
        self._counted_keys.add(key)
        self.transfers.stats.by_name[name].keep(num_bytes, reason)
        if self.open_groups:
            self.open_groups[-1].recorded_bytes += num_bytes
        return True

    def _count_unserved(self, name: str, tensor: torch.Tensor) -> None:
        """Count a tensor that the backend can't copy, and warn of its kind once."""
        kind, values, served = "without bytes of their own", tensor, self.transfers.device
        if "sparse" in str(tensor.layout):
            values = tensor._values() if tensor.is_sparse else tensor.values()
        if tensor.device != served:
            kind = f"on {tensor.device}, where this context serves {served},"
        elif tensor.layout is not torch.strided:
            kind = f"of the layout {tensor.layout}"
        elif tensor.is_nested:
            kind = "that are nested without torch.jagged"
        num_bytes = values.nbytes
        if torch._C._has_storage(values):  # of what is expanded that has fewer
            num_bytes = min(num_bytes, values.untyped_storage().nbytes())
        if num_bytes >= max(self.rules.min_tensor_bytes, 1) and self._count_once(
            name, values, num_bytes, f"tensors {kind} are kept"
        ):
            self.transfers.warn_once(f"saved tensors {kind} are kept. This is said once")

    def _find_block_of(self, group: OffloadGroup, record: SavedTensor) -> None:
        """Give a record its block, of which it may be the first; what is kept has none."""
        transfers, alias = self.transfers, record.alias
        if not transfers.backend.owns(alias) or alias.is_neg() or alias._is_zerotensor():
            self._count_unserved(record.group_name, alias)
            return
        storage_key = alias.untyped_storage()._cdata
        if self.marks.keeps(storage_key):
            return
        layout = LAYOUTS[alias.shape, alias.stride(), alias.storage_offset(), alias.dtype]
        if layout.is_special and not has_own_bytes(alias):
            self._count_unserved(record.group_name, alias)
            return
        num_bytes = layout.num_bytes
        if self.is_small(layout):
            self._count_once(record.group_name, alias, num_bytes, _TOO_SMALL)
            return
        record.layout = layout
        if not record.is_detached:
            alias = record.detach()
        references = group.references
        block = self.find_block(storage_key) if storage_key in self.blocks else None
        if block is not None and (block.state is SAVED or block.has(record)):
            record.block = block
            if block.state is SAVED:
                block.add(record)
                block.ready = None  # given for one of them only, maybe
            elif block.released:
                transfers.empty(alias)
            else:
                block.aliases.append(alias)
            if block.group is not group and not any(one() is block for one in references):
                references.append(weakref.ref(block))  # the first user reloads it
            return
        stream = transfers.backend.compute_stream()
        record.block = block = Block(transfers, group, record, stream, storage_key)
        self.blocks[storage_key] = reference = weakref.ref(block)
        references.append(reference)
        if self.recipes:
            block.recipe = self.recipes.pop(storage_key, None)

    def is_small(self, layout: TensorLayout) -> bool:
        """Whether a tensor is too small to be offloaded."""
        rules, num_elements = self.rules, layout.num_elements
        return layout.num_bytes < rules.min_tensor_bytes or num_elements < rules.min_tensor_elements

    # [Note: a block is found by its live storage] Its identity is taken again once the storage has
    # gone, as its address is. So a block that has let its storage go has the key 0, and else its
    # alias or a weak handle keeps the identity from another.
    def find_block(self, storage_key: int) -> Block | None:
        """Return the live block of a storage of this chunk that has not gone since."""
        reference = self.blocks.get(storage_key)
        block = reference() if reference is not None else None
        return block if block is not None and block.storage_key == storage_key else None
