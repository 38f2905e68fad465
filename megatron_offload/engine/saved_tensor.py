"""What autograd is handed in place of a saved tensor, and the storage region behind it.

Owns `SavedTensor`, the record that a pack hook returns, and `Block`, a region of one storage that
moves as one. Must not know which chunk is current, nor any order: a record finds its data through
its own block, never by position.

Lifetimes are the memory management. A record holds its block, a group refers to its blocks weakly,
so memory on host and device goes with the last record, whatever became of the backward:

    autograd graph -> SavedTensor -> Block -> host region | reload target
    in-flight window -> aliases of the source, until the compute stream has waited for the copy

Invariants: a block is *released* (its source dropped) only after its copy was issued; a released
block has a host region, a reload target, or a source that something else keeps alive.
Read next: `megatron_offload.engine.transfers`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_offload.backends.base import Event
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.errors import InPlaceModificationError

if TYPE_CHECKING:
    from megatron_offload.core.profile import GroupKey
    from megatron_offload.engine.group import OffloadGroup
    from megatron_offload.engine.release import Source
    from megatron_offload.engine.transfers import Transfers
    from megatron_offload.memory.host_pool import HostRegion

__all__ = ["Block", "Reload", "SavedTensor"]

_ALIGNMENT_BYTES = 512
"""A block starts at a multiple of this within its storage, so that a reloaded tensor has the same
alignment as its source: kernels choose their code path, and so their rounding, by alignment."""


class Reload:
    """One bulk reload: its event, and which streams have waited for it already."""

    __slots__ = ("event", "waited_keys")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.waited_keys: list[Hashable] = []


class Block:
    """A region of one storage: moved once, whoever shares it.

    Attributes:
        group: the group that saved it first and moves it.
        index: its place among the blocks of that group.
        low, high: the region's byte range within the storage; grows until the copy is issued.
        num_bytes: size of the region.
        aliases: one detached alias per record, sharing storage and version counter with the
            tensor that was saved. Emptying them is what releases the source.
        address: where the storage lay when the copy was issued.
        like: shape and dtype of the tensor where one contiguous tensor is all of the region.
        source: its entry in the in-flight window.
        storage_ref: the storage, where something else still held it at the release.
        version: version counter of the source when it was first saved.
        ready: the event behind its producer, where the program has told.
        d2h: the event behind the copy to the host, once issued.
        reload: the bulk reload that brings or brought it back.
        stays: whether it was chosen to stay on the device.
        counted_bytes: what of it some group's commit has counted.
        kept_bytes: what of it is counted as kept on the device.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "aliases",
        "cancelled",
        "counted_bytes",
        "d2h",
        "forced_release",
        "group",
        "high",
        "host",
        "index",
        "kept_bytes",
        "like",
        "low",
        "num_bytes",
        "ready",
        "released",
        "reload",
        "source",
        "stays",
        "storage_key",
        "storage_ref",
        "target",
        "version",
    )

    def __init__(self, group: OffloadGroup, index: int, storage_key: int, version: int) -> None:
        self.index = index
        self.storage_key = storage_key
        self.version = version
        self.address = 0
        self.low = 0
        self.high = 0
        self.num_bytes = 0
        self.counted_bytes = 0
        self.kept_bytes = 0
        self.aliases: list[torch.Tensor] = []
        self.host: HostRegion | None = None
        self.target: torch.Tensor | None = None
        self.ready: Event | None = None
        self.d2h: Event | None = None
        self.reload: Reload | None = None
        self.like: tuple[torch.Size, torch.dtype] | None = None
        self.source: Source | None = None
        self.storage_ref: StorageWeakRef | None = None
        self.cancelled = False
        self.released = False
        self.forced_release = False
        self.stays = False
        self.group = group  # last: without it there is nothing to give back

    @property
    def identity(self) -> tuple[GroupKey, int]:
        """What it is called in every step of the same program."""
        return self.group.key, self.index

    def live_source(self) -> torch.Tensor | None:
        """Return the flat bytes of a released source that is where it was; resizing moves one."""
        if self.storage_ref is None:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage_ref.cdata)
        if storage is None or storage.data_ptr() != self.address:
            return None
        view = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return view.set_(storage, self.low, (self.num_bytes,), (1,))

    def covers(self, low: int, high: int) -> bool:
        """Whether the byte range lies inside the region."""
        return self.low <= low and high <= self.high

    def add(self, alias: torch.Tensor, low: int, high: int, *, is_contiguous: bool) -> None:
        """Make room for one more alias of the storage; only before the copy is issued."""
        misalignment = low % _ALIGNMENT_BYTES
        low -= misalignment
        if self.aliases:
            self.like = None
            self.low = min(self.low, low)
            self.high = max(self.high, high)
        else:
            if is_contiguous and misalignment == 0:
                self.like = alias.shape, alias.dtype
            self.low, self.high = low, high
        self.num_bytes = self.high - self.low
        self.aliases.append(alias)

    @graph_break
    def __del__(self) -> None:
        # Any thread's garbage collection may be here, between any two lines of the engine.
        try:
            guard = self.group.transfers.guard
        except AttributeError:  # an interrupted construction
            return
        if guard.is_mine() or not guard.lock.acquire(False):
            guard.put_off.append(_Remains(self).bury)
            return
        try:
            self.group.lose_block(self.num_bytes)
            if self.host is not None or self.target is not None:
                self.group.transfers.forget(self)
        except BaseException:
            guard.fail()  # Python reports it and goes on
            raise
        finally:
            guard.lock.release()


class _Remains:
    """What is left of a block that died while the engine was busy."""

    __slots__ = ("group", "host", "num_bytes", "released", "reload", "target")

    def __init__(self, block: Block) -> None:
        self.group = block.group
        self.num_bytes = block.num_bytes
        self.host = block.host
        self.released = block.released
        self.reload = block.reload
        self.target = block.target

    def bury(self) -> None:
        """Give back what the block held, and count it no more; with the guard's lock held."""
        self.group.lose_block(self.num_bytes)
        if self.host is not None or self.target is not None:
            self.group.transfers.forget(self)


class SavedTensor:
    """The record that stands for one saved tensor in the autograd graph.

    It knows the tensor's own size, stride, offset and dtype, so that a transposed, expanded or
    overlapping view comes back exactly as it was.

    Args:
        tensor: what autograd saves.
        block: where its bytes lie; None where it stays as it is.
        group_name: for messages.
        offset: the tensor's offset in its storage, in elements; only with a block.
    """

    __slots__ = ("alias", "block", "dtype", "group_name", "offset", "size", "stride", "version")

    def __init__(
        self, tensor: torch.Tensor, block: Block | None, group_name: str, offset: int = 0
    ) -> None:
        # Detached, because holding a node's own output from that node would be a cycle.
        self.alias = tensor.detach()
        self.version = tensor._version
        self.block = block
        self.group_name = group_name
        if block is not None:
            self.size = tensor.shape
            self.stride = tensor.stride()
            self.offset = offset
            self.dtype = tensor.dtype

    def _description(self) -> str:
        if self.block is None:
            shape, dtype, group = self.alias.shape, self.alias.dtype, self.group_name
        else:
            shape, dtype, group = self.size, self.dtype, self.block.group.label
        return f"of shape {list(shape)} and dtype {dtype}, saved in group {group!r},"

    @graph_break
    def unpack(self) -> torch.Tensor:
        """Return the saved tensor; the compute stream waits for its reload where there is one.

        Raises:
            InPlaceModificationError: the tensor was changed in place since it was saved. With
                hooks set autograd skips this check of its own, so it is made here.
        """
        alias = self.alias
        if alias._version != self.version:
            raise InPlaceModificationError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor {self._description()} is at version "
                f"{alias._version}; expected version {self.version} instead"
            )
        block = self.block
        if block is None:
            return alias
        transfers: Transfers = block.group.transfers
        if block.released:
            target = block.target
            if target is None or not transfers.is_ready(block):
                target = transfers.ready_target(block)
            is_whole = target.dtype is self.dtype and target.shape == self.size
            if is_whole and target.stride() == self.stride:
                return target.detach()
            low = target.storage_offset() * target.itemsize
            offset = self.offset + (low - block.low) // self.dtype.itemsize
            view = torch.empty(0, dtype=self.dtype, device=target.device)
            return view.set_(target.untyped_storage(), offset, self.size, self.stride)
        if block.d2h is not None and not block.cancelled:
            transfers.keep(block)
        return alias.detach()  # the alias itself may be emptied, whoever holds what this returns


BlockRef = weakref.ref[Block]
