"""A checksum of memory: the sum of all 64-bit words, each times an odd number, modulo 2^64.

Any change of one word changes it, and so does a swap of two.
"""

from __future__ import annotations

import torch

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 20
"""Words summed at a time: what is allocated for it is small beside a block."""


def checksum(region: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a flat uint8 tensor, an int64 of shape [] on its device."""
    total = torch.zeros((), dtype=torch.int64, device=region.device)
    for first in range(0, -(-region.numel() // _WORD_BYTES), _CHUNK_WORDS):
        piece = region[first * _WORD_BYTES : (first + _CHUNK_WORDS) * _WORD_BYTES]
        if piece.numel() % _WORD_BYTES or piece.storage_offset() % _WORD_BYTES:
            words = total.new_zeros(-(-piece.numel() // _WORD_BYTES))
            words.view(torch.uint8)[: piece.numel()] = piece
        else:
            words = piece.view(torch.int64)
        end = first + words.numel()
        weights = torch.arange(2 * first + 1, 2 * end + 1, 2, device=region.device)
        total += (words * weights).sum()
    return total
