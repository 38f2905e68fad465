"""Weights of a described model on one GPU: memory, with gradients and optimizer, and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, get_args

from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import StageWork
from megatron_offload.planning.model import VALUE_BYTES, ModelDescription, Sharding

_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer of c10/cuda/CUDACachingAllocator
_STATIC_BYTES = 4.0  # of a parameter where no optimizer is described: weight and gradient in bf16


class Weights(NamedTuple):
    """Weights of one GPU, by who else has the same, and those of both that LoRA trains."""

    dense: int = 0
    experts: int = 0
    adapters: int = 0
    unused_bytes: int = 0
    """What is reserved beside them."""

    @property
    def number(self) -> int:
        """Of all weights."""
        return self.dense + self.experts + self.adapters


def _layer(model: ModelDescription, *, has_experts: bool) -> Weights:
    hidden, attention = model.hidden, model.attention

    def mlp(width: int) -> list[tuple[int, int]]:
        return [(hidden, width * (2 if model.gated_mlp else 1)), (width, hidden)]

    ffn = model.shared_expert_ffn if has_experts else model.ffn
    shared = [*attention.products, (attention.attended, hidden), *(mlp(ffn) if ffn else ())]
    num_own = model.experts // model.expert_parallel if has_experts else 0
    experts, router = num_own * mlp(model.expert_ffn or model.ffn), has_experts * model.experts
    dense = sum(map(prod, shared)) // model.tensor_parallel
    dense += (2 + router) * hidden + sum(width for _, width in attention.norms)
    adapters = sum(map(sum, shared)) // model.tensor_parallel + sum(map(sum, experts))
    sizes = *(prod(one) // model.tensor_parallel for one in shared), *map(prod, experts)
    unused = sum(_unused_bytes(model, size * VALUE_BYTES) for size in sizes)
    return Weights(dense, sum(map(prod, experts)), model.lora_rank * adapters, unused)


def _unused_bytes(model: ModelDescription, num_bytes: int) -> int:
    """Return what PyTorch's allocator reserves beside a weight of this size, and its gradient.

    Those of 1 to 10 MiB lie in segments of 20 MiB, unless an optimizer has them in its buffers.
    """
    is_own = model.optimizer is None and not model.expandable_segments
    if not is_own or not 2**20 < num_bytes < _SEGMENT_BYTES / 2:
        return 0
    share = _SEGMENT_BYTES // (_SEGMENT_BYTES // num_bytes)
    return (share - num_bytes) * (1 if model.lora_rank else 2)


def _layers(model: ModelDescription, rank: int) -> Iterator[Weights]:
    for stage in range(rank, len(model.layers_of_stages), model.pipeline_parallel):
        for index in model.layers_of(stage):
            yield _layer(model, has_experts=model.has_experts(index))
    if rank == model.pipeline_parallel - 1:
        hidden, last = model.hidden, model.has_experts(model.layers - 1)
        for _ in range(model.mtp_num_layers):  # its input is two, each behind a norm
            own = _layer(model, has_experts=last)
            yield own._replace(dense=own.dense + 2 * hidden**2 + 3 * hidden)


def weights_of(model: ModelDescription, rank: int) -> Weights:
    """Return all weights of one GPU of a pipeline rank."""
    is_first, is_last = rank == 0, rank == model.pipeline_parallel - 1
    # With multi-token prediction the last stage has a copy of the embedding.
    num_embeddings = int(is_first or (is_last and model.mtp_num_layers > 0))
    num_embeddings += is_last and not (model.tied_embeddings and num_embeddings)
    ends = num_embeddings * model.vocabulary * model.hidden // model.tensor_parallel
    each = *_layers(model, rank), Weights(ends + is_last * model.hidden)
    return Weights(*map(sum, zip(*each, strict=True)))


def _sharding_stage(model: ModelDescription) -> int:
    return get_args(Sharding).index(model.data_parallel_sharding_strategy)


def _num_replicas(model: ModelDescription) -> tuple[int, int, int]:
    """Return the GPUs that have the same, of each kind of weights, as Megatron counts them."""
    num_dense = model.data_parallel * model.context_parallel
    num_expert = num_dense * model.tensor_parallel // model.expert_parallel
    return num_dense, num_expert, num_dense


def _trained(model: ModelDescription, weights: Weights) -> Weights:
    return Weights(adapters=weights.adapters) if model.lora_rank else weights


def static_bytes(model: ModelDescription, rank: int) -> int:
    """Return what weights, gradients and optimizer take on one GPU of a pipeline rank."""
    weights = weights_of(model, rank)
    per_parameter = model.static_bytes_per_parameter
    if per_parameter is None and model.optimizer is None and not model.lora_rank:
        per_parameter = _STATIC_BYTES
    if per_parameter is not None:
        return int(weights.number * per_parameter)
    gradient = _DTYPE_BYTES[model.main_grads_dtype]
    state = _DTYPE_BYTES[model.main_params_dtype]
    state += 0 if model.optimizer == "sgd" else 2 * _DTYPE_BYTES[model.exp_avg_dtype]
    stage, shares = _sharding_stage(model), _num_replicas(model)
    trained = _trained(model, weights)

    def taken(each: Weights, num_bytes: int, least_stage: int) -> float:
        divided = zip(each[:3], shares, strict=True)
        return sum(n * num_bytes / (k if stage >= least_stage else 1) for n, k in divided)

    most = max(one.number for one in _layers(model, rank))
    gathered = (2 * VALUE_BYTES if stage == 3 else 0) + (gradient if stage >= 2 else 0)
    num_bytes = taken(weights, VALUE_BYTES, 3) + taken(trained, gradient, 2)
    return int(num_bytes + taken(trained, state, 1) + most * gathered)


def replicas_us(
    model: ModelDescription, machine: Machine, rank: int, stages: Sequence[StageWork]
) -> float:
    """Return by how much messages of replicas draw out the step of a pipeline rank.

    With ``overlap_grad_reduce`` gradients are summed behind one backward of its stages, and weights
    gathered behind one forward; in each microbatch where they are shared besides the optimizer.
    """
    weights, stage = weights_of(model, rank), _sharding_stage(model)
    trained = _trained(model, weights)
    strides = model.tensor_parallel, model.expert_parallel, model.tensor_parallel

    def sent_us(sizes: Weights, num_bytes: int) -> float:
        kinds = zip(_num_replicas(model), strides, sizes[:3], strict=True)
        return sum(machine.ring_us(n, stride, size * num_bytes / n) for n, stride, size in kinds)

    gradients_us = sent_us(trained, _DTYPE_BYTES[model.main_grads_dtype])
    gathered_us = sent_us(weights if stage == 3 else trained, VALUE_BYTES)
    if stage == 0:  # each has all sums, and so all weights
        gradients_us, gathered_us = 2 * gradients_us, 0.0
    elif stage == 3:  # backward gathers weights, too
        gradients_us += gathered_us
    own = stages[rank :: model.pipeline_parallel] if model.overlap_grad_reduce else ()
    groups = [group for one in own for group in one.groups]
    summed_us = max(0.0, gradients_us - sum(group.backward_us for group in groups))
    gathered_us = max(0.0, gathered_us - sum(group.forward_us for group in groups))
    per_summed, per_gathered = (model.num_microbatches if stage >= n else 1 for n in (2, 3))
    return per_summed * summed_us + per_gathered * gathered_us
