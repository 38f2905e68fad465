"""A digest of tensors that is taken where they lie: no gigabyte crosses to the host."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch

_PIECE_WORDS = 1 << 22
"""Words of 64 bits that are weighed at a time; bounds the memory that a digest takes."""


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of 128 bits of the bytes, dtypes and shapes of ``tensors``, in their order.

    Every word of 64 bits counts with an odd weight of its own, so that no single change can cancel;
    integers wrap, so the order of the sum doesn't matter. It tells accidents, not intent.
    """
    state = hashlib.blake2b(digest_size=16)
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        state.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        weights = _weights(tensor.device)
        pieces = _words(tensor).split(_PIECE_WORDS)
        sums += [(piece * weights[: piece.numel()]).sum() for piece in pieces]
    for number in sums:
        state.update(int(number).to_bytes(8, "little", signed=True))
    return state.hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as int64, filled up with zeros."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """Return an odd number for each place in a piece, without a pattern."""
    mixed = torch.arange(_PIECE_WORDS, dtype=torch.int64, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed ^ (mixed >> 32) | 1
