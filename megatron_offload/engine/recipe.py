"""How a saved tensor is made again in backward, in place of being kept or copied.

A recipe is noted for an output that exists, and found by its live storage. The block that the
output is saved in takes it; at the group's commit it is bound to the blocks of its inputs, and the
bytes are dropped. What is made again is what the forward made: the same function, of the same
bytes, under the same autocast, from the same random state.

    SavedTensor -> Block -> FunctionRecipe -> Input -> Block of what it is made from

Invariant: before it is bound a recipe keeps no activation alive that can move; from then on it
keeps the blocks of its inputs, until the last record of its own block has gone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.group import Block, BlockRef
from megatron_offload.engine.random_states import RandomStates
from megatron_offload.engine.saved_tensor import FORMS, SavedTensor
from megatron_offload.errors import CorruptionError, StateError
from megatron_offload.memory.tensor_pool import span_bytes

_SAME = nullcontext()

_MOST_IN_A_ROW = 3
"""Recipes of which each needs what the one before makes."""


class Input(SavedTensor):
    """A tensor that a recipe needs, as it was when the recipe was noted.

    When the recipe is bound, its block is found among its chunk's ``blocks``, by storage. Its own
    ``recipe`` is how it is made itself, where no block has taken that; ``unit`` is for messages.

    The alias is the caller's to empty: what counts of it is the version.
    """

    __slots__ = ("_blocks", "_storage_ref", "recipe", "storage_key")

    def __init__(
        self,
        tensor: torch.Tensor,
        unit: str,
        blocks: Mapping[int, BlockRef],
        recipe: FunctionRecipe | None,
    ) -> None:
        super().__init__(tensor, unit)
        self.form = FORMS[tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype]
        if not self.is_detached:
            self.alias, self.is_detached = self.alias.detach(), True
        self.base = id(tensor._base)
        self._blocks: Mapping[int, BlockRef] | None = blocks
        storage = tensor.untyped_storage()
        self.storage_key: int = storage._cdata
        # While this is held no other storage has the identity by which the block is found.
        self._storage_ref = StorageWeakRef(storage)
        self.recipe = recipe

    def _description(self) -> str:
        form = f"shape {list(self.form.size)} and dtype {self.form.dtype}"
        return f"of {form}, from which a saved one is made again ({self.group_name!r}),"

    def bind(self, depth: int) -> str:
        """Keep the input's block from here on; return why that can't be, or nothing."""
        if self.alias._version != self.version:
            return "an input was changed in place"
        if self._blocks is not None:
            found, self._blocks = self._blocks.get(self.storage_key), None
            self.block = None if found is None else found()
        block = self.block
        if block is None or not block.covers(self.form.low, self.form.high):
            if self.recipe is None:
                return "an input is not saved"
            self.block = None
            self.recipe = self.recipe.copy()  # whoever saves the input may still take that itself
            return self.recipe.bind_inputs()
        if block.flight is not None and not block.has(self):
            return "an input was changed in place"
        if block.recipe is not None and block.recipe.depth >= depth:
            return f"more than {_MOST_IN_A_ROW} recipes in a row"
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
        """Return the input, made again or reloaded where it has to be."""
        block = self.block
        if block is not None and block.released:
            return super().unpack()
        self.check_version()
        if block is None:
            assert self.recipe is not None
            return self.view_in(self.recipe.run(), 0)
        if block.flight is not None and not block.cancelled:
            block.store.keep_source(block)
        source, form = block.alias, self.form
        block.store.read(block, source)
        is_same = source.dtype is form.dtype and source.storage_offset() == form.offset
        if is_same and source.shape == form.size and source.stride() == form.stride:
            return source.detach()
        return self.view_in(source, int(source.storage_offset()) * source.itemsize)


class _Read(SavedTensor):
    """A tensor that a recipe reads and that never moves."""

    __slots__ = ()

    def _description(self) -> str:
        form = f"shape {list(self.alias.shape)} and dtype {self.alias.dtype}"
        return f"of {form}, from which a saved one is made again ({self.group_name!r}),"


class FunctionRecipe:
    """A function and what it takes: how one tensor was made.

    Args:
        function: returns a tensor that shares memory with none of its inputs.
        parts: its arguments; each activation that can move as an `Input`.
        reads: what else it reads, parameters for one, that must be as it was.
        output: what it has made.
        unit: the kind of recipe, by which it is counted, configured and planned.
        random_states: as they were before; None where it draws nothing.
        refusal: why it can't be used, if that is known already.

    Attributes:
        depth: how many recipes are run one after another to make this; 0 where it can't be used.
    """

    __slots__ = (
        *("_autocast", "_device_type", "_form", "_function", "_parts", "_random_states"),
        *("_reads", "_refusal", "_storage_ref", "_version", "depth", "unit"),
    )

    def __init__(
        self,
        function: Callable[..., Any],
        parts: Sequence[Any],
        reads: Sequence[torch.Tensor],
        output: torch.Tensor,
        unit: str,
        random_states: RandomStates | None,
        depth: int,
        refusal: str,
    ) -> None:
        self.unit = unit
        self._function = function
        self._parts = parts
        self._reads = [_Read(tensor, unit) for tensor in reads]
        self._form = output.shape, output.stride(), output.dtype
        self._version: int = output._version
        storage = output.untyped_storage()
        self._storage_ref = StorageWeakRef(storage)  # as with an `Input`
        self._random_states = random_states
        self._device_type = output.device.type
        self._autocast = _autocast_state(self._device_type)
        if output.storage_offset() or storage.nbytes() > span_bytes(output):
            refusal = refusal or "its storage holds more"
        if depth > _MOST_IN_A_ROW:
            refusal = refusal or f"more than {_MOST_IN_A_ROW} recipes in a row"
        self.depth = 0 if refusal else depth
        self._refusal = refusal

    def bind(self, block: Block) -> str:
        """Keep the inputs' blocks from here on; return why the block can't be dropped, or nothing.

        What an input is made from counts as its input too.
        """
        version = self._version
        for alias in (block.alias, *block.others):
            if alias._version != version:
                return "it was changed in place"
        return self.bind_inputs()

    def copy(self) -> FunctionRecipe:
        """Return one that can be bound by itself."""
        copied = copy.copy(self)
        copied._parts = [copy.copy(part) if type(part) is Input else part for part in self._parts]
        return copied

    def bind_inputs(self) -> str:
        """As `bind`, for an output that nobody saves."""
        refusal = self._refusal
        for part in self._parts:
            if not refusal and type(part) is Input:
                refusal = part.bind(self.depth)
        return refusal

    def needs(self) -> set[GroupKey]:
        """Return the groups whose bytes have to be on the device before `run`."""
        return set().union(*(part.needs() for part in self._parts if type(part) is Input))

    def run(self) -> torch.Tensor:
        """Make the tensor again, on the current stream.

        Raises:
            InPlaceModificationError: something that the function takes was changed since.
            StateError: a parameter that it takes has no memory now.
            CorruptionError: the function made another kind of tensor than before.
        """
        for record in self._reads:
            record.check_version()
            tensor = record.alias
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            if is_plain and tensor.nbytes and not tensor.untyped_storage().nbytes():
                raise StateError(
                    f"a tensor {record._description()} has no memory now, as where a parameter is "
                    f"sharded until its own module's backward; leave {self.unit!r} out of what is "
                    "made again"
                )
        parts = [part.unpack() if type(part) is Input else part for part in self._parts]
        has_grad = torch.is_grad_enabled()  # as where a backward makes a graph
        states = self._random_states
        draws_again = _SAME if states is None else states.in_force()
        autocast: AbstractContextManager[Any] = _SAME
        if self._autocast != _autocast_state(self._device_type):
            is_on, dtype, keeps_casts = self._autocast or (False, None, True)
            how: dict[str, Any] = {"enabled": is_on, "dtype": dtype, "cache_enabled": keeps_casts}
            autocast = torch.autocast(self._device_type, **how)
        with torch.no_grad() if has_grad else _SAME, autocast, draws_again:
            made: torch.Tensor = self._function(*parts)
        is_tensor = type(made) is torch.Tensor and made.storage_offset() == 0
        if not is_tensor or (made.shape, made.stride(), made.dtype) != self._form:
            found = (
                f"{list(made.shape)}, {made.stride()}, {made.dtype}" if is_tensor else type(made)
            )
            raise CorruptionError(
                f"a saved tensor was made again by {self._function!r} ({self.unit!r}) as {found}, "
                f"and was {list(self._form[0])}, {self._form[1]}, {self._form[2]} (shape, strides, "
                "dtype) in forward: the function must make the same tensor each time it is called"
            )
        return made


def _autocast_state(device_type: str) -> tuple[bool, torch.dtype | None, bool] | None:
    """Return how autocast is set; None where it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return True, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
