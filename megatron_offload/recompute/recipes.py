"""What a chunk's forward has made and is not saved yet, and how it is recomputed.

A recipe is noted when an output exists. The block that the output is saved in takes it; what is not
saved is forgotten when the forward is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from megatron_offload.engine.automatic import AutomaticGroups
from megatron_offload.engine.block_state import SAVED
from megatron_offload.engine.chunk import ChunkOffloadHandler
from megatron_offload.engine.hooks import graph_break, has_modes, owner_of_hooks
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.engine.marks import is_parameter
from megatron_offload.engine.transfers import Transfers
from megatron_offload.memory.layout import layout_of
from megatron_offload.memory.nested import is_wrapper, tensors_in
from megatron_offload.recompute.arguments import taken_apart
from megatron_offload.recompute.call_state import CallState, RandomStates, devices_of, generators_of
from megatron_offload.recompute.module_state import lasting
from megatron_offload.recompute.patches import Call
from megatron_offload.recompute.proof import Proof
from megatron_offload.recompute.recipe import FunctionRecipe, Input

T = TypeVar("T")

_MODES = "a mode of dispatch or of functions was entered, which may change what it computes"


def note_recipe(
    chunk: ChunkOffloadHandler,
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

    ``again`` runs the call that has made it, of the same ``inputs``; ``proof`` is what is known of
    such outputs; ``runs`` says whether it runs once more to be compared; ``holds`` whether it keeps
    what it takes for its own backward anyway.
    """
    is_plain = type(output) is torch.Tensor and chunk.transfers.backend.owns(output)
    if not is_plain or chunk.is_small(layout_of(output)) or is_functorch_wrapped_tensor(output):
        return
    if output.is_inference():  # nothing saves that
        return
    key = output.untyped_storage()._cdata
    is_held = holds and chunk.transfers.by_rows and not chunk.open_groups
    refusal = proof.refusal or (_MODES if has_modes() else "")
    known: dict[int, Any] = {}
    for given in inputs:
        if isinstance(given, torch.Tensor) and id(given) not in known:
            # What is given twice is one for the function too.
            known[id(given)], why = _part_of(chunk, given, unit, is_held=is_held)
            refusal = refusal or why
    parts = [known.get(id(x), x) for x in inputs]
    recipe = FunctionRecipe(again, parts, output, unit, chunk, proof, refusal)
    is_due = not (recipe.refusal or chunk.transfers.backend.is_capturing())
    if is_due and proof.begin(chunk.transfers.step_number):
        recipe.begin_proof(output, inputs, runs=runs)
    block = chunk.find_block(key)
    if block is None:
        chunk.recipes[key] = recipe
    elif block.state is SAVED:
        block.recipe = recipe


def _part_of(
    chunk: ChunkOffloadHandler, given: torch.Tensor, unit: str, *, is_held: bool
) -> tuple[Input | torch.Tensor | None, str]:
    """Return a tensor as a part of a recipe, and why it can't be one.

    It is an `Input`, unless it is never offloaded.
    """
    if given.is_inference():
        return None, "an input is of inference mode"  # which counts no versions
    if type(given) is torch.Tensor and (given.is_conj() or given.is_neg()):
        return None, "an input is conjugated or negated lazily"  # no form says it
    if type(given) is torch.Tensor and given.layout is torch.strided:
        key = given.untyped_storage()._cdata
        block = chunk.find_block(key)
        if block is None:
            chunk.blocks.pop(key, None)  # nor will one of another storage be found under it
        made_by: Any = chunk.recipes.get(key) if block is None else block.recipe
        if made_by is not None and made_by.version != given._version:
            made_by = None  # what it has made was changed in place since
        is_known = block is not None or made_by is not None
        if is_known or (not is_held and chunk.may_move(given)):
            part = Input(given, unit, chunk.blocks, made_by)
            chunk.transfers.empty(part.alias)
            return part, ""
    kept = given if has_modes() else lasting(given)
    if is_parameter(given):
        return kept, ""
    if kept is given:
        kept = kept.detach()  # to hold a graph from one of its records is a cycle
    why = "an input is made of several tensors" if is_wrapper(given) else ""
    return kept.requires_grad_(given.requires_grad), why


def _proof_of(chunk: ChunkOffloadHandler, function: Any, unit: str) -> Proof:
    """Return what is known of this call of a function in each forward."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = chunk.vp_stage, unit, name, getattr(function, "__code__", None)
    counts = _num_calls.setdefault(chunk, Counter())
    number = counts[code]
    counts[code] = number + 1
    known = _proofs.setdefault(chunk.transfers, {})
    return known.setdefault((*code, number), Proof(f"{name} (call {number} of each forward)"))


_proofs: WeakKeyDictionary[Transfers, dict[Hashable, Proof]] = WeakKeyDictionary()
"""Of the functions of each manager, which has these transfers, by one call in a forward."""

_num_calls: WeakKeyDictionary[ChunkOffloadHandler, Counter[Hashable]] = WeakKeyDictionary()
"""How often each function was called so far in the forward of a chunk."""


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
    default that of now; ``holds`` is as in `note_recipe`. Does nothing without a chunk.
    """
    if chunk is not None and isinstance(output, torch.Tensor):
        again, inputs = taken_apart(function, args, kwargs)
        run, proof = partial((state or CallState()).run, again), _proof_of(chunk, function, unit)
        note_recipe(chunk, output, run, inputs, unit, proof, holds=holds)


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
    generators = generators_of(devices_of(tensors_in(inputs)))
    states = RandomStates(generators) if preserve_rng_state else None
    call_state = CallState(states, keeps_grad=True)
    output = function(*inputs)
    add_recipe(chunk, output, function, inputs, unit=unit, state=call_state)
    return output
