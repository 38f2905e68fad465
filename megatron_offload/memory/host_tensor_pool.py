"""The documented pool of host tensors by shape, over the pool that the engine itself uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from megatron_offload.backends.base import Backend
from megatron_offload.core.units import format_bytes
from megatron_offload.memory.host_pool import HostPool, HostRegion
from megatron_offload.memory.tensor_pool import GPUTensorPool, PoolKey


class HostTensorPool(GPUTensorPool):
    """Lends host tensors out of a `HostPool`; its status counts all that is lent there.

    What is freed, here or by the engine, is one memory: the next of either may have it. So nothing
    is kept by shape, and ``free_count`` is 0. `allocate` blocks the host until the last copy out
    of the same bytes is over.

    Args:
        host_pool: where the memory is.
        backend: whose copies those are.
    """

    def __init__(self, host_pool: HostPool, backend: Backend) -> None:
        super().__init__("cpu", pin_memory=backend.name == "cuda")
        self.host_pool = host_pool
        self._backend = backend
        self._regions: dict[int, HostRegion] = {}

    def clear(self) -> None:
        """Take back all that this pool has lent, as `reset`; the engine's stays lent."""
        self.reset()

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = self._calculate_memory_size(shape, dtype)
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
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

    def _num_lent(self) -> Mapping[PoolKey, int]:
        lent = (tensor for region in self.host_pool.regions() for tensor in region.views)
        counts = Counter(self._get_pool_key(tensor.shape, tensor.dtype) for tensor in lent)
        return dict.fromkeys(self._lent, 0) | counts
