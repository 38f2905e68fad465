"""What of megatron-core's model backward makes again, and where its code has a place to say so.

Functions stand in the place of megatron-core's own under the same names; they call those, and tell
the process's manager how the output was made. Norms are told of by hooks of a model's modules, from
its first forward on; what TransformerEngine fuses, by `megatron_offload.engine.fused_outputs`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_offload.config import LAYER_INPUT
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.exchanges import Exchanges
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.frontends.around import refuse_unserved
from megatron_offload.frontends.recompute import (
    RecomputeFunctions,
    functions_of_torch,
    named_modules,
    recompute_modules,
    tell,
    told_by_integrations,
)

_IMPLEMENTATIONS = {
    "fusions.fused_bias_gelu": ("bias_gelu_impl",),
    "fusions.fused_bias_geglu": ("bias_geglu_impl", "weighted_bias_quick_geglu_impl"),
    "fusions.fused_bias_swiglu": ("bias_swiglu_impl", "weighted_bias_swiglu_impl"),
    "fusions.fused_weighted_squared_relu": ("weighted_squared_relu_impl",),
}
"""Activations with bias, gate and weights fused, by the module that defines them."""

_MODELS = {"gpt.gpt_model": "GPTModel", "hybrid.hybrid_model": "HybridModel"}
_PREPARE = "preprocess_for_fine_grained_offloading"
_EXPERTS = {"transformer.mlp": "MLP", "transformer.moe.experts": "TEGroupedMLP"}
_BLOCKS = {
    "transformer_block": "TransformerBlock",
    "multi_token_prediction": "MultiTokenPredictionLayer",
}
_SEGMENTS = "_checkpointed_forward"
_LATENT, _PROJECT = "transformer.multi_latent_attention", "get_query_key_value_tensors"

_PARTS = functions_of_torch(dict.fromkeys(("gelu", "silu", "mul", "add", "to"), "mlp_act"))
"""What an activation is made of where it isn't fused."""

_hooked: WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], list[RemovableHandle]]] = (
    WeakKeyDictionary()
)
"""By model, what was to be made again when its modules got their hooks, and these."""

_in_segments: list[nn.Module] = []
"""The module whose layers run in checkpoints now, where the inputs of these are groups."""

_manager = PipelineOffloadManager.get_instance


def stand_ins() -> Iterator[tuple[Any, Any]]:
    """Yield functions of megatron-core's, each with the one that stands in for it."""
    for module, names in _IMPLEMENTATIONS.items():
        for name in names:
            theirs = getattr(_module(module), name, None)
            if theirs is not None:
                yield theirs, _telling(theirs, "mlp_act")
    rope = getattr(_module("models.common.embeddings.rope_utils"), "apply_rotary_pos_emb", None)
    if rope is not None:
        yield rope, _telling(rope, "rope")
    for module, name, stand_in in (
        ("tensor_parallel.random", "checkpoint", _grouping),
        ("extensions.transformer_engine", "te_checkpoint", _grouping),
        ("recompute", "checkpointed_forward", _by_segments),
    ):
        theirs = getattr(_module(module), name, None)
        if theirs is not None:
            yield theirs, stand_in(theirs)
    moe = _module("transformer.moe.moe_utils")
    if moe is not None:
        yield moe.permute, _permuting(moe.permute)
        yield moe.sort_chunks_by_idxs, _sorting(moe.sort_chunks_by_idxs)


def exchange_methods(exchanged: Exchanges, around_models: Callable[..., Any]) -> None:
    """Exchange methods of megatron-core's classes for those that tell, or let others tell.

    ``around_models`` wraps what a model calls before each forward; it is to call `hook_model`.
    """
    wrappers = [
        *((f"models.{m}", name, _PREPARE, around_models) for m, name in _MODELS.items()),
        *((module, name, "forward", _letting_functions_tell) for module, name in _EXPERTS.items()),
        (_LATENT, "MLASelfAttention", _PROJECT, _projecting),
        *((f"transformer.{m}", name, _SEGMENTS, _by_segments) for m, name in _BLOCKS.items()),
    ]
    for module, class_name, name, wrap in wrappers:
        owner = getattr(_module(module), class_name, None)
        if owner is not None and name in vars(owner):
            exchanged.replace(owner, name, wrap(vars(owner)[name]))
    exchanged.on_undo(_forget_models)
    told_by_integrations.update(("rope", "mla_up", "moe_permute"))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ImportError:  # of this version, or of what it needs and this job doesn't
        return None


def _telling(theirs: Callable[..., Any], unit: str) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        output = theirs(*args, **kwargs)
        if torch.is_grad_enabled():
            tell(_manager(), output, theirs, args, kwargs, unit, holds_constants=True)
        return output

    return call


def _permuting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def permute(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = theirs(tokens, *args, **kwargs)
        given = signature.bind(tokens, *args, **kwargs).arguments
        if torch.is_grad_enabled() and not given.get("fused"):
            again, rows = torch.index_select, result[2]
            tell(_manager(), result[0], again, (tokens, 0, rows), {}, "moe_permute")
        return result

    return permute


def _sorting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def sort(*args: Any, **kwargs: Any) -> Any:
        result = theirs(*args, **kwargs)
        if torch.is_grad_enabled():
            given = {**signature.bind(*args, **kwargs).arguments, "probs": None}
            chunks = given.pop("input")
            again = functools.partial(_first_of, theirs, given)
            tell(_manager(), result[0], again, (chunks,), {}, "moe_permute")
        return result

    return sort


def _first_of(function: Callable[..., Any], given: dict[str, Any], chunks: torch.Tensor) -> Any:
    return function(input=chunks, **given)[0]


def hook_model(model: nn.Module) -> None:
    """Let what a model's modules make be made again, if it isn't yet."""
    config = _manager().config
    if config.enabled and _hooked.get(model, ((), []))[0] != config.recompute:
        refuse_unserved("megatron_core.install()", config)
        handles = recompute_modules(named_modules(model), config.recompute, _manager)
        _hooked[model] = config.recompute, handles


def _forget_models() -> None:
    for _, handles in _hooked.values():
        for handle in handles:
            handle.remove()
    _hooked.clear()
    told_by_integrations.clear()


def _by_segments(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Let the checkpoints of full recompute be told from those of parts of a layer."""

    @functools.wraps(theirs)
    def checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        on = self.config.fine_grained_activation_offloading
        if not on or LAYER_INPUT not in self.config.offload_modules:
            return theirs(self, *args, **kwargs)
        _in_segments.append(self)
        try:
            return theirs(self, *args, **kwargs)
        finally:
            _in_segments.pop()

    return checkpointed_forward


def _grouping(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Make a group of the hidden states that a checkpoint of whole layers keeps, and of no more."""

    @functools.wraps(theirs)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        if not (_in_segments and torch.is_grad_enabled()):
            return theirs(*args, **kwargs)
        given = (*args, *kwargs.values())
        hidden, *others = (one for one in given if isinstance(one, torch.Tensor))
        manager = _manager()
        for mask_or_table in others:
            manager.mark_not_offload(mask_or_table)
        start_group(manager, hidden, LAYER_INPUT)
        with manager:
            outputs = theirs(*args, **kwargs)
        # Schedules hold what they have received until its backward, and read its gradient alone.
        received = [hidden] if hidden is getattr(_in_segments[-1], "input_tensor", None) else []
        return commit_group(manager, outputs, LAYER_INPUT, received)

    return checkpoint


def _letting_functions_tell(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager, config = _manager(), self.config
        is_fused = config.bias_activation_fusion or config.use_te_activation_func
        if is_fused or "mlp_act" not in manager.config.recompute or not manager.records():
            return theirs(self, *args, **kwargs)
        own = vars(self)
        activate = None if torch.compiler.is_compiling() else own.get("activation_func")
        scales = len(args) > 1 or kwargs.get("per_token_scale") is not None  # as experts do
        if activate and not scales and not config.gated_linear_unit:
            own["activation_func"] = _telling(activate, "mlp_act")  # all there is to tell
            try:
                return theirs(self, *args, **kwargs)
            finally:
                own["activation_func"] = activate
        with RecomputeFunctions(manager, _PARTS):
            return theirs(self, *args, **kwargs)

    return forward


def _projecting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Let the place where Megatron's own ``mla_up_proj`` would be checkpointed tell instead."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    @functools.wraps(theirs)
    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager, config = _manager(), self.config
        is_told = "mla_up" in manager.config.recompute and not self.recompute_up_proj
        has_state = config.fp8 or config.fp4
        communicates = config.sequence_parallel
        if not is_told or not manager.records() or has_state or communicates:
            return theirs(self, *args, **kwargs)

        def project(_: Any, run_function: Callable[..., Any], *inputs: Any) -> Any:
            outputs = run_function(*inputs)
            again = _Shared(run_function)
            for place, output in enumerate(outputs):
                function = functools.partial(again, place)
                tell(manager, output, function, inputs, {}, "mla_up", reads, holds_constants=True)
            return outputs

        reads = [tensor for child in self.children() for tensor in child.parameters()]
        with Exchanges() as exchanged:
            exchanged.replace(CheckpointWithoutOutput, "checkpoint", project)
            exchanged.replace(self, "recompute_up_proj", True)
            exchanged.replace(self, "qkv_up_checkpoint", None)
            return theirs(self, *args, **kwargs)

    return get_query_key_value_tensors


class _Shared:
    """A function of several outputs, run once for all of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, place: int, *args: Any) -> torch.Tensor:
        if place not in self._made:
            self._made = dict(enumerate(self._function(*args)))
        return self._made.pop(place)
