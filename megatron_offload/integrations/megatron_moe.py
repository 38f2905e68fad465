"""Megatron's MoE dispatch without host waits where expert indices become a multihot map.

Megatron's own step selects with boolean masks, for whose hits the host waits four times. Here every
shape follows from the inputs' shapes, with the bits, shapes and strides of Megatron's own.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import torch

from megatron_offload.errors import IntegrationError
from megatron_offload.integrations.megatron_core import import_from_megatron
from megatron_offload.recompute.patches import Call, PatchStack

_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_CLASS = "_DeepepManager"
_METHOD = "_indices_to_multihot"

_patches = PatchStack()


def install() -> None:
    """Put this step in the place of megatron-core's own, in this process; twice is once.

    Managers that were built before have it too. Megatron's fused kernel, which its experimental
    mode takes together with ``moe_permute_fusion``, doesn't come by here.

    Raises:
        IntegrationError: megatron-core is absent, or its step isn't the one this was written for.
    """
    if _patches:
        return
    manager = getattr(import_from_megatron(_MODULE), _CLASS, None)
    original: Any = getattr(manager, _METHOD, None)
    version = getattr(sys.modules["megatron.core"], "__version__", "of unknown version")
    wrong = (
        f"{_CLASS}.{_METHOD} of megatron-core {version} is not the one that this "
        "replaces, that of 0.16 to 0.19; leave out install()"
    )
    try:
        expected = _outcome(original)
    except Exception as error:
        raise IntegrationError(f"{wrong} ({error})") from error
    if _outcome(partial(_without_waits, original)) != expected:
        raise IntegrationError(wrong)
    _patches.wrap(manager, _METHOD, _without_waits)


uninstall = _patches.undo
"""Puts megatron-core's own step back; without `install` it does nothing."""


def _without_waits(original: Call, self: Any, indices: torch.Tensor, probs: torch.Tensor) -> Any:
    return indices_to_multihot(indices, probs, self.num_local_experts)


def indices_to_multihot(
    indices: torch.Tensor, probs: torch.Tensor, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert each token's expert indices into a row with a place for each expert.

    Where a token has an expert twice the later probability counts: one of the two that Megatron's
    own step may choose, and the one that it does choose on one thread of a CPU.

    Args:
        indices: integers, [num_tokens, topk]; the token's local experts, -1 where masked out.
        probs: float32, [num_tokens, topk].
        num_local_experts: width of the rows.

    Returns:
        The routing map, bool, and the probabilities, float32; both [num_tokens, num_local_experts].

    Raises:
        RuntimeError: an index is out of range; on a GPU it is a device-side assertion instead.
        TypeError: ``probs`` are not float32, which Megatron's own step refuses too.
    """
    if probs.dtype is not torch.float32:
        raise TypeError(f"probs are {probs.dtype}, must be float32; set moe_router_dtype to fp32")
    routing_map, multihot_probs = _IndicesToMultihot.apply(indices, probs, num_local_experts)
    return routing_map, multihot_probs


class _IndicesToMultihot(torch.autograd.Function):
    """Finds for each place of the row the slot of topk that fills it, then gathers.

    ``scatter_`` and ``index_put_`` of the probabilities make some versions of torch wait where they
    have to be deterministic. A maximum of integers is the same in any order.
    """

    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, probs: torch.Tensor, num_local_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(indices)
        # One more column in front takes what is masked out, and an index too large is an error.
        columns = indices.long() + 1
        slots = torch.arange(indices.shape[1], device=indices.device).expand_as(columns)
        filled_by = slots.new_full((indices.shape[0], num_local_experts + 1), -1)
        filled_by = filled_by.scatter_reduce_(1, columns, slots, "amax")[:, 1:]
        routing_map = filled_by >= 0
        multihot_probs = probs.gather(1, filled_by.clamp(min=0)).masked_fill(~routing_map, 0.0)
        ctx.set_materialize_grads(False)
        return routing_map, multihot_probs

    @staticmethod
    def backward(ctx: Any, _: None, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        (indices,) = ctx.saved_tensors
        picked = grad.gather(1, indices.long().clamp(min=0))
        # Megatron's backward adds to zeros, which makes -0.0 a 0.0; so does this.
        return None, (picked + 0.0).masked_fill(indices == -1, 0.0), None


def _outcome(step: Call) -> tuple[Any, ...]:
    """Return the bits that a step makes of three tokens, and of a gradient, to be compared."""
    manager = types.SimpleNamespace(num_local_experts=3)
    indices = torch.tensor([[2, -1], [-1, -1], [0, 1]], device="cpu")
    probs = [[0.5, 0.25], [1.0, 2.0], [-0.0, 3.0]]
    weights = torch.tensor([[1.0, 2.0, -0.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]], device="cpu")
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.tensor(probs, dtype=torch.float32, device="cpu", requires_grad=True)
        routing_map, multihot_probs = step(manager, indices, leaf)
        (gradient,) = torch.autograd.grad(multihot_probs, leaf, weights.to(multihot_probs.dtype))
    bits = [tensor.view(torch.int32).tolist() for tensor in (multihot_probs, gradient)]
    return routing_map.dtype, routing_map.tolist(), *bits
