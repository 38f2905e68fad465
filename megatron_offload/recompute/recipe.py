"""How a saved tensor is recomputed in backward, in place of being kept or copied.

A recipe is noted for an output that exists, and found by its live storage. The block that the
output is saved in takes it; at the group's commit it is bound to the blocks of its inputs, and the
bytes are dropped. What is recomputed is what the forward made: the same function, of the same
bytes, under the same `CallState`, from the same random state.

    SavedTensor -> Block -> FunctionRecipe -> Input -> Block of what it is made from

Invariant: before it is bound a recipe keeps no activation alive that can move; from then on it
keeps the blocks of its inputs, until the last record of its own block has gone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from megatron_offload.backends.base import Event
from megatron_offload.core.profile import GroupKey
from megatron_offload.engine.block_state import SAVED
from megatron_offload.engine.group import Block, BlockRef, Recipe
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.saved_tensor import SavedTensor, changed_in_place
from megatron_offload.engine.transfers import Transfers
from megatron_offload.errors import CorruptionError, StateError
from megatron_offload.memory.checksum import checksum
from megatron_offload.memory.layout import bytes_of, layout_of
from megatron_offload.memory.storage_ref import StorageRef
from megatron_offload.recompute.call_state import RandomStates, outside_vmap
from megatron_offload.recompute.proof import Proof, other_bits

MOST_IN_A_ROW = 3
"""Recipes of which each needs what the one before makes."""

TOO_MANY = f"more than {MOST_IN_A_ROW} recipes in a row"

_INPUT_NOT_SAVED = "an input is not saved"
_ROW_IS_KEPT = (
    "rows: what {!r} returns is kept: it doesn't save what it takes, so that to recompute it would "
    "take as much memory"
)

_MOST_COPIED_BYTES = 1 << 20

_PLAIN = torch.Tensor, torch.nn.Parameter
_version_of = attrgetter("_version")


def lasting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that holds a parameter's values until backward: a copy where it is small.

    A library may release a parameter after its own layer, and reload it for that layer's
    backward, too late for what a later layer has saved; and no version counts what is written
    through ``.data``, as where weights are clipped or averaged.
    """
    if tensor.layout is not torch.strided or tensor.nbytes > _MOST_COPIED_BYTES:
        return tensor
    copied = tensor.detach().clone()
    if copied.stride() != tensor.stride():  # it was expanded
        return tensor
    if not is_parameter(tensor):
        return copied.requires_grad_(tensor.requires_grad)
    if type(copied) is torch.Tensor:  # of whatever class of parameters
        copied = torch.Tensor._make_subclass(type(tensor), copied, tensor.requires_grad)
    else:
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    vars(copied).update(vars(tensor))
    return copied


class Constants:
    """Tensors that never move, and must be as they are when this is made."""

    __slots__ = ("_versions", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors, self._versions = tensors, [*map(_version_of, tensors)]

    def are_unchanged(self) -> bool:
        """Whether none was changed in place."""
        return [*map(_version_of, self.tensors)] == self._versions

    def check(self, what: str, unit: str) -> None:
        """Raise where one was changed in place, or has no memory; ``what`` they are is said."""
        plain = [x for x in self.tensors if type(x) in _PLAIN]
        if self.are_unchanged() and all(map(torch.Tensor.data_ptr, plain)):
            return  # as nearly always
        for x, version in zip(self.tensors, self._versions, strict=True):
            is_plain = type(x) in _PLAIN
            has_memory = not (is_plain and x.nbytes) or x.untyped_storage().nbytes()
            if has_memory and x._version == version:
                continue
            what = f"{what} of shape {list(x.shape)}, which is read when {unit!r} is recomputed,"
            if has_memory:
                raise changed_in_place(what, x._version, version)
            raise StateError(
                f"{what} has no memory now, as where a parameter is sharded until its own module's "
                f"backward; leave {unit!r} out of recompute"
            )


def taken_apart(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return a call as one of a function that takes what the arguments' lists and dicts hold.

    So tensors in them are inputs as any other, and who changes a list afterwards changes nothing.
    """
    if not kwargs and not any(isinstance(x, (list, tuple, dict)) for x in args):
        return function, args
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    return partial(_call, function, spec), leaves


def _call(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return function(*args, **kwargs)


class Input(SavedTensor):
    """A tensor that a recipe needs, as it was when the recipe was noted.

    When the recipe is bound, its block is found among its chunk's ``blocks``, by storage. Its own
    ``recipe`` is how it is made itself, where no block has taken that; ``unit`` is for messages.

    The alias is the caller's to empty: what counts of it is the version.
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
            self.recipe = self.recipe.copy()  # a block of the input may still take that itself
            return self.recipe.bind_inputs()
        if block.state is not SAVED and not block.has(self):
            return "an input was changed in place"
        if block.recipe is not None and block.recipe.depth >= depth:
            return TOO_MANY
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
        if block is not None and block.released:
            return super().unpack()
        if block is None:  # it is recomputed as it was, whatever has changed it since
            assert self.recipe is not None
            return self.view_in(self.recipe.run(), 0)
        self.check_version()
        block.store.keep_source(block)
        source, layout = block.aliases[0].detach(), self.layout  # the alias may be emptied
        if block.released:  # by another thread, before it was to be kept
            return super().unpack()
        is_same = source.dtype is layout.dtype and source.storage_offset() == layout.offset
        if is_same and source.shape == layout.size and source.stride() == layout.stride:
            return source
        return self.view_in(source, int(source.storage_offset()) * source.itemsize)


@dataclass(slots=True, eq=False, repr=False)
class FunctionRecipe:
    """How one tensor, the ``output``, was made: by a call that may run again."""

    again: Callable[..., Any]
    """Runs that, under its own state; returns a tensor that shares memory with no input."""
    parts: Sequence[Any]
    """What it takes; each activation that can move as an `Input`."""
    constants: Constants
    """Of that the tensors that never move."""
    output: InitVar[torch.Tensor]
    unit: str
    """The kind of recipe, by which it is counted, configured and planned."""
    depth: int
    """How many recipes are run one after another to make this; 0 where it can't be used."""
    transfers: Transfers
    proof: Proof
    """What is known of outputs that are made like this."""
    refusal: str
    """Why it can't be used, or nothing."""
    version: int = field(init=False)
    """Version counter of the output when it was made."""
    form: tuple[Any, ...] = field(init=False)
    storage_ref: StorageRef = field(init=False)
    are_equal: list[torch.Tensor] = field(default_factory=list)
    sum: torch.Tensor | None = None
    compared: Event = None

    def __post_init__(self, output: torch.Tensor) -> None:
        self.version = output._version
        self.form = output.shape, output.stride(), output.dtype
        self.storage_ref = StorageRef(output.untyped_storage())  # as with an `Input`

    @property
    def inputs(self) -> Iterable[Input]:
        """Those of the parts that can move, each once."""
        return {id(part): part for part in self.parts if type(part) is Input}.values()

    def bind(self, block: Block, *, drops: bool) -> str:
        """Keep the inputs' blocks from here on; return why the block can't be dropped, or nothing.

        What an input is made from counts as its input too. For a proof the host waits for what
        comparisons have shown.
        """
        if any(alias._version != self.version for alias in block.aliases):
            return "it was changed in place"
        if refusal := self.bind_inputs():
            if self.transfers.by_rows and refusal == _INPUT_NOT_SAVED:
                self.transfers.warn_once(_ROW_IS_KEPT.format(self.unit))
            return refusal
        if self.sum is None:
            return self.proof.refuse_unseen() if drops else ""
        self.transfers.stats.proven_bytes += block.num_bytes
        with self.transfers.backend.computing_on(block.stream):
            block.stream.wait_event(self.compared)
            are_equal = [*self.are_equal, sum_of(block.aliases[0]) == self.sum]
            return self.proof.resolve(are_equal)

    def begin_proof(
        self,
        output: torch.Tensor,
        given: Sequence[Any],
        sources: Sequence[tuple[torch.Tensor, Recipe]],
        *,
        runs: bool,
    ) -> None:
        """Compare an output that was made now, if the call ``runs`` once more.

        It was ``given`` its arguments; ``sources`` are those of which backward would take what
        other recipes make.
        """
        self.sum = sum_of(output)
        for tensor, recipe in sources:
            if isinstance(recipe, FunctionRecipe) and recipe.sum is not None:
                self.are_equal.append(sum_of(tensor) == recipe.sum)
        if runs:
            plain = (x for x in given if type(x) is torch.Tensor)
            own = {id(x): x.detach().requires_grad_(x.requires_grad) for x in plain}
            made = self._call([own.get(id(x), x) for x in given])
            is_alike = self._is_as_before(made)
            self.are_equal.append(sum_of(made) == self.sum if is_alike else self.sum != self.sum)
        backend = self.transfers.backend
        self.compared = backend.record(backend.compute_stream())

    def copy(self) -> FunctionRecipe:
        """Return one that can be bound by itself."""
        copied = copy.copy(self)
        copies = {id(part): copy.copy(part) for part in self.inputs}
        copied.parts = [copies.get(id(part), part) for part in self.parts]
        return copied

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
                other bits.
        """
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
        run = self.again
        with ExitStack() as undo:
            if self.sum is not None:
                devices = {x.device.type for x in parts if isinstance(x, torch.Tensor)}
                run = partial(RandomStates(devices).run, run)
                undo.callback(random.setstate, random.getstate())
                undo.callback(np.random.set_state, np.random.get_state(legacy=False))
            made: torch.Tensor = run(*parts)
        return made.detach() if type(made) is torch.Tensor else made

    def _is_as_before(self, made: torch.Tensor) -> bool:
        is_plain = type(made) is torch.Tensor and made.storage_offset() == 0
        return is_plain and (made.shape, made.stride(), made.dtype) == self.form


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of the bytes of a tensor's storage, on its device."""
    return checksum(bytes_of(tensor.untyped_storage()))
