"""What a tensor's storage says: who owns it, and which of its bytes the tensor lies in."""

from __future__ import annotations

import torch


def num_owners(storage: torch.UntypedStorage) -> int:
    """Count the owners of a storage: tensors, and the Python handle itself."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last, in its storage."""
    span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        span += int((size - 1) * stride)
    return span * tensor.itemsize
