"""What helps where a described job doesn't fit: nothing is said but what was counted to fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from math import gcd, prod

from megatron_offload.core.row_config import RowConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import ConfigError
from megatron_offload.planning.description import JobDescription
from megatron_offload.planning.job_judge import replayed
from megatron_offload.planning.model import ModelDescription
from megatron_offload.planning.parameters import static_bytes

_MOST_SHARE = 0.8  # of a GPU's memory, that weights, gradients and optimizer may take
_MOST_GPUS = 2**14
_MOST_COUNTED = 8  # layouts whose weights leave room


def advice(described: JobDescription, device_bytes: int) -> str:
    """Return what to change so that a job fits that doesn't; "" where nothing is known."""
    model, layout = described.model, _shared(described, device_bytes)
    least = max(static_bytes(model, rank) for rank in range(model.pipeline_parallel))
    if least > _MOST_SHARE * device_bytes:
        text = f"{format_bytes(least)} are weights, gradients and optimizer, which no offload frees"
        return f"{text}: let GPUs share them, by at least {layout}" if layout else text
    flags = list[str]()
    for key in ("microbatch", "sequence"):
        sizes = (getattr(model, key) >> power for power in range(1, 4))
        some = (size for size in sizes if size and _fits(described, {key: size}, device_bytes))
        flags += [f"--model.{key} {size}" for size in islice(some, 1)]
    return " or ".join([*flags, layout] if layout else flags)


def fits(described: JobDescription, device_bytes: int) -> bool:
    """Whether a job fits where all layers are recomputed or, if they may not be, offloaded."""
    job, settings = described.job(), described.offload
    is_rerun = "layer" in settings.recomputable(("layer", *settings.recompute))
    row = RowConfig(site="layer", recompute=is_rerun, offload=None if is_rerun else "all")
    ranks = (replayed(job, rank, [row], settings) for rank in range(job.schedule.num_ranks))
    return all(rank.peak_reserved_bytes <= device_bytes for rank in ranks)


def _fits(described: JobDescription, changes: Mapping[str, object], device_bytes: int) -> bool:
    """Whether a job would with other values of its model."""
    try:
        model = ModelDescription(**{**described.model.model_dump(), **changes})
        return fits(described.model_copy(update={"model": model}), device_bytes)
    except ConfigError:
        return False


def _shared(described: JobDescription, device_bytes: int) -> str:
    """Return the flags of a layout on the fewest GPUs in which the job fits; "" for none."""
    for changes, num_gpus in islice(_layouts(described, device_bytes), _MOST_COUNTED):
        if changes and _fits(described, changes, device_bytes):
            flags = (f"--model.{key} {value}" for key, value in changes.items())
            return f"{' '.join(flags)} ({num_gpus} GPUs)"
    return ""


def _layouts(
    described: JobDescription, device_bytes: int
) -> Iterator[tuple[dict[str, object], int]]:
    """Yield what differs in layouts with room beside weights, and their GPUs, fewest first."""
    room, model = _MOST_SHARE * device_bytes, described.model
    doubled = [2**power for power in range(15)]
    tensor = [x for x in doubled if model.tensor_parallel <= x <= described.machine.gpus_per_node]
    first = model.pipeline_parallel
    stages = [n for n in range(first, model.layers + 1) if n == first or model.layers % n == 0]
    strategy = model.data_parallel_sharding_strategy
    ways = ["optim" if strategy == "no_shard" else strategy]
    ways += ["optim_grads_params"] if first == 1 else []
    there = first * model.data_parallel * model.tensor_parallel * model.context_parallel
    for way, *sizes in sorted(product(ways, stages, tensor, doubled), key=lambda x: prod(x[1:])):
        num_gpus = prod(sizes) * model.context_parallel
        if not there <= num_gpus <= _MOST_GPUS:
            continue
        keys = "pipeline_parallel", "tensor_parallel", "data_parallel"
        changes: dict[str, object] = dict(zip(keys, sizes, strict=True))
        if model.experts:
            shared = gcd(model.experts, sizes[-1] * model.context_parallel)
            changes["expert_parallel"] = max(model.expert_parallel, shared)
        if sizes[-1] > 1:
            changes["data_parallel_sharding_strategy"] = way
        changes = {key: x for key, x in changes.items() if x != getattr(model, key)}
        try:
            other = ModelDescription(**model.model_dump() | changes)
        except ConfigError:
            continue
        if max(static_bytes(other, rank) for rank in range(other.pipeline_parallel)) <= room:
            yield changes, num_gpus
