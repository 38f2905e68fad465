"""The documented pools of tensors by shape; for one thread each."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_offload.backends.base import Backend
from megatron_offload.core.units import format_bytes
from megatron_offload.memory.host_pool import HostPool, HostRegion


class GPUTensorPool:
    """The documented pool of tensors by shape and dtype, for user code and Megatron's call sites.

    Args:
        device: where tensors are made.
        pin_memory: make page-locked CPU tensors.

    Free tensors are kept until `clear`. Reuse is ordered by the stream that allocates and frees.
    """

    def __init__(self, device: str | torch.device = "cuda", pin_memory: bool = False) -> None:
        self.device = torch.device(device)
        self.pin_memory = pin_memory
        self._free: defaultdict[PoolKey, deque[torch.Tensor]] = defaultdict(deque)
        # Allocated tensors by identity, for each key that was ever asked for.
        self._allocated: dict[PoolKey, dict[int, torch.Tensor]] = {}
        counters = "allocation_requests", "free_requests", "pool_hits", "pool_misses"
        self._stats = dict.fromkeys(("total_allocated", *counters), 0)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of ``shape``, a free one if there is any; its content is undefined."""
        key = tuple(shape), dtype
        self._stats["allocation_requests"] += 1
        if self._free[key]:
            tensor = self._free[key].popleft()
            self._stats["pool_hits"] += 1
        else:
            tensor = self._make(*key)
            self._stats["pool_misses"] += 1
            self._stats["total_allocated"] += 1
        self._allocated.setdefault(key, {})[id(tensor)] = tensor
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Take a tensor back for reuse; a stranger, or a second free, is a `ValueError`."""
        key = tuple(tensor.shape), tensor.dtype
        self._stats["free_requests"] += 1
        if self._allocated.get(key, {}).pop(id(tensor), None) is None:
            raise ValueError(
                f"this tensor of shape {key[0]} and dtype {tensor.dtype} doesn't belong to this "
                f"pool, or was freed before; allocated were {sorted(map(str, self._allocated))}"
            )
        self._keep(key, tensor)

    def get_pool_status(
        self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Describe one shape and dtype, or everything.

        Returns:
            With a shape: ``shape``, ``dtype``, ``total_count``, ``allocated_count``,
            ``free_count`` and ``utilization`` in percent. Without: ``global_stats``, the counters,
            and ``pools``, the former for each (shape, dtype).

        Raises:
            ValueError: a shape without a dtype, or one that was never asked for.
        """
        allocated = self._num_allocated()
        if shape is None:
            return {
                "global_stats": {**self._stats, "current_in_use": sum(allocated.values())},
                "pools": {key: self.get_pool_status(*key) for key in allocated},
            }
        if dtype is None:
            raise ValueError("a shape needs its dtype: get_pool_status(shape, dtype)")
        key = tuple(shape), dtype
        if key not in allocated:
            raise ValueError(f"no pool exists for shape {key[0]} and dtype {dtype}")
        num_allocated, num_free = allocated[key], len(self._free[key])
        total = num_allocated + num_free
        return {
            "shape": key[0],
            "dtype": dtype,
            "total_count": total,
            "allocated_count": num_allocated,
            "free_count": num_free,
            "utilization": 100 * num_allocated / total if total else 0,
        }

    def reset(self) -> None:
        """Mark all tensors as free, those still out too.

        An owner of one of them shares its memory with its next user from here on, and freeing
        it is a second free (ValueError). Past counters remain.
        """
        for key, allocated in self._allocated.items():
            for tensor in allocated.values():
                self._keep(key, tensor)
            allocated.clear()

    def clear(self) -> None:
        """Forget everything: free memory goes back to the allocator at once.

        Tensors still out live as long as someone holds them, and are strangers here afterwards.
        """
        self._free.clear()
        self._allocated.clear()

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device, pin_memory=self.pin_memory)

    def _keep(self, key: PoolKey, tensor: torch.Tensor) -> None:
        self._free[key].append(tensor)

    def _num_allocated(self) -> Mapping[PoolKey, int]:
        return {key: len(allocated) for key, allocated in self._allocated.items()}


class HostTensorPool(GPUTensorPool):
    """Allocates host tensors out of the engine's `HostPool`; its status counts all of that.

    Nothing is kept by shape, so ``free_count`` is 0. `allocate` blocks the host until the last copy
    out of the same bytes is over.
    """

    def __init__(self, host_pool: HostPool, backend: Backend) -> None:
        super().__init__("cpu", pin_memory=backend.name == "cuda")
        self.host_pool = host_pool
        self._backend = backend
        self._regions: dict[int, HostRegion] = {}

    clear = GPUTensorPool.reset
    """Frees all that this pool has allocated; the engine's is still allocated."""

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        region = self.host_pool.allocate(num_bytes, like=(torch.Size(shape), dtype))
        if region is None:
            raise RuntimeError(
                f"the host pool has no {format_bytes(num_bytes)} left of "
                f"{format_bytes(self.host_pool.cap_bytes)} (raise host_memory_bytes)"
            )
        if region.ready_event is not None and not self._backend.is_done(region.ready_event):
            self._backend.sync_copies()
        self._regions[id(region.tensor)] = region
        return region.tensor

    def _keep(self, key: PoolKey, tensor: torch.Tensor) -> None:
        region = self._regions.pop(id(tensor), None)
        if region is not None:
            self.host_pool.free(region, self._backend.record(self._backend.h2d_stream))

    def _num_allocated(self) -> Mapping[PoolKey, int]:
        allocated = (tensor for region in self.host_pool.regions() for tensor in region.views)
        counts = Counter((tuple(tensor.shape), tensor.dtype) for tensor in allocated)
        return dict.fromkeys(self._allocated, 0) | counts


OffloadTensorPool = GPUTensorPool
"""The name in Megatron-core 0.19."""

PoolKey = tuple[tuple[int, ...], torch.dtype]
