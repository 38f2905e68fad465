"""Tokens for training: text files as bytes, or a megatron-core indexed dataset.

A microbatch depends on (seed, step, microbatch, data-parallel rank) and on nothing else.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pydoc_data
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_offload.errors import ConfigError
from megatron_offload.train.config import TrainConfig

TRAINING, EVALUATION = 0, 1
"""Which stream of microbatches is meant."""

_DEFAULT_TEXT_BYTES = 4 * 1024 * 1024


class ByteSource:
    """Sequences cut out of text at places that a counter-based generator draws."""

    def __init__(self, text: bytes, seed: int, micro_batch_size: int, sequence_length: int) -> None:
        self._text = np.frombuffer(text, dtype=np.uint8)
        self._seed = seed
        self._micro_batch_size = micro_batch_size
        self._length = sequence_length + 1
        if len(self._text) < self._length:
            raise ConfigError(
                f"the text holds {len(self._text)} bytes, fewer than the {self._length} of one "
                f"sequence and its next token; give more text or lower model.sequence_length"
            )

    def tokens(self, kind: int, step: int, microbatch: int, dp_rank: int) -> torch.Tensor:
        """Return int64 tokens of shape [micro_batch_size, sequence_length + 1]."""
        random = np.random.default_rng([self._seed, kind, step, microbatch, dp_rank])
        starts = random.integers(0, len(self._text) - self._length + 1, self._micro_batch_size)
        rows = [self._text[start : start + self._length] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def digest(self) -> str:
        """Return a digest of the text."""
        return hashlib.blake2b(self._text.data, digest_size=16).hexdigest()


class IndexedSource:
    """Samples of megatron-core's GPTDataset, in its own shuffled order.

    Those of evaluations lie behind those of all training steps.
    """

    def __init__(self, dataset: Any, config: TrainConfig, dp_size: int) -> None:
        self._dataset = dataset
        self._prefix = str(config.data.indexed)
        self._micro_batch_size = config.data.micro_batch_size
        self._dp_size = dp_size
        self._per_step = config.sequences_per_step(dp_size)
        self._first = {TRAINING: 0, EVALUATION: config.run.steps * self._per_step}

    def tokens(self, kind: int, step: int, microbatch: int, dp_rank: int) -> torch.Tensor:
        """Return int64 tokens of shape [micro_batch_size, sequence_length + 1]."""
        first = self._first[kind] + (step - 1) * self._per_step
        first += (microbatch * self._dp_size + dp_rank) * self._micro_batch_size
        rows = []
        for index in range(first, first + self._micro_batch_size):
            sample = self._dataset[index % len(self._dataset)]
            # GPTDataset shifts labels against tokens itself; put the row together again.
            rows.append(torch.cat([sample["tokens"], sample["labels"][-1:]]))
        return torch.stack(rows).to(torch.int64)

    def digest(self) -> str:
        """Return a digest of the index and of the size of the tokens, which may be terabytes."""
        with open(f"{self._prefix}.idx", "rb") as file:
            state = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        state.update(str(os.path.getsize(f"{self._prefix}.bin")).encode())
        return state.hexdigest()


TokenSource = ByteSource | IndexedSource


def build_source(config: TrainConfig, dp_size: int) -> TokenSource:
    """Open the data that ``config`` names; collective for indexed data."""
    data, run = config.data, config.run
    if data.indexed is None:
        text = b"\n".join(path.read_bytes() for path in data.text) if data.text else default_text()
        return ByteSource(text, run.seed, data.micro_batch_size, config.model.sequence_length)
    try:
        # Asked for here, on all ranks: the builder imports it on one while the others wait.
        importlib.import_module("megatron.core.datasets.helpers")
    except ImportError as error:
        raise ConfigError(
            f"data.indexed needs megatron-core's compiled dataset helpers, which this installation "
            f"lacks for this Python ({error}); install a wheel made for it, or use data.text"
        ) from error
    from megatron.core.datasets import blended_megatron_dataset_builder as builder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = str(data.indexed)
    stored = IndexedDataset(prefix)
    size = int(stored.sequence_lengths.sum())
    largest = max(int(stored[index].max(initial=0)) for index in range(len(stored)))
    if size < config.model.sequence_length + 1:
        raise ConfigError(
            f"data.indexed {prefix} holds {size} tokens, fewer than the "
            f"{config.model.sequence_length + 1} of one sequence and its next token"
        )
    if largest >= config.model.vocabulary:
        raise ConfigError(
            f"data.indexed {prefix} holds token {largest}, but model.vocabulary is "
            f"{config.model.vocabulary}; set it to {largest + 1} or more"
        )
    wanted = 2 * run.steps * config.sequences_per_step(dp_size)  # half of it for evaluations
    dataset_config = GPTDatasetConfig(
        random_seed=run.seed,
        sequence_length=config.model.sequence_length,
        blend=([prefix], None),
        split="100,0,0",
        path_to_cache=str(run.output / "dataset_cache"),
        tokenizer=SimpleNamespace(
            vocab_size=config.model.vocabulary,
            eod=config.model.vocabulary - 1,
            pad=-1,  # no token is padding, which would be replaced in the data
            unique_identifiers={"class": "tokens", "vocabulary": str(config.model.vocabulary)},
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    built = builder.BlendedMegatronDatasetBuilder(
        GPTDataset, [wanted, None, None], lambda: True, dataset_config
    ).build()
    return IndexedSource(built[0], config, dp_size)


def default_text() -> bytes:
    """Return text that every Python brings: its help topics and the standard library's sources."""
    paths = [Path(pydoc_data.__path__[0]) / "topics.py"]
    paths += sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in paths if path.is_file())
    return text[:_DEFAULT_TEXT_BYTES]


def microbatches(
    source: TokenSource, kind: int, step: int, count: int, dp_rank: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield one step's microbatches.

    Each holds ``tokens`` and ``labels`` of shape [micro_batch_size, sequence_length] and
    ``position_ids`` of the same shape, int64, on ``device``.
    """
    for index in range(count):
        rows = source.tokens(kind, step, index, dp_rank).to(device)
        positions = torch.arange(rows.shape[1] - 1, device=device).expand(rows.shape[0], -1)
        yield {
            "tokens": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "position_ids": positions,
        }
