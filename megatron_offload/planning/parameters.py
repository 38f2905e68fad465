"""Weights of a described model on one GPU: memory, with gradients and optimizer, and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias, get_args

from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import StageWork
from megatron_offload.planning.messages import ring_us
from megatron_offload.planning.model import ModelDescription, Sharding

_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer of c10/cuda/CUDACachingAllocator
_WORKSPACE_BYTES = 32 * 2**20
"""Of cuBLAS on a Hopper, where PyTorch has one in each thread that multiplies, forward's and
backward's, and TransformerEngine one besides, with experts one for each of four streams."""
_STATIC_BYTES = 4.0  # of a parameter where no optimizer is described: weight and gradient in bf16


class Weights(NamedTuple):
    """Weights of one GPU, by who else has the same, and those of both that LoRA trains."""

    dense: int = 0
    experts: int = 0
    adapters: int = 0

    def __add__(self, other: tuple[int, ...]) -> Weights:  # type: ignore[override]
        return Weights(*(a + b for a, b in zip(self, other, strict=True)))


_Products: TypeAlias = list[tuple[int, int]]
"""Inputs and outputs of linear layers."""


def _products(model: ModelDescription, *, has_experts: bool) -> tuple[_Products, _Products]:
    """Return those of a layer that tensor parallelism cuts, and whole ones of a GPU's experts."""
    hidden, attention = model.hidden, model.attention

    def mlp(width: int) -> _Products:
        return [(hidden, width * (2 if model.gated_mlp else 1)), (width, hidden)]

    ffn = model.shared_expert_ffn if has_experts else model.ffn
    shared = [*attention.products, (attention.attended, hidden), *mlp(ffn)]
    num_own = model.experts // model.expert_parallel if has_experts else 0
    return shared, num_own * mlp(model.expert_ffn or model.ffn)


def _layer(model: ModelDescription, *, has_experts: bool) -> Weights:
    shared, experts = _products(model, has_experts=has_experts)
    dense = sum(map(prod, shared)) // model.tensor_parallel
    dense += (2 + has_experts * model.experts) * model.hidden
    dense += sum(width for _, width in model.attention.norms)
    adapters = sum(map(sum, shared)) // model.tensor_parallel + sum(map(sum, experts))
    return Weights(dense, sum(map(prod, experts)), model.lora_rank * adapters)


def _kinds(model: ModelDescription, rank: int) -> Iterator[bool]:
    """Yield of each layer of a pipeline rank whether it has experts."""
    for stage in range(rank, len(model.layers_of_stages), model.pipeline_parallel):
        yield from map(model.has_experts, model.layers_of(stage))


def _layers(model: ModelDescription, rank: int) -> Iterator[Weights]:
    for has_experts in _kinds(model, rank):
        yield _layer(model, has_experts=has_experts)
    if rank == model.pipeline_parallel - 1:
        hidden, last = model.hidden, model.has_experts(model.layers - 1)
        for _ in range(model.mtp_num_layers):  # its input is two, each behind a norm
            yield _layer(model, has_experts=last) + Weights(2 * hidden**2 + 3 * hidden)


def unused_bytes(model: ModelDescription, rank: int) -> int:
    """Return what PyTorch's allocator reserves beside weights and gradients.

    Tensors of 1 to 10 MiB lie in segments of 20 MiB, unless an optimizer has them in its buffers.
    """
    if model.optimizer is not None or model.expandable_segments:
        return 0
    unused = 0
    for has_experts in _kinds(model, rank):
        shared, experts = _products(model, has_experts=has_experts)
        sizes = [size // model.tensor_parallel for size in map(prod, shared)]
        for size in (*sizes, *map(prod, experts)):
            num_bytes = size * model.value_bytes
            if 2**20 < num_bytes < _SEGMENT_BYTES / 2:
                unused += _SEGMENT_BYTES // (_SEGMENT_BYTES // num_bytes) - num_bytes
    return unused * (1 if model.lora_rank else 2)


def _weights(model: ModelDescription, rank: int) -> Weights:
    """Return all weights of one GPU of a pipeline rank."""
    is_first, is_last = rank == 0, rank == model.pipeline_parallel - 1
    # With multi-token prediction the last stage has a copy of the embedding.
    num_embeddings = int(is_first or (is_last and model.mtp_num_layers > 0))
    num_embeddings += is_last and not (model.tied_embeddings and num_embeddings)
    ends = num_embeddings * model.vocabulary * model.hidden // model.tensor_parallel
    return sum(_layers(model, rank), Weights(ends + is_last * model.hidden))


def num_parameters(model: ModelDescription, rank: int) -> int:
    """Return the weights of one GPU of a pipeline rank."""
    return sum(_weights(model, rank))


def _sharding_stage(model: ModelDescription) -> int:
    return get_args(Sharding).index(model.data_parallel_sharding_strategy)


def _num_replicas(model: ModelDescription) -> Weights:
    """Return the GPUs that have the same, of each kind of weights, as Megatron counts them."""
    num_dense = model.data_parallel * model.context_parallel
    num_expert = num_dense * model.tensor_parallel // model.expert_parallel
    return Weights(num_dense, num_expert, num_dense)


def _trained(model: ModelDescription, weights: Weights) -> Weights:
    return Weights(adapters=weights.adapters) if model.lora_rank else weights


def static_bytes(model: ModelDescription, rank: int) -> int:
    """Return what weights, gradients and optimizer take on one GPU of a pipeline rank."""
    weights = _weights(model, rank)
    per_parameter = model.static_bytes_per_parameter
    if per_parameter is None and model.optimizer is None and not model.lora_rank:
        per_parameter = _STATIC_BYTES
    if per_parameter is not None:
        return int(sum(weights) * per_parameter)
    gradient = _DTYPE_BYTES[model.main_grads_dtype]
    state = _DTYPE_BYTES[model.main_params_dtype]
    state += 0 if model.optimizer == "sgd" else 2 * _DTYPE_BYTES[model.exp_avg_dtype]
    stage, shares = _sharding_stage(model), _num_replicas(model)
    trained = _trained(model, weights)

    def taken(each: Weights, num_bytes: int, least_stage: int) -> float:
        divided = zip(each, shares, strict=True)
        return sum(n * num_bytes / (k if stage >= least_stage else 1) for n, k in divided)

    most = max(sum(one) for one in _layers(model, rank))
    gathered = (2 * model.value_bytes if stage == 3 else 0) + (gradient if stage >= 2 else 0)
    num_bytes = taken(weights, model.value_bytes, 3) + taken(trained, gradient, 2)
    return int(num_bytes + taken(trained, state, 1) + most * gathered)


def workspace_bytes(model: ModelDescription) -> int:
    """Return what matrix products have for themselves."""
    num_own = 0 if model.eager_kernels else 5 if model.experts else 1
    return (2 + num_own) * _WORKSPACE_BYTES


def replicas_us(
    model: ModelDescription, machine: Machine, rank: int, stages: Sequence[StageWork]
) -> float:
    """Return by how much messages of replicas draw out the step of a pipeline rank.

    With ``overlap_grad_reduce`` gradients are summed behind one backward of its stages, and weights
    gathered behind one forward; in each microbatch where they are shared besides the optimizer.
    """
    weights, stage = _weights(model, rank), _sharding_stage(model)
    trained = _trained(model, weights)
    strides = model.tensor_parallel, model.expert_parallel, model.tensor_parallel

    def sent_us(sizes: Weights, num_bytes: int) -> float:
        kinds = zip(_num_replicas(model), strides, sizes, strict=True)
        return sum(ring_us(machine, n, stride, size * num_bytes / n) for n, stride, size in kinds)

    gradients_us = sent_us(trained, _DTYPE_BYTES[model.main_grads_dtype])
    gathered_us = sent_us(weights if stage == 3 else trained, model.value_bytes)
    if stage == 0:  # each has all sums, and so all weights
        gradients_us, gathered_us = 2 * gradients_us, 0.0
    elif stage == 3:  # backward gathers weights, too
        gradients_us += gathered_us
    groups = [x for one in stages for x in one.groups if model.overlap_grad_reduce]
    summed_us = max(0.0, gradients_us - sum(group.backward_us for group in groups))
    gathered_us = max(0.0, gathered_us - sum(group.forward_us for group in groups))
    per_summed, per_gathered = (model.num_microbatches if stage >= n else 1 for n in (2, 3))
    return per_summed * summed_us + per_gathered * gathered_us
