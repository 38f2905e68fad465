"""What a chunk's forward has made and is not saved yet, and how it is recomputed.

A recipe is noted when an output exists. The block that the output is saved in takes it; what is not
saved is forgotten when the forward is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, proxy

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.block_state import SAVED
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.graph_break import graph_break
from megatron_offload.engine.group import Recipe
from megatron_offload.engine.hooks import has_modes, owner_of_hooks
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.nested import is_wrapper, tensors_in
from megatron_offload.engine.transfers import Transfers
from megatron_offload.memory.layout import layout_of
from megatron_offload.recompute.call_state import MODES, CallState, RandomStates
from megatron_offload.recompute.patches import Call
from megatron_offload.recompute.proof import Proof
from megatron_offload.recompute.recipe import (
    MOST_IN_A_ROW,
    TOO_MANY,
    Constants,
    FunctionRecipe,
    Input,
    lasting,
    taken_apart,
)

T = TypeVar("T")


class Recipes(dict[int, Recipe]):
    """How what one chunk's forward has made is recomputed, by storage, until that is saved."""

    def __init__(self, chunk: ChunkOffloadHandler) -> None:
        self._chunk: ChunkOffloadHandler = proxy(chunk)
        self._num_calls: Counter[Hashable] = Counter()
        """Of each function so far."""

    def add(
        self,
        output: torch.Tensor,
        again: Callable[..., Any],
        inputs: Sequence[Any],
        unit: str,
        proof: Proof,
        *,
        runs: bool = True,
        holds: bool = False,
    ) -> None:
        """Note how a tensor was made, so that what saves it need not keep its bytes.

        ``again`` runs the call that has made it, of the same ``inputs``; ``proof`` is what is known
        of such outputs; ``runs`` says whether it runs once more to be compared; ``holds`` whether
        it keeps what it takes for its own backward anyway.
        """
        chunk = self._chunk
        is_plain = type(output) is torch.Tensor and chunk.transfers.backend.owns(output)
        if not is_plain or chunk.is_small(layout_of(output)) or is_functorch_wrapped_tensor(output):
            return
        if output.is_inference():  # nothing saves that
            return
        key = output.untyped_storage()._cdata
        around = chunk.open_groups[-1].pick if chunk.open_groups else None
        offloads = bool(chunk.open_groups) and not (around and around.drops_only)
        is_held = holds and chunk.transfers.by_rows and not offloads
        depth, refusal = 1, proof.refusal or (MODES if has_modes() else "")
        sources: list[tuple[torch.Tensor, Recipe]] = []
        known: dict[int, Any] = {}
        for given in inputs:
            if isinstance(given, torch.Tensor) and id(given) not in known:
                # What is given twice is one for the function too.
                part, made, why = self._part_of(given, unit, is_held=is_held)
                known[id(given)] = part
                if isinstance(part, Input) and part.storage_ref.cdata == key:
                    why = "it is a view of an input"
                refusal = refusal or why
                if made is not None:
                    depth = max(depth, made.depth + 1)
                    sources.append((given, made))
        constants = Constants([x for x in known.values() if isinstance(x, torch.Tensor)])
        if any(x.layout is not torch.strided for x in constants.tensors):
            refusal = refusal or "it takes a sparse tensor"
        if output.storage_offset() or output.untyped_storage().nbytes() > layout_of(output).high:
            refusal = refusal or "its storage holds more"
        if depth > MOST_IN_A_ROW:
            refusal = refusal or TOO_MANY
        parts = [known.get(id(x), x) for x in inputs]
        how = 0 if refusal else depth, chunk.transfers, proof, refusal
        recipe = FunctionRecipe(again, parts, constants, output, unit, *how)
        is_due = not (refusal or chunk.transfers.backend.is_capturing())
        if is_due and proof.begin(chunk.transfers.step_number):
            recipe.begin_proof(output, inputs, sources, runs=runs)
        block = chunk.find_block(key)
        if block is None:
            self[key] = recipe
        elif block.state is SAVED:
            block.recipe = recipe

    def _part_of(
        self, given: torch.Tensor, unit: str, *, is_held: bool
    ) -> tuple[Input | torch.Tensor | None, Recipe | None, str]:
        """Return a tensor as a part of a recipe, how it was made itself, and why it can't be one.

        It is an `Input`, unless it never moves.
        """
        chunk, recipe = self._chunk, None
        if given.is_inference():
            return None, None, "an input is of inference mode"  # which counts no versions
        if type(given) is torch.Tensor and (given.is_conj() or given.is_neg()):
            return None, None, "an input is conjugated or negated lazily"  # no form says it
        if type(given) is torch.Tensor and given.layout is torch.strided:
            key = given.untyped_storage()._cdata
            block = chunk.find_block(key)
            if block is None:
                chunk.blocks.pop(key, None)  # nor will one of another storage be found under it
                known = self.get(key)
                if isinstance(known, FunctionRecipe) and known.version == given._version:
                    recipe = known  # else what it has made was changed in place since
            if block is not None or recipe is not None or (not is_held and chunk.may_move(given)):
                part = Input(given, unit, chunk.blocks, recipe)
                chunk.transfers.empty(part.alias)
                return part, recipe if block is None else block.recipe, ""
        kept = given if has_modes() else lasting(given)
        if is_parameter(given):
            return kept, None, ""
        kept = kept.detach()  # to hold a graph from one of its records is a cycle
        why = "an input is made of several tensors" if is_wrapper(given) else ""
        return kept.requires_grad_(given.requires_grad), None, why

    def proof_of(self, function: Any, unit: str) -> Proof:
        """Return what is known of this call of a function in each forward."""
        while isinstance(function, partial):
            function = function.func
        name = getattr(function, "__qualname__", type(function).__qualname__)
        code = self._chunk.vp_stage, unit, name, getattr(function, "__code__", None)
        number = self._num_calls[code]
        self._num_calls[code] = number + 1
        known = _proofs.setdefault(self._chunk.transfers, {})
        return known.setdefault((*code, number), Proof(f"{name} (call {number} of each forward)"))


_proofs: WeakKeyDictionary[Transfers, dict[Hashable, Proof]] = WeakKeyDictionary()
"""Of the functions of each manager, which has these transfers, by one call in a forward."""


def recipes_of(chunk: ChunkOffloadHandler) -> Recipes:
    """Return the recipes of a chunk, made at the first call."""
    if chunk.recipes is None:
        chunk.recipes = Recipes(chunk)
    assert isinstance(chunk.recipes, Recipes)
    return chunk.recipes


@graph_break
def add_recipe(
    chunk: ChunkOffloadHandler | None,
    output: Any,
    function: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    unit: str,
    state: CallState | None = None,
    holds: bool = False,
) -> None:
    """Let backward recompute an output that ``function(*args, **kwargs)`` has made.

    Arguments that hold tensors are taken apart. ``state`` is what the function ran under, by
    default that of now; ``holds`` is as in `Recipes.add`. Does nothing without a chunk.
    """
    if chunk is not None and isinstance(output, torch.Tensor):
        again, inputs = taken_apart(function, args, kwargs)
        run, recipes = partial((state or CallState()).run, again), recipes_of(chunk)
        recipes.add(output, run, inputs, unit, recipes.proof_of(function, unit), holds=holds)


@graph_break
def recomputable(
    function: Callable[..., T],
    *inputs: Any,
    preserve_rng_state: bool = True,
    unit: str = "by_hand",
    manager: PipelineOffloadManager | None = None,
) -> T:
    """Call a function, and let backward recompute its output from its inputs.

    Where autograd saves the output in a group, its memory is dropped at the group's commit, and
    neither kept nor copied. Whatever is saved of the inputs is; in backward the function is called
    with the same bytes, under the same autocast, grad mode and switches of torch. Outside of
    a group, `OffloadActivations` and the like, or where a mode of dispatch or of functions is
    entered, it is just called. ``last_step.refused_recipe_bytes`` says which outputs were kept or
    offloaded all the same, and why.

    Args:
        function: returns one tensor, in memory of its own, and does nothing else: it neither
            communicates nor writes to anything, and takes no activation but its inputs.
        *inputs: its arguments. Of the tensors those that can be offloaded are kept only if autograd
            saves them in a group too: if it doesn't, the output is kept or offloaded as ever.
        preserve_rng_state: whether it draws random numbers, which are drawn again as they were.
        unit: the name under which it is counted, configured and planned.
        manager: whose forward this is; by default that of the context around, or the process's.

    Returns:
        What the function returns.
    """
    if manager is None:
        owner = owner_of_hooks()
        is_around = isinstance(owner, AutomaticGroups)
        manager = owner.manager if is_around else PipelineOffloadManager.instance
    chunk = None if manager is None else manager.recorded_chunk()
    if chunk is None or (preserve_rng_state and chunk.transfers.backend.is_capturing()):
        return function(*inputs)  # a capture can't read the random state
    devices = (one.device.type for one in tensors_in(inputs))
    states = RandomStates(devices) if preserve_rng_state else None
    call_state = CallState(keeps_grad=True, random_states=states)
    output = function(*inputs)
    add_recipe(chunk, output, function, inputs, unit=unit, state=call_state)
    return output
