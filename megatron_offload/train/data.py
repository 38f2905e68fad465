"""Tokens for training: bytes of text; and digests of what training makes of them.

A microbatch depends on (seed, step, microbatch) and on nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pydoc_data
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from megatron_offload.memory.checksum import checksum
from megatron_offload.train.config import TrainConfig


def microbatches(
    config: TrainConfig, step: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield one step's microbatches, cut out of a text.

    Each holds ``tokens`` and ``labels`` of shape [micro_batch_size, sequence_length] and
    ``position_ids`` of the same shape, int64, on ``device``.
    """
    text, length = _text_of_python(), config.model.sequence_length
    for index in range(config.data.microbatches):
        # The zeros keep the tokens of a seed what they were in every run that was measured.
        random = np.random.default_rng([config.run.seed, 0, step, index, 0])
        starts = random.integers(0, len(text) - length, config.data.micro_batch_size)
        pieces = np.stack([text[start : start + length + 1] for start in starts])
        rows = torch.from_numpy(pieces.astype(np.int64)).to(device)
        yield {
            "tokens": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "position_ids": torch.arange(length, device=device).expand(len(starts), -1),
        }


@functools.cache
def _text_of_python() -> np.ndarray:
    """Return 4 MiB of what every Python brings: help topics, the standard library's sources."""
    paths = [Path(pydoc_data.__path__[0]) / "topics.py"]
    paths += sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in paths if path.is_file())
    return np.frombuffer(text[: 4 * 1024**2], dtype=np.uint8)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of 128 bits of the bytes, dtypes and shapes of ``tensors``, in their order.

    It is taken where they lie. No single change of a tensor can cancel. It finds accidents, not
    intent.
    """
    state = hashlib.blake2b(digest_size=16)
    sums = []
    for tensor in tensors:
        state.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        sums.append(checksum(tensor.detach().contiguous().reshape(-1).view(torch.uint8)))
    for number in sums:  # only now does the host wait
        state.update(int(number).to_bytes(8, "little", signed=True))
    return state.hexdigest()
