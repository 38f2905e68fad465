"""How a saved tensor is recomputed in backward, in place of being kept or copied.

A recipe is noted for an output that exists, and found by its live storage. The block that the
output is saved in takes it; at the group's commit it is bound to the blocks of its inputs, and the
bytes are dropped. What is recomputed is what the forward made: the same function, of the same
bytes, under the same `CallState`, from the same random state.

    SavedTensor -> Block -> FunctionRecipe -> Input -> Block of what it is made from

Invariant: before it is bound a recipe keeps no activation alive that can be offloaded; from then on
it keeps the blocks of its inputs, until the last record of its own block has gone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import numpy as np
import torch

from megatron_offload.backends.base import Event, Stream
from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.block_state import DROPPED, SAVED
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.group import BlockRef
from megatron_offload.engine.observer import Checker, recompute
from megatron_offload.engine.saved_tensor import SavedTensor
from megatron_offload.engine.stats import StepStats
from megatron_offload.engine.transfers import KEPT_ALIVE
from megatron_offload.errors import CorruptionError
from megatron_offload.memory.checksum import checksum
from megatron_offload.memory.layout import TensorLayout, bytes_of, layout_of
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.recompute.call_state import (
    RandomStates,
    devices_of,
    generators_of,
    outside_vmap,
)
from megatron_offload.recompute.module_state import Constants
from megatron_offload.recompute.proof import Proof, other_bits

MOST_IN_A_ROW = 3
"""Recipes of which each needs what the one before makes."""

TOO_MANY = f"more than {MOST_IN_A_ROW} recipes in a row"

_INPUT_NOT_SAVED = "an input is not saved"
_ROW_IS_KEPT = (
    "rows: what {!r} returns is kept: it doesn't save what it takes, so that to recompute it would "
    "take as much memory"
)


class Input(SavedTensor):
    """A tensor that a recipe needs, as it was when the recipe was noted.

    When the recipe is bound, its block is found among its chunk's ``blocks``, by storage. Its own
    ``recipe`` is how it was made itself; ``unit`` is for messages.

    The alias is the caller's to empty: until it has a block, what counts of it is the version.
    """

    __slots__ = ("_blocks", "recipe", "requires_grad", "storage_ref")

    def __init__(
        self,
        tensor: torch.Tensor,
        unit: str,
        blocks: Mapping[int, BlockRef],
        recipe: FunctionRecipe | None,
    ) -> None:
        super().__init__(tensor, unit)
        self.layout = layout_of(tensor)
        if not self.is_detached:
            self.detach()
            self.leaf = None  # what a function takes isn't handed to autograd
        self.base = id(tensor._base)
        self.requires_grad = tensor.requires_grad
        self._blocks: Mapping[int, BlockRef] | None = blocks
        # While this is held no other storage has the identity by which the block is found.
        self.storage_ref = StorageRef(tensor.untyped_storage())
        self.recipe = recipe

    def _description(self) -> str:
        layout = f"shape {list(self.layout.size)} and dtype {self.layout.dtype}"
        return f"of {layout}, from which a saved one is recomputed ({self.group_name!r}),"

    def bind(self, depth: int) -> str:
        """Keep the input's block from here on; return why that can't be, or nothing."""
        if self.alias._version != self.version:
            return "an input was changed in place"
        if self._blocks is not None:
            found, self._blocks = self._blocks.get(self.storage_ref.cdata), None
            self.block = None if found is None else found()
        block = self.block
        if block is None or not block.covers(self.layout.low, self.layout.high):
            if self.recipe is None:
                return _INPUT_NOT_SAVED
            self.block = None
            return self.recipe.bind_inputs()
        if block.state is not SAVED and not block.has(self):
            return "an input was changed in place"
        if block.recipe is not None and block.recipe.depth >= depth:
            return TOO_MANY
        if not (block.released or self.alias.untyped_storage().nbytes()):
            source = block.aliases[0]
            self.alias.data = self.view_in(source, int(source.storage_offset()) * source.itemsize)
            block.aliases.append(self.alias)
        self.recipe = None
        return ""

    def needs(self) -> set[GroupKey]:
        """Return the groups whose bytes have to be on the device for this."""
        block = self.block
        if block is None:
            return set() if self.recipe is None else self.recipe.needs()
        if block.recipe is not None and block.released:
            return block.recipe.needs()
        return {block.group.key}

    def unpack(self) -> torch.Tensor:
        """Return the input, recomputed or reloaded where it has to be."""
        block = self.block
        if block is None:  # it is recomputed as it was, whatever has changed it since
            assert self.recipe is not None
            return self.view_in(self.recipe.run(), 0)
        if not block.released:
            block.store.keep_source(block)  # the stream may be another than its readers'
        return super().unpack()


class FunctionRecipe:
    """How one tensor was made: by a call that may run again.

    To what is saved of it in no group it is the block, as one that was dropped.

    Args:
        again: runs the call, under its own state; what it returns shares memory with no input.
        parts: what that takes; each activation that can be offloaded as an `Input`.
        output: what it has made.
        unit: the kind of recipe, by which it is counted, configured and planned.
        chunk: whose forward it is, where it is noted.
        proof: what is known of outputs that are made like this.
        refusal: why it can't be used, or nothing.

    Attributes:
        depth: how many recipes are run one after another to make this; 0 where it can't be used.
        version: version counter of the output when it was made.
        sum, are_equal, compared: for a proof the output's checksum, what was compared with it in
            forward, and the event behind that.
        made: what it was made as in backward, and on which stream.
    """

    state = DROPPED
    released, spec, low = True, None, 0
    is_counted = is_spoilt = False
    sum: torch.Tensor | None = None
    are_equal: Sequence[torch.Tensor] = ()
    compared: Event = None
    made: tuple[Stream, torch.Tensor] | None = None
    target_version: int | None = None
    handed: dict[TensorLayout, torch.Tensor] | None = None

    def __init__(
        self,
        again: Callable[..., Any],
        parts: Sequence[Any],
        output: torch.Tensor,
        unit: str,
        chunk: ChunkOffloadHandler,
        proof: Proof,
        refusal: str,
    ) -> None:
        storage, layout = output.untyped_storage(), layout_of(output)
        self.again, self.parts, self.unit, self.proof = again, parts, unit, proof
        self.transfers, self._chunk = chunk.transfers, ref(chunk)
        self.version, self.form = output._version, (layout.size, layout.stride, layout.dtype)
        self.storage_ref = StorageRef(storage)  # as with an `Input`
        self.num_bytes, self.address = storage.nbytes(), storage.data_ptr()
        self.aliases: list[torch.Tensor] = []
        self._counted_in: StepStats | None = None  # where it is counted as recomputed, in no group
        known = {id(x): x for x in parts}.values()
        self.inputs = [x for x in known if type(x) is Input]
        self.constants = Constants([x for x in known if isinstance(x, torch.Tensor)])
        depth = 1 + max((x.recipe.depth for x in self.inputs if x.recipe is not None), default=0)
        if any(x.storage_ref.cdata == self.storage_ref.cdata for x in self.inputs):
            refusal = refusal or "it is a view of an input"
        if any(x.layout is not torch.strided for x in self.constants.tensors):
            refusal = refusal or "it takes a sparse tensor"
        if layout.offset or self.num_bytes > layout.high:
            refusal = refusal or "its storage holds more"
        if depth > MOST_IN_A_ROW:
            refusal = refusal or TOO_MANY
        self.refusal = refusal
        self.depth: int = 0 if refusal else depth

    @property
    def store(self) -> FunctionRecipe:
        """What a record asks for the output."""
        return self

    def bind(self, aliases: Sequence[torch.Tensor], stream: Stream, *, drops: bool) -> str:
        """As there: keep the inputs' blocks from here on.

        What an input is made from counts as its input too. For a proof the host waits for what
        comparisons have shown.
        """
        if any(alias._version != self.version for alias in aliases):
            return "it was changed in place"
        if refusal := self.bind_inputs():
            if self.transfers.by_rows and refusal == _INPUT_NOT_SAVED:
                self.transfers.warn_once(_ROW_IS_KEPT.format(self.unit))
            return refusal
        if self.compared is None or self.sum is None:
            return self.proof.refuse_unseen() if drops else ""
        if not self.is_counted:
            self.transfers.stats.proven_bytes += self.num_bytes
        with self.transfers.backend.computing_on(stream):
            stream.wait_event(self.compared)
            are_equal = [*self.are_equal, sum_of(aliases[0]) == self.sum]
            refusal = self.proof.resolve(are_equal)
        # Who has saved it before has dropped what was written to unseen since.
        self.is_spoilt |= bool(refusal and self.aliases and not torch.stack(are_equal).all())
        return refusal

    # What is saved in no group is no block: nothing copies it, nor waits for it. While something
    # else keeps the output, that is what is read, as autograd alone would have read it.
    def drop(self, record: SavedTensor, *, drops: bool) -> None:
        """As there."""
        transfers, stream = self.transfers, self.transfers.backend.compute_stream()
        with transfers.guard.lock:  # else another thread may release what an input is in
            refusal = self.bind([record.alias], stream, drops=drops)
        if not self.is_counted:
            stats, self.is_counted = transfers.stats, True
            if refusal:
                self._refuse(stats, refusal)
            elif drops:
                stats.by_name[self.unit].recomputed_bytes += self.num_bytes
                self._counted_in = stats
        if refusal or not drops:
            return
        is_watched = transfers.observers and self.sum is None
        if is_watched and any(isinstance(x, Checker) for x in transfers.observers):
            self.sum = sum_of(record.alias)
        alias = record.alias if record.is_detached else record.detach()
        transfers.backend.read_on(stream, alias)
        transfers.empty(alias)
        self.aliases.append(alias)
        record.block = self  # type: ignore[assignment]  # of which it asks no more

    def _refuse(self, stats: StepStats, why: str) -> None:
        refused = stats.refused_recipe_bytes
        refused[why] = refused.get(why, 0) + self.num_bytes

    def target_of(self, block: Any) -> torch.Tensor:
        """As there, once for all who need it on a stream: no wait orders another behind that."""
        transfers, stream = self.transfers, self.transfers.backend.compute_stream()
        if self.made is None or self.made[0] is not stream:
            if (chunk := self._chunk()) is not None:
                chunk.recipes.clear()  # its forward is over, and they keep what they are made of
            storage = torch.UntypedStorage._new_with_weak_ptr(self.storage_ref.cdata)
            if storage is not None and storage.data_ptr() == self.address:
                if self._counted_in is None:
                    transfers.stats.externally_referenced_bytes += self.num_bytes
                else:
                    self._counted_in.by_name[self.unit].recomputed_bytes -= self.num_bytes
                    self._refuse(self._counted_in, KEPT_ALIVE)
                    self._counted_in = None
                self.made = stream, bytes_of(storage)
            else:
                label = self.unit if block is self else block.group.label
                made = recompute(transfers.observers, label, self.run)
                if not made.is_contiguous():
                    made = bytes_of(made.untyped_storage())
                self.made = stream, made
                for observer in () if block is self else transfers.observers:
                    observer.block_read(block, self._from(block.low))
        return self._from(block.low)

    def _from(self, low: int) -> torch.Tensor:
        assert self.made is not None
        made = self.made[1]
        return made.view(-1).view(torch.uint8)[low:] if low else made

    def begin_proof(self, output: torch.Tensor, given: Sequence[Any], *, runs: bool) -> None:
        """Compare an output that was made now of what is ``given``, if the call ``runs`` once more.

        So is what is given of which backward would take what another recipe makes.
        """
        self.sum, are_equal = sum_of(output), list[torch.Tensor]()
        for tensor, part in zip(given, self.parts, strict=True):
            if type(part) is Input and part.recipe is not None and part.recipe.sum is not None:
                are_equal.append(sum_of(tensor) == part.recipe.sum)
        if runs:
            plain = (x for x in given if type(x) is torch.Tensor)
            own = {id(x): x.detach().requires_grad_(x.requires_grad) for x in plain}
            made = self._call([own.get(id(x), x) for x in given])
            is_alike = self._is_as_before(made)
            are_equal.append(sum_of(made) == self.sum if is_alike else self.sum != self.sum)
        backend, self.are_equal = self.transfers.backend, are_equal
        self.compared = backend.record(backend.compute_stream())

    def bind_inputs(self) -> str:
        """As `bind`, for an output that is not saved."""
        refusal = self.refusal
        if not self.constants.are_unchanged():
            refusal = refusal or "something that it reads was changed in place"
        for part in self.inputs:
            refusal = refusal or part.bind(self.depth)
        return refusal

    def needs(self) -> set[GroupKey]:
        """Return the groups whose bytes have to be on the device before `run`."""
        return set().union(*(part.needs() for part in self.inputs))

    def run(self) -> torch.Tensor:
        """Make the tensor again, on the current stream, whatever vmap is entered.

        Raises:
            InPlaceModificationError: something that the function takes was changed since.
            StateError: a parameter that it takes has no memory now.
            CorruptionError: the function made another kind of tensor than before, or for a proof
                other bits; or it was written to unseen between two who have saved it.
        """
        if self.is_spoilt:
            raise other_bits(f"what {self.proof.name} returns", self.unit)
        with outside_vmap():
            self.constants.check("a tensor", self.unit)
            # By what needs one a product of matrices chooses its kernel, even where grad is off.
            given = {id(x): x.unpack().requires_grad_(x.requires_grad) for x in self.inputs}
            made = self._call([given.get(id(part), part) for part in self.parts])
            if not self._is_as_before(made):
                found: Any = type(made)
                if found is torch.Tensor:
                    found = f"{list(made.shape)}, {made.stride()}, {made.dtype}"
                shape, stride, dtype = self.form
                raise CorruptionError(
                    f"what {self.proof.name} returns ({self.unit!r}) was recomputed as {found}, "
                    f"and was {list(shape)}, {stride}, {dtype} (shape, strides, dtype) in forward: "
                    "it must make the same tensor each time it is called"
                )
            if self.sum is not None and not torch.equal(sum_of(made), self.sum):
                raise other_bits(f"what {self.proof.name} returns", self.unit)
            return made

    def _call(self, parts: Sequence[Any]) -> torch.Tensor:
        """Return what the call makes; for a proof no random state is changed."""
        made: torch.Tensor = (self.again if self.sum is None else self._run_for_proof)(*parts)
        return made.detach() if type(made) is torch.Tensor else made

    def _run_for_proof(self, *parts: Any) -> Any:
        with ExitStack() as undo:
            undo.callback(random.setstate, random.getstate())
            undo.callback(np.random.set_state, np.random.get_state(legacy=False))
            return RandomStates(generators_of(devices_of(parts))).run(self.again, *parts)

    def _is_as_before(self, made: torch.Tensor) -> bool:
        is_plain = type(made) is torch.Tensor and made.storage_offset() == 0
        return is_plain and (made.shape, made.stride(), made.dtype) == self.form


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of the bytes of a tensor's storage, on its device."""
    return checksum(bytes_of(tensor.untyped_storage()))
