"""A microbatch depends on (seed, step, microbatch, data-parallel rank) and on nothing else.

The digest of tensors is the same for the same bits, and another for any other.
"""

import itertools

import pytest
import torch

from megatron_offload.errors import ConfigError
from megatron_offload.train.config import TrainConfig
from megatron_offload.train.data import TextSource, digest

TEXT = bytes(range(256)) * 8


@pytest.fixture
def source(tmp_path):
    """Return what makes a source of some text."""

    def make(seed=1, text=TEXT, micro_batch_size=2, sequence_length=16):
        (tmp_path / "text").write_bytes(text)
        return TextSource(
            TrainConfig.model_validate(
                {
                    "model": {"sequence_length": sequence_length},
                    "data": {"text": [tmp_path / "text"], "micro_batch_size": micro_batch_size},
                    "run": {"seed": seed},
                }
            )
        )

    return make


def test_the_same_microbatch_is_the_same_tokens_in_any_order(source):
    keys = list(itertools.product((1, 2), (0, 1), (0, 1)))
    forwards, backwards = source(), source()
    first = {key: forwards.tokens(*key) for key in keys}
    for key in reversed(keys):
        assert torch.equal(backwards.tokens(*key), first[key])
    different = {tensor.numpy().tobytes() for tensor in first.values()}
    assert len(different) == len(keys)
    assert not torch.equal(source(2).tokens(*keys[0]), first[keys[0]])


def test_labels_are_the_tokens_one_place_on(source):
    batches = list(source().microbatches(1, 3, 0, torch.device("cpu")))
    assert len(batches) == 3
    for batch in batches:
        assert batch["tokens"].shape == batch["labels"].shape == (2, 16)
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert torch.equal(batch["position_ids"][1], torch.arange(16))


def test_text_of_exactly_one_sequence_is_enough(source):
    exact = source(text=b"abcde", micro_batch_size=1, sequence_length=4)
    assert exact.tokens(1, 0, 0).tolist() == [list(b"abcde")]
    with pytest.raises(ConfigError, match="fewer than the 6"):
        source(text=b"abcde", sequence_length=5)


def test_text_files_are_read_in_their_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).write_text(name * 4)
    config = TrainConfig.model_validate(
        {"model": {"sequence_length": 8}, "data": {"text": [tmp_path / "b", tmp_path / "a"]}}
    )
    assert TextSource(config).tokens(1, 0, 0).tolist() == [list(b"bbbb\naaaa")]


def test_order_shape_dtype_and_cut_count():
    a, b = torch.arange(100.0), torch.arange(100.0, 200.0)
    found = {
        digest([a, b]),
        digest([b, a]),
        digest([torch.cat([a, b])]),
        digest([a.view(10, 10), b]),
        digest([a.view(torch.int32), b]),
        digest([a]),
        digest([]),
        digest([torch.zeros(3)]),
        digest([-torch.zeros(3)]),
        digest([torch.zeros(4)]),
    }
    assert len(found) == 10


def test_views_are_digested_as_what_they_show():
    base = torch.arange(1000, dtype=torch.uint8)
    assert digest([base[3:803]]) == digest([base[3:803].clone()])
    square = torch.arange(64.0).view(8, 8)
    assert digest([square.t()]) == digest([square.t().contiguous()])
    assert digest([square.t()]) != digest([square])
