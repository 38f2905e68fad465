"""A microbatch depends on (seed, step, microbatch) and on nothing else.

The digest of tensors is the same for the same bits, and another for any other.
"""

import torch

from megatron_offload.train.config import TrainConfig
from megatron_offload.train.data import digest, microbatches


def config(seed=1):
    data = {"micro_batch_size": 2, "microbatches": 3}
    model, run = {"sequence_length": 16}, {"seed": seed}
    return TrainConfig.model_validate({"model": model, "data": data, "run": run})


def test_the_same_microbatch_is_the_same_tokens_in_any_order():
    def tokens(config, step):
        batches = microbatches(config, step, torch.device("cpu"))
        return [batch["tokens"].numpy().tobytes() for batch in batches]

    first = {step: tokens(config(), step) for step in (1, 2, 3)}
    assert all(tokens(config(), step) == first[step] for step in (3, 2, 1))
    assert len({batch for batches in first.values() for batch in batches}) == 9
    assert tokens(config(2), 1) != first[1]


def test_labels_are_the_tokens_one_place_on():
    batches = list(microbatches(config(), 1, torch.device("cpu")))
    assert len(batches) == 3
    for batch in batches:
        assert batch["tokens"].shape == batch["labels"].shape == (2, 16)
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert torch.equal(batch["position_ids"][1], torch.arange(16))


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
