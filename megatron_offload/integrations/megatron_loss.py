"""Megatron's unfused loss over a vocabulary that tensor parallelism splits, by blocks of rows.

Megatron saves the softmax in float32. Here the logits are saved, in their 16 bits, and the softmax
is computed again in backward, by blocks. The same operations give the same bits, but for the sums
over a row: how a kernel adds them up depends on how many rows there are where these are few, so no
block has fewer than `_LEAST_ROWS`. All three collectives are Megatron's, of all rows at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.recompute.loss import block_rows, have_same_bits, may_compare

_LEAST_ROWS = 1024
_proven: dict[Hashable, bool] = {}


def vocabulary_loss(
    original: Callable[..., Tensor],
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return what Megatron's ``vocab_parallel_cross_entropy`` returns, by rows if that is named.

    Its own computes float32 logits (in place, so that nothing could be freed), label smoothing and
    what is compiled. The first time both are computed and compared, of the first rows.

    Args:
        original: Megatron's own function.
        logits: of this rank's part of the vocabulary, of shape ``[sequence, batch, classes]``.
        target: of shape ``[sequence, batch]``, in the whole vocabulary.
        label_smoothing: as Megatron's.
        tp_group: as Megatron's; None: that of tensor parallelism.
    """
    more = () if tp_group is None else (tp_group,)
    manager = PipelineOffloadManager.get_instance()
    is_named = manager.config.enabled and manager.config.names_loss
    is_plain = type(logits) is Tensor and type(target) is Tensor and not label_smoothing
    if torch.compiler.is_compiling() or not (is_named and is_plain and _takes(logits, target)):
        return original(logits, target, label_smoothing, *more)
    from megatron.core import parallel_state

    group = tp_group or parallel_state.get_tensor_model_parallel_group()
    rows, step = target.numel(), _step(logits)
    key = logits.device, logits.dtype, logits.shape[-1], group.size(), rows > step
    if key not in _proven and may_compare(logits.device):
        few = slice(2 * step + step // 2 + 1)
        some, classes = logits.detach().flatten(0, 1)[few, None], target.flatten()[few, None]
        _proven[key] = have_same_bits(
            lambda own: original(own, classes, 0.0, *more),
            lambda own: _ByRows.apply(own, classes, group),
            some,
        )
        if not _proven[key]:
            warnings.warn(
                "recompute names 'loss', and the loss by rows isn't proven to be megatron-core's "
                f"on {logits.device}, for {logits.shape[-1]} classes a rank in {logits.dtype}: "
                "megatron-core's own is used, with what that needs of memory",
                stacklevel=3,
            )
    if not _proven.get(key):
        return original(logits, target, label_smoothing, *more)
    return _ByRows.apply(logits, target, group)


def _takes(logits: Tensor, target: Tensor) -> bool:
    is_known = logits.dtype in (torch.bfloat16, torch.float16) and target.dtype is torch.int64
    is_plain = logits.dim() == 3 and logits.shape[:2] == target.shape and logits.numel() > 0
    is_here = logits.device.type in ("cpu", "cuda") and logits.is_contiguous()
    return is_known and is_plain and is_here and dist.is_initialized()


def _step(logits: Tensor) -> int:
    return max(block_rows(logits, torch.float32), _LEAST_ROWS)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Yield blocks of rows; what is left over is the last one's."""
    rows, step = logits.shape[0], _step(logits)
    starts = [*range(0, max(rows - step, 0) + 1, step)]
    yield from map(slice, starts, [*starts[1:], rows])


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> Tensor:
        flat, ids = logits.flatten(0, 1), target.flatten()
        largest = flat.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        ids = ids - group.rank() * flat.shape[1]
        is_other = (ids < 0) | (ids >= flat.shape[1])
        ids = ids.masked_fill_(is_other, 0)
        own, total = torch.empty_like(largest), torch.empty_like(largest)
        for rows in _blocks(flat):
            block = flat[rows].float().sub_(largest[rows, None])
            own[rows] = block.gather(1, ids[rows, None])[:, 0]
            total[rows] = block.exp_().sum(1)
        own.masked_fill_(is_other, 0.0)
        dist.all_reduce(own, group=group)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(logits, ids, is_other, largest, total)
        return (total.log() - own).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, is_other, largest, total = ctx.saved_tensors
        flat, gradient = logits.flatten(0, 1), gradient.flatten()
        result = torch.empty_like(flat)
        for rows in _blocks(flat):
            block = flat[rows].float().sub_(largest[rows, None]).exp_().div_(total[rows, None])
            places = torch.arange(len(block), device=block.device), ids[rows]
            block[places] -= 1.0 - is_other[rows].float()
            result[rows] = block.mul_(gradient[rows, None])
        return result.view(logits.shape), None, None
