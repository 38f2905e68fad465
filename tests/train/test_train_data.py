"""A microbatch depends on (seed, step, microbatch, data-parallel rank) and on nothing else."""

import itertools

import pytest
import torch

from megatron_offload.errors import ConfigError
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.data import (
    EVALUATION,
    TRAINING,
    ByteSource,
    IndexedSource,
    build_source,
    microbatches,
)

TEXT = bytes(range(256)) * 8


def source(seed=1):
    return ByteSource(TEXT, seed, micro_batch_size=2, sequence_length=16)


def test_the_same_microbatch_is_the_same_tokens_in_any_order():
    keys = list(itertools.product((TRAINING, EVALUATION), (1, 2), (0, 1), (0, 1)))
    forwards, backwards = source(), source()
    first = {key: forwards.tokens(*key) for key in keys}
    for key in reversed(keys):
        assert torch.equal(backwards.tokens(*key), first[key])
    different = {tensor.numpy().tobytes() for tensor in first.values()}
    assert len(different) == len(keys)
    assert not torch.equal(source(2).tokens(*keys[0]), first[keys[0]])


def test_labels_are_the_tokens_one_place_on():
    batches = list(microbatches(source(), TRAINING, 1, 3, 0, torch.device("cpu")))
    assert len(batches) == 3
    for batch in batches:
        assert batch["tokens"].shape == batch["labels"].shape == (2, 16)
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert torch.equal(batch["position_ids"][1], torch.arange(16))


def test_text_of_exactly_one_sequence_is_enough():
    exact = ByteSource(b"abcde", 1, micro_batch_size=1, sequence_length=4)
    assert exact.tokens(TRAINING, 1, 0, 0).tolist() == [list(b"abcde")]
    with pytest.raises(ConfigError, match="fewer than the 6"):
        ByteSource(b"abcde", 1, micro_batch_size=1, sequence_length=5)


def test_text_files_are_read_in_their_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).write_text(name * 4)
    config = TrainConfig.model_validate(
        {"model": {"sequence_length": 8}, "data": {"text": [tmp_path / "b", tmp_path / "a"]}}
    )
    assert build_source(config, 1).tokens(TRAINING, 1, 0, 0).tolist() == [list(b"bbbb\naaaa")]


def test_indexed_samples_are_shared_out_without_overlap():
    class Samples(list):
        def __getitem__(self, index):
            values = torch.arange(4) + 10 * index
            return {"tokens": values, "labels": values + 1}

    config = TrainConfig.model_validate(
        {"data": {"indexed": "x", "micro_batch_size": 2, "microbatches": 2}, "run": {"steps": 2}}
    )
    indexed = IndexedSource(Samples(range(100)), config, 2)
    seen = [
        int(row[0]) // 10
        for kind, step, microbatch, rank in itertools.product((0, 1), (1, 2), (0, 1), (0, 1))
        for row in indexed.tokens(kind, step, microbatch, rank)
    ]
    assert seen == list(range(32))
    assert indexed.tokens(0, 1, 0, 0)[0].tolist() == [0, 1, 2, 3, 4]


def test_the_digest_is_of_the_text_and_not_of_how_it_is_cut():
    assert source(1).digest() == source(2).digest()
    assert ByteSource(TEXT[:-1], 1, 2, 16).digest() != source().digest()


def test_the_digest_of_indexed_data_is_of_the_index_and_the_size(tmp_path):
    for name, index, size in (("a", b"x", 3), ("b", b"x", 3), ("c", b"y", 3), ("d", b"x", 4)):
        (tmp_path / f"{name}.idx").write_bytes(index)
        (tmp_path / f"{name}.bin").write_bytes(bytes(size))
    paths = [tmp_path / name for name in "abcd"]
    configs = [TrainConfig.model_validate({"data": {"indexed": path}}) for path in paths]
    a, b, c, d = (IndexedSource([], config, 1).digest() for config in configs)
    assert a == b
    assert len({a, c, d}) == 3
