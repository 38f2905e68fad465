"""How sources are dropped: behind their copies to the host, or without one to be recomputed.

And which are kept, by choice, or because something else keeps them: these aren't copied any more
from the next step on.

What is released when, `megatron_offload.core.window` decides.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from weakref import ref

import torch

from megatron_offload.backends.base import Stream, Wait
from megatron_offload.core.group import DONE, ON_HOST, RESIDENT
from megatron_offload.core.profile import GroupKey
from megatron_offload.core.window import InFlightWindow
from megatron_offload.engine.block_state import (
    DROPPED,
    EXTERNAL,
    IN_FLIGHT,
    KEPT,
    LOST,
    MOVES,
    RELEASED,
    RELOADED,
    SAVED,
)
from megatron_offload.engine.copies import Copies
from megatron_offload.engine.group import Block, OffloadGroup
from megatron_offload.engine.guard import guarded
from megatron_offload.engine.stats import Sums
from megatron_offload.errors import StateError
from megatron_offload.memory.host_pool import HostRegion
from megatron_offload.memory.layout import bytes_of
from megatron_offload.memory.storage_ref import StorageRef, has_no_other, num_owners, use_count_of

_logger = logging.getLogger(__name__)

KEPT_ALIVE = "something else keeps it alive"
"""Why what could be recomputed isn't: no memory would be freed."""


class Transfers(Copies):
    """Drops sources of one manager's blocks, or keeps them, and knows what something else keeps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Weakly, since memory goes with its manager and no cycle may keep that.
        found = ref(self)
        self.window = InFlightWindow(lambda group: found().release(group), self.budget)  # type: ignore[union-attr]
        self.kept_by_others: set[tuple[GroupKey, int]] = set()
        """The identities of blocks that something else keeps on the device until their backward."""
        self.by_rows = False
        """Whether what no row names is saved without a record."""
        self._said: set[str] = set()
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._empty = self.backend.empty_device_like(nothing)
        self.device = self._empty.device

    def warn_once(self, message: str, *values: object) -> None:
        """Warn, unless this was said, with whatever values."""
        if message not in self._said:
            self._said.add(message)
            _logger.warning(message, *values)

    # At a commit

    def measure(self, group: OffloadGroup) -> None:
        """Drop what is recomputed, and see what offloading the rest of a group would copy.

        Counts what is kept by choice, or is kept anyway.
        """
        moving: list[Block] = []
        others, chooses = self.kept_by_others, group.rules.should_offload
        num_bytes = 0
        for block in group.blocks():
            if block.group is group:
                group.recorded_bytes += block.num_bytes
            if block.recipe is not None and self._drops(group, block):
                continue
            if block.state is not SAVED:
                continue
            is_others = bool(others) and block.identity in others
            if chooses is not None and block.is_kept is None and not is_others:
                block.is_kept = not chooses(block.num_bytes)
            if block.is_kept:
                if group.pick is None:  # else the next call doesn't even see it
                    group.kept_bytes += block.num_bytes
                self.count_kept(block, "beyond the share that is offloaded")
            elif is_others:
                self.stats.externally_referenced_bytes += block.num_bytes - block.kept_bytes
                block.kept_bytes = block.num_bytes
            else:
                num_bytes += block.num_bytes
                block.name = group.name
                block.forced_by = ()  # a group before that has asked for it is kept
                moving.append(block)
        group.moving, group.num_bytes = moving, num_bytes

    def _drops(self, group: OffloadGroup, block: Block) -> bool:
        """Drop a block that has a recipe, if it is to be and can be; say whether."""
        num_bytes, stats, recipe = block.num_bytes, self.stats, block.recipe
        assert recipe is not None
        if block.state is SAVED:  # else it is dropped with a group before this, which shares it
            refusal = KEPT_ALIVE
            if block.identity not in self.kept_by_others:
                refusal = recipe.bind(block.aliases, block.stream, drops=group.rules.recomputes)
            if refusal and not recipe.is_counted:
                recipe.is_counted = True
                stats.refused_recipe_bytes[refusal] += num_bytes
            if refusal or not group.rules.recomputes:
                block.recipe = None
                return False
            for observer in self.observers:
                observer.block_offloads(block, block.source())
            source = block.aliases[0]
            block.address = source.untyped_storage().data_ptr()
            block.forced_by = ()
            block.state = MOVES[block.state, DROPPED]
            block.num_bytes = 0
            self.backend.read_on(block.stream, source)
            self._drop_source(block.aliases, block.stream, group, block)
            if not recipe.is_counted:  # by one who saves it in no group
                recipe.is_counted = True
                stats.recomputed_bytes_by_unit[recipe.unit] += num_bytes
                stats.by_name[block.name].recomputed_bytes += num_bytes
                group.dropped_bytes[block.name] += num_bytes
                self.host_pool.alone.add(block.name, num_bytes)
        group.needs = tuple(sorted({*group.needs, *recipe.needs()} - {group.key}))
        return True

    def keep(self, group: OffloadGroup, reason: str) -> None:
        """Leave a group whose forward is over on the device."""
        moving, group.moving = group.moving, ()
        for block in moving:
            self.count_kept(block, reason)
        group.advance(RESIDENT)

    def count_recomputed(self, group: OffloadGroup) -> None:
        """Count what was dropped of a group as off the device no more."""
        for name, num_bytes in group.dropped_bytes.items():
            self.host_pool.alone.add(name, -num_bytes)
        group.dropped_bytes.clear()

    # Sources that are dropped

    def empty(self, alias: torch.Tensor) -> None:
        """Take the storage out of an alias; its version counter remains, for the in-place check."""
        alias.data = self._empty

    # [Note: release without record_stream] With that call the allocator gives memory back when it
    # polls a finished event: the host runs ahead, new memory is reserved meanwhile, and the peak
    # hardly falls. Here a source is held until a known later point of the program, where the
    # compute stream waits for its copy (W2) and the last reference is dropped: the memory is handed
    # on at once, in stream order, the same way in every run.
    def release(self, group: OffloadGroup) -> None:
        """Make what was computed on wait for a group's copies, and drop their sources.

        It is the one whose copies were issued first; one wait covers all before it.
        """
        # Not what is current now: the memory goes back to these.
        streams = {stream: None for _, stream, _ in group.copies}
        self.wait(group, streams, group.d2h, Wait.W2)
        num_bytes: dict[HostRegion, int] = {}
        for lease, stream, alias in group.copies:
            block = lease()  # None where it is dead
            self.backend.read_on(stream, alias)  # the program may have allocated it on another
            if block is None:
                self._drop_source([alias], stream, group)
            elif block.state is not IN_FLIGHT:
                continue
            elif alias.untyped_storage().data_ptr() != block.address:
                # Someone emptied the storage meanwhile, so the copy may have read memory that
                # was no longer its own. Its user restores the contents before backward.
                self._keep(block)
            else:
                block.state = MOVES[block.state, RELEASED]
                self._drop_source(block.aliases, stream, group, block)
                region = lease.region
                assert region is not None
                num_bytes[region] = num_bytes.get(region, 0) + block.num_bytes
        for region, region_bytes in num_bytes.items():
            self.host_pool.count_alone(region, group.name, region_bytes)
        group.copies = ()

    def _drop_source(
        self,
        aliases: Sequence[torch.Tensor],
        stream: Stream,
        group: OffloadGroup,
        block: Block | None = None,
    ) -> None:
        """Empty all aliases of a storage, which a block that is alive remembers if others have it.

        ``stream`` is where its memory goes back to.
        """
        backend, storage = self.backend, aliases[0].untyped_storage()
        for alias in aliases:
            alias.data = self._empty
        is_free = use_count_of(storage._cdata) == 1  # the Python handle
        if backend.observes:
            sources = (alias for one in self.window for _, _, alias in one.copies)
            if all(alias.untyped_storage()._cdata != storage._cdata for alias in sources):
                label = group.label
                with backend.computing_on(stream):
                    backend.note_produced(bytes_of(storage), label)  # all, though parts were copied
                    backend.note_freed(bytes_of(storage), label, sole_owner=is_free)
        if block is None:
            return
        if not is_free and block.forced_by and has_no_other(storage, block.forced_by):
            storage.resize_(0)
            is_free = True
        if is_free:
            block.storage_key = 0  # another storage may be found under it from here on
        else:
            block.storage_ref = StorageRef(storage)

    # Sources that are kept

    def cancel(self, group: OffloadGroup, *, is_late: bool) -> None:
        """Leave a group on the device whose copies are in flight."""
        self.stats.num_cancelled_offloads += is_late
        for block in group.blocks():
            self._keep(block)
        group.advance(RESIDENT)

    def _keep(self, block: Block) -> None:
        """Keep a block on the device after all, if its copy is in flight.

        Its source is held until the copy is done, its host memory goes back now: the next copy into
        it is queued on the same stream.
        """
        if block.state is IN_FLIGHT:
            block.state = MOVES[block.state, KEPT]
            self.host_pool.free(block.take_region(), None)
            block.lease.group.land(block.num_bytes)

    # What records ask for

    @guarded
    def keep_source(self, block: Block) -> None:
        """Keep a block's source on the device for a reader, on whatever stream."""
        self._keep(block)
        stream = self.backend.compute_stream()
        if stream is not block.stream:
            self.backend.read_on(stream, block.aliases[0])

    def target_of(self, block: Block) -> torch.Tensor:
        """Return where a released block's bytes are, ordered before what the program does next.

        Raises:
            StateError: the data went with a step that was aborted.
            CorruptionError: in checking mode, reloaded bits differ from offloaded ones.
            torch.OutOfMemoryError: the device has no memory for it.
        """
        if block.state is RELOADED and not self.observers and not self.backend.observes:
            reload = block.lease.reload  # this takes no lock, because it only looks
            if not reload.targets and self.backend.compute_stream() is reload.stream:
                return block.target
        if block.state is DROPPED and block.recipe is not None:
            return block.recipe.target_of(block)  # its call is the program's: no lock is held
        return self._target_of(block)

    @guarded
    def _target_of(self, block: Block) -> torch.Tensor:
        """Reload what is not reloaded yet, the whole group if it is on the host; and wait."""
        group = block.group
        if block.state is RELEASED and group.state is ON_HOST:
            self.reload(group, is_late=True)
        if block.state is RELEASED:
            self._reload(group, [block], may_fail=False)
        elif block.state is LOST:
            raise StateError(
                f"group {group.label} was saved in a step that was aborted; its data is "
                "gone, run the forward again"
            )
        target = block.target
        if block.state is RELOADED:
            self._wait_reload(block.lease, target)
            if self.backend.observes:
                self.backend.note_consumed(target, group.label)
        for observer in self.observers:
            observer.block_read(block, target)
        return target

    # What something else keeps

    # [Note: what something else keeps] To copy that frees nothing: a pipeline schedule holds the
    # input of each chunk until its backward. At the commit other owners are unknown, as the frames
    # of the forward are some. In backward a released storage that is alive at its old address was
    # never freed: its bytes are taken from there. The block isn't offloaded in the next step,
    # until it has no other owner.
    def learn_owners(self, group: OffloadGroup) -> None:
        """See, now that backward is here, which blocks something else keeps on the device."""
        others = self.kept_by_others
        for block in group.blocks():
            if block.state is RELOADED or block.was_reached:
                continue  # it left, or what another group has read of it is an owner now
            block.was_reached = True
            if block.state is not SAVED or block.identity in others:
                (others.add if _is_kept_by_others(block) else others.discard)(block.identity)

    # Steps

    def abandon(self, groups: Iterable[OffloadGroup]) -> None:
        """Take everything from these groups, and count anew what is left: after a failed step.

        A failed backward may leave its graph alive for long: its data goes now.
        """
        self.backend.sync_copies()
        self.window.abandon()
        for group in groups:
            group.moving, group.copies, group.dropped_bytes = (), (), Sums()
            for block in group.blocks():
                block.abandon()
            if group.state is not DONE:
                group.advance(DONE)
        self._leases = {lease for lease in self._leases if lease() is not None}
        self.host_pool.recover(Counter(lease.region for lease in self._leases).__getitem__)


def _is_kept_by_others(block: Block) -> bool:
    """Whether something else keeps a block on the device, when backward has come to it."""
    if block.state is DROPPED:
        return block.live_source() is not None
    if block.state is SAVED:
        own = block.aliases
    elif block.state is EXTERNAL:  # it was to leave, and its source was still there
        own = [block.target]
    else:
        return False  # it left, or may have
    own = [*own, *(block.handed or {}).values()]
    return num_owners(own[0].untyped_storage()) > len(own) + 1  # and this line's handle
