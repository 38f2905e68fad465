"""What each group of one step saves, and what keeps the part that moving would not free.

A block that several groups share counts in the group that is committed first, which is the one that
would move it; so the numbers are the same whether anything moves or not. What is kept by something
else is seen as `megatron_offload.engine.owners` sees it, when backward has come.
"""

from __future__ import annotations

import gc
from collections import Counter

import torch

from megatron_offload.core.profile import GroupKey, GroupProfile
from megatron_offload.engine.group import Block, OffloadGroup
from megatron_offload.engine.owners import is_held_elsewhere

_Identity = tuple[GroupKey, int]


class SavedBytes:
    """Counts one step; whoever runs it calls the methods named like its events.

    Args:
        is_pipeline: whether the step is one pipeline rank's of several. What a forward there starts
            with, and needs a gradient, is another stage's output: the schedule keeps it.
    """

    def __init__(self, *, is_pipeline: bool) -> None:
        self._is_pipeline = is_pipeline
        self._module_storages = _module_storages()
        self.begin_step()

    def begin_step(self) -> None:
        """Count from zero."""
        self._saved: dict[GroupKey, dict[_Identity, int]] = {}
        self._counted: dict[_Identity, int] = {}
        self._leaf_storages: set[int] = set()
        self._inputs: set[_Identity] = set()
        self._keepers: dict[_Identity, str] = {}

    def observe(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that is saved: of graph inputs that need a gradient."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if is_plain and tensor.is_leaf and tensor.requires_grad:
            self._leaf_storages.add(tensor.untyped_storage()._cdata)

    def commit(self, group: OffloadGroup) -> None:
        """Count what a group has that no group before it counts; before anything of it moves."""
        saved = self._saved[group.key] = {}
        for block in group.blocks():
            if block.flight is not None or block.stays:
                continue
            identity = block.identity
            # What stays where it is may have grown since another group counted it.
            num_bytes = block.num_bytes - self._counted.get(identity, 0)
            if num_bytes > 0:
                saved[identity] = num_bytes
                self._counted[identity] = block.num_bytes
            if block.storage_key in self._leaf_storages:
                self._inputs.add(identity)

    def enter_backward(self, group: OffloadGroup) -> None:
        """See what something else has kept until now; once the engine has dealt with the group."""
        for block in group.blocks():
            is_held = is_held_elsewhere(block)
            if is_held:
                self._keepers[block.identity] = self._keeper_of(block)
            elif is_held is not None:
                self._keepers.pop(block.identity, None)

    def fill(self, group: GroupProfile) -> GroupProfile:
        """Return the group with its bytes that can move, those kept, and what keeps most of them.

        One of ``parameter/buffer`` of some module, ``pipeline schedule`` and ``the program``, which
        is all the rest, with the part of its graph that is in no group; empty where nothing does.
        """
        saved = self._saved.get(group.key, {})
        kept: Counter[str] = Counter()
        for identity, num_bytes in saved.items():
            if identity in self._keepers:
                kept[self._keepers[identity]] += num_bytes
        keeper = kept.most_common(1)[0][0] if kept else ""
        return group._replace(
            num_bytes=sum(saved.values()) - kept.total(),
            elsewhere_bytes=kept.total(),
            keeper=keeper,
            shared_bytes=0,
        )

    def _keeper_of(self, block: Block) -> str:
        if block.storage_key in self._module_storages:
            return "parameter/buffer"
        if self._is_pipeline and block.identity in self._inputs:
            return "pipeline schedule"
        return "the program"


def _module_storages() -> set[int]:
    """Return the identities of the storages of all modules that there are."""
    tensors = (
        tensor
        for found in gc.get_objects()
        # type() and not isinstance(): proxies may run code when they are asked for their class.
        if issubclass(type(found), torch.nn.Module)
        for part in ("_parameters", "_buffers")
        for tensor in (vars(found).get(part) or {}).values()
    )
    return {
        tensor.untyped_storage()._cdata
        for tensor in tensors
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    }
