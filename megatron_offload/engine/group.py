"""A layer group, and the blocks of memory that it saves.

Lifetimes are the memory management, as ``docs/design.md`` draws them. A record holds its block and
a group refers to its blocks weakly, so memory goes with the last record, whatever became of the
backward; that on the host with the next call of the engine. Where a block's bytes are, its state
says (`megatron_offload.engine.block_state`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatron_offload.backends.base import Event, Stream
from megatron_offload.core.budget import DeviceBudget
from megatron_offload.core.group import Group
from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.block_state import HAVE_SOURCE, KEPT, LOST, MOVES, SAVED
from megatron_offload.engine.stats import Sums
from megatron_offload.memory.host_pool import HostRegion
from megatron_offload.memory.layout import ALIGNMENT_BYTES, TensorLayout, bytes_of
from megatron_offload.memory.storage_ref import StorageRef, count_together

SOURCES: MutableMapping[torch.Tensor, weakref.ref[torch.Tensor]] = WeakIdKeyDictionary()
"""By detached tensor, from what it was detached, where that is not read again: its node alone is
needed. Not an attribute of it, with which it couldn't be pickled."""

Record: TypeAlias = Any
"""A `SavedTensor`, whose file imports this one."""

NO_BASE = id(None)
"""`Record.base` of what is no view."""


class Store(Protocol):
    """What has the bytes of blocks, and frees them."""

    def target_of(self, block: Block) -> torch.Tensor:
        """Return what a released block is reloaded to; the program is ordered behind that."""

    def keep_source(self, block: Block) -> None:
        """Keep a block's source on the device for a reader, on whatever stream."""


@dataclass(slots=True)
class Rules:
    """What of one chunk's groups is offloaded, and how much of it may be in flight."""

    min_tensor_bytes: int = 0
    """Smaller tensors are kept on the device."""
    min_tensor_elements: int = 0
    """The same in elements; both must hold."""
    max_inflight_groups: int | None = None
    """Most groups of one name whose device memory is held for their copies."""
    max_inflight_blocks: int | None = None
    """The same for blocks, of all names."""
    should_offload: Callable[[int], bool] | None = None
    """Is asked for each new block, with its bytes, whether it is offloaded, be it needed soon or
    not. None for all, as far as that is of use."""
    configured: tuple[str, ...] = ()
    """The units and patterns that the configuration names."""
    recomputes: bool = True
    """Whether tensors that have a recipe are recomputed; else they are offloaded."""


@dataclass(slots=True, eq=False)
class Reload:
    """One bulk reload."""

    event: Event
    stream: Stream
    """On which its targets were allocated, and are read if backward keeps to forward's streams."""
    targets: Sequence[torch.Tensor]
    """What it writes to, until that stream has waited for it; then none."""


class Lease(weakref.ref["Block"]):
    """What a block has to free, and the sign that the block is dead.

    As a weak reference it has a callback. That is code in C, since Python lets an interrupt pass
    that comes while a finalizer of its own runs.

    Attributes:
        free: is called with it once the block has gone; by default, of one whose making was
            interrupted, that does nothing.
        group: the one that offloads the block.
        region: the host memory that it has a part of.
        reload: the bulk reload by which it has been reloaded.
        target: what it was reloaded to, where the backend observes that.
    """

    __hash__ = object.__hash__  # a weak reference's own needs what it refers to
    free: Callable[[Lease], object] = bool
    group: OffloadGroup
    region: HostRegion | None = None
    reload: Reload = None  # type: ignore[assignment]  # until it is issued
    target: torch.Tensor | None = None


class Block:
    """A region of one storage: copied once for all who share it.

    Attributes:
        state: where its bytes are.
        store: the `Transfers` that have its bytes.
        group: the group that saved it first.
        stream: what the program computed on when it did.
        index: its place among the blocks of that group.
        storage_key: the storage's identity; 0 once the storage has gone.
        low, high: the region's byte range within the storage, ``num_bytes``; grows until the copy
            is issued.
        spec: what it takes of host memory, shown as the tensor where one contiguous tensor is all
            of the region.
        layout, base: of the record with most of its bytes, as ``version``: the first, or a
            contiguous one around that.
        aliases: one detached alias per record, the first's first, sharing storage and version
            counter with the tensor that was saved. Emptying them is what drops the source.
        version: version counter of the source when that was saved.
        ready: the event behind its producer, where the program has given one.
        is_kept: whether it was chosen to be kept on the device; None until that is asked.
        name: under which its bytes are counted: of the group that offloads it, or would.
        kept_bytes: what of it is counted as kept on the device.
        address: where the storage lay when it was copied or dropped.
        lease: what it has to free, from its copy to the host on.
        host: its bytes in host memory.
        forced_by: tensors that may hold its storage at the release, which is emptied all the same
            if no other does.
        storage_ref: the storage, where something else still held it when it was dropped.
        was_reached: whether backward has come to a group that has it.
        target: what it is reloaded to, or where something else keeps it; ``target_version`` when
            it was read first.
        handed: by layout, what stands for leaves that were saved in it. While the block has it too,
            autograd takes none of them for a gradient that is its own.
        recipe: how it is recomputed, once it was dropped without a copy; till its group's commit,
            how it could be.
    """

    # Defaults of the class: most blocks are made, saved in and dropped without setting most.
    state = SAVED
    address = kept_bytes = 0
    ready: Event | None = None
    host: torch.Tensor | None = None
    lease: Lease = None  # type: ignore[assignment]  # until its copy
    target: torch.Tensor = None  # type: ignore[assignment]  # until it is reloaded
    target_version: int | None = None
    handed: dict[TensorLayout, torch.Tensor] | None = None
    storage_ref: StorageRef | None = None
    recipe: Recipe | None = None
    is_kept: bool | None = None
    was_reached = False
    forced_by: tuple[weakref.ref[torch.Tensor], ...] = ()

    def __init__(
        self, store: Store, group: OffloadGroup, record: Record, stream: Stream, storage_key: int
    ) -> None:
        alias, layout = record.alias, record.layout
        low, high, spec = layout.low, layout.high, layout.spec
        if spec is None:
            low -= low % ALIGNMENT_BYTES
            if not layout.is_contiguous:
                storage_bytes = alias.untyped_storage().nbytes()  # fewer, where it was emptied
                if high <= storage_bytes <= 2 * (high - layout.low):
                    low, high = 0, storage_bytes  # its like may be in between: q, k, v
            spec = high - low, None
        self.low, self.high, self.num_bytes, self.spec = low, high, spec[0], spec
        self.layout, self.version, self.base = layout, record.version, record.base
        self.aliases = [alias]
        self.store, self.group, self.name = store, group, record.group_name
        self.index = len(group.references)
        self.stream, self.storage_key = stream, storage_key

    @property
    def released(self) -> bool:
        """Whether its source was dropped."""
        return self.state not in HAVE_SOURCE

    def abandon(self) -> None:
        """Let go of all but what is on the device without the engine: its step was aborted."""
        self.host = self.recipe = None
        if self.lease is not None:
            self.lease.region = None
        for to in (KEPT, LOST):
            self.state = MOVES.get((self.state, to), self.state)
        if self.state is LOST:
            self.target = None  # type: ignore[assignment]

    def take_region(self) -> HostRegion:
        """Return the host memory, which the block has no longer."""
        region, self.host, self.lease.region = self.lease.region, None, None
        assert region is not None
        return region

    @property
    def identity(self) -> tuple[GroupKey, int]:
        """What it is called in every step of the same program."""
        return self.group.key, self.index

    def source(self) -> torch.Tensor:
        """Return its bytes, as long as it has its source."""
        if self.spec[1] is not None:
            return self.aliases[0]
        return bytes_of(self.aliases[0].untyped_storage(), self.low, self.high)

    def live_source(self) -> torch.Tensor | None:
        """Return the flat bytes of a released source that is where it was; resizing moves one."""
        if self.storage_ref is None:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage_ref.cdata)
        if storage is None or storage.data_ptr() != self.address:
            return None
        return bytes_of(storage, self.low, self.high)

    def covers(self, low: int, high: int) -> bool:
        """Whether the byte range lies inside the region."""
        return self.low <= low and high <= self.high

    def has(self, record: Record) -> bool:
        """Whether what was copied are the bytes of a record that was saved after that."""
        # [Note: bytes that were written since the copy] Between the rows of a view, and between two
        # views, lie bytes that may have been written since. Equal versions say that they were not
        # if all are counted together. So a record shares the copy where its bytes were saved
        # before, or it is a view of the same tensor at the same version.
        layout, known = record.layout, self.layout
        if self.version != record.version or not self.covers(layout.low, layout.high):
            return False
        if not all(count_together(alias, record.alias) for alias in self.aliases):
            return False
        is_saved = known.is_contiguous and known.low <= layout.low and layout.high <= known.high
        return is_saved or layout is known or (record.base == self.base != NO_BASE)

    def add(self, record: Record) -> None:
        """Make room for one more record of the storage; only before the copy is issued."""
        layout, known = record.layout, self.layout
        self.low = min(self.low, layout.low - layout.low % ALIGNMENT_BYTES)
        self.high = max(self.high, layout.high)
        self.num_bytes = self.high - self.low
        self.spec = self.num_bytes, None
        self.aliases.append(record.alias)
        if layout.is_contiguous and layout.low <= known.low and known.high <= layout.high:
            self.layout, self.version, self.base = layout, record.version, record.base
        elif record.base != self.base:
            self.base = NO_BASE


BlockRef = weakref.ref[Block]


class Recipe(Protocol):
    """How the bytes of a block are recomputed."""

    unit: str
    depth: int
    version: int
    is_counted: bool
    """Whether what it makes counts as recomputed, or as refused, already."""

    def bind(self, aliases: Sequence[torch.Tensor], stream: Stream, *, drops: bool) -> str:
        """Keep what they are made from; return why they can't be dropped, or nothing.

        Args:
            aliases: of what was saved.
            stream: on which that was.
            drops: whether it will be dropped, where nothing is returned.
        """

    def drop(self, record: Any, *, drops: bool) -> None:
        """Drop what a `SavedTensor` of no group has, if it is to be and can be; count it."""

    def needs(self) -> set[GroupKey]:
        """Return the groups whose bytes have to be on the device before `target_of`."""

    def target_of(self, block: Block) -> torch.Tensor:
        """Return a dropped block's bytes, recomputed unless something else has kept them."""


class Pick(Protocol):
    """Which of the tensors that one group saves are offloaded."""

    def takes(self) -> bool:
        """Whether the next may be, or has no record; parameters aren't asked for."""

    def note(self, record: Record) -> None:
        """Note the record of one that may be."""

    def choose(self, group: OffloadGroup) -> None:
        """Keep some of a group's blocks, now that all are known: its forward is over."""


class OffloadGroup(Group):
    """One layer group of one chunk, whose ``rules`` it has.

    Attributes:
        moving: between the look at its bytes and the decision, the blocks that can be offloaded,
            alive.
        copies: what it has in flight to the host: of each block its lease, its stream, on which
            what reuses its memory is queued, and an alias, which keeps its memory even where the
            graph is dropped before the copy ends.
        d2h: the event behind them.
        dropped_bytes: what of it is off the device to be recomputed, until backward comes to it,
            by name.
        unhook: takes the hook off the leaf that it started with, if it did; leaves outlive graphs.
        forced: tensors that something else keeps alive and that are not read again.
        pick: which of its tensors are offloaded; None: all that can be.
        recorded_bytes: what it saves first: without offload that is on the device.
    """

    moving: Sequence[Block] = ()
    copies: Sequence[tuple[Lease, Stream, torch.Tensor]] = ()
    d2h: Event = None
    unhook: Callable[[], object] | None = None
    forced: tuple[weakref.ref[torch.Tensor], ...] = ()
    pick: Pick | None = None
    recorded_bytes = 0

    def __init__(self, key: GroupKey, name: str, budget: DeviceBudget, rules: Rules) -> None:
        super().__init__(key, name, budget)
        self.rules = rules
        self.dropped_bytes = Sums()
        self.references: list[BlockRef] = []
        """Its own blocks, and those that it shares with a group before it."""

    def force(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the storage of these be emptied at the release, if it is copied."""
        for tensor in tensors:
            source = SOURCES.get(tensor)
            self.forced += (weakref.ref(tensor), *(() if source is None else (source,)))

    @property
    def is_spent(self) -> bool:
        """Whether no record needs any of its own blocks any more."""
        for found in self.references:
            if (block := found()) is not None and block.group is self:
                return False
        return True

    def blocks(self) -> list[Block]:
        """Return the blocks that some record still needs."""
        return [block for found in self.references if (block := found()) is not None]
