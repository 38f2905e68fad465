"""A digest of tensors that is taken where they lie: no gigabyte crosses to the host."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from megatron_offload.engine.checking import checksum


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of 128 bits of the bytes, dtypes and shapes of ``tensors``, in their order.

    No single change of a tensor can cancel. It tells accidents, not intent.
    """
    state = hashlib.blake2b(digest_size=16)
    sums = []
    for tensor in tensors:
        state.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        sums.append(checksum(tensor.detach().contiguous().reshape(-1).view(torch.uint8)))
    for number in sums:  # only now does the host wait
        state.update(int(number).to_bytes(8, "little", signed=True))
    return state.hexdigest()
