"""Megatron's MoE dispatch without host waits where expert indices become a multihot map.

Megatron's own step selects with boolean masks, for whose hits the host waits four times. Here every
shape follows from the inputs' shapes, with the bits, shapes and strides of Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_offload.engine.exchanges import Exchanges
from megatron_offload.errors import IntegrationError
from megatron_offload.integrations.megatron_core import import_from_megatron, megatron_version

_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_METHOD = "_indices_to_multihot"

_exchanged = Exchanges()


def install() -> None:
    """Put this step in the place of megatron-core's own, in this process; twice is once.

    Managers that were built before have it too. Megatron's fused kernel, which its experimental
    mode takes together with ``moe_permute_fusion``, doesn't come by here.

    Raises:
        IntegrationError: megatron-core is absent, or has no such step.
    """
    manager: Any = getattr(import_from_megatron(_MODULE), "_DeepepManager", None)
    if not hasattr(manager, _METHOD):
        raise IntegrationError(
            f"megatron-core {megatron_version()} has no _DeepepManager.{_METHOD}, in whose place "
            "this stands; leave out install()"
        )
    if not _exchanged:
        _exchanged.wrap(manager, _METHOD, _without_waits)


uninstall = _exchanged.undo
"""Puts megatron-core's own step back; without `install` it does nothing."""


def _without_waits(
    _: Callable[..., Any], manager: Any, indices: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return indices_to_multihot(indices, probs, manager.num_local_experts)


def indices_to_multihot(
    indices: torch.Tensor, probs: torch.Tensor, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert each token's expert indices into a row with a place for each expert.

    Where a token has an expert twice the later probability stays: one of the two that Megatron's
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
