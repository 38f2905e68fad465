"""What helps where the memory of a described job is that of its weights, and no activation's."""

from __future__ import annotations

from itertools import product
from math import gcd, prod

from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.planning.model import VALUE_BYTES, ModelDescription
from megatron_offload.planning.parameters import static_bytes, weights_of

_MOST_SHARE = 0.8  # of a GPU's memory, that weights, gradients and optimizer may take
_MOST_GPUS = 2**14


def advice(model: ModelDescription, device_bytes: int, gpus_per_node: int, first: str = "") -> str:
    """Return what to change so that a job may fit that doesn't.

    ``first`` is what to try before, unless weights, gradients and optimizer are too large.
    """
    least = max(static_bytes(model, rank) for rank in range(model.pipeline_parallel))
    if least <= _MOST_SHARE * device_bytes:
        return (
            f"{first}lower model.microbatch or model.sequence, or raise model.tensor_parallel or "
            "model.context_parallel"
        )
    flags = _shared(model, device_bytes, gpus_per_node)
    return (
        f"{format_bytes(least)} are weights, gradients and optimizer, which no offload of "
        f"activations frees: let GPUs share them{flags and f', by at least {flags}'}"
    )


def _shared(model: ModelDescription, device_bytes: int, gpus_per_node: int) -> str:
    """Return the flags of a layout on the fewest GPUs in which they leave room; "" for none."""
    room = _MOST_SHARE * device_bytes
    doubled = [2**power for power in range(15)]
    tensor = [n for n in doubled if model.tensor_parallel <= n <= gpus_per_node]
    first = model.pipeline_parallel
    stages = [n for n in range(first, model.layers + 1) if n == first or model.layers % n == 0]
    strategy = model.data_parallel_sharding_strategy
    ways = ["optim" if strategy == "no_shard" else strategy]
    ways += ["optim_grads_params"] if first == 1 else []
    num_weights = sum(weights_of(model, x).number for x in range(first)) * model.tensor_parallel
    least = num_weights * VALUE_BYTES / room  # GPUs, were all shared by all
    least = max(least, first * model.data_parallel * model.tensor_parallel)  # those that it has
    order = sorted(product(ways, stages, tensor, doubled), key=lambda one: prod(one[1:]))
    for way, num_stages, num_tensor, data in order:
        sizes = num_stages, data, num_tensor
        num_gpus = prod(sizes) * model.context_parallel
        if not least * model.context_parallel <= num_gpus <= _MOST_GPUS:
            continue
        keys = "pipeline_parallel", "data_parallel", "tensor_parallel"
        changes: dict[str, object] = dict(zip(keys, sizes, strict=True))
        if model.experts:
            shared = gcd(model.experts, data * model.context_parallel)
            changes["expert_parallel"] = max(model.expert_parallel, shared)
        if data > 1:
            changes["data_parallel_sharding_strategy"] = way
        try:
            other = ModelDescription(**model.model_dump() | changes)
        except ConfigError:
            continue
        if max(static_bytes(other, rank) for rank in range(sizes[0])) <= room:
            new = {key: x for key, x in changes.items() if x != getattr(model, key)}
            return " ".join(f"--model.{key} {x}" for key, x in new.items()) + f" ({num_gpus} GPUs)"
    return ""
