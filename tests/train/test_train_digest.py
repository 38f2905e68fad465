"""The digest of tensors: the same for the same bits, another for any other."""

from __future__ import annotations

import pytest
import torch

from megatron_offload.train.data import digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 7, 513])
def test_every_bit_counts(dtype, count):
    generator = torch.Generator().manual_seed(count)
    tensor = torch.randint(0, 255, (count * 4,), generator=generator).to(torch.uint8)
    tensor = tensor[:count].to(dtype)
    before = digest([tensor])
    assert digest([tensor.clone()]) == before
    flat = tensor.view(-1).view(torch.uint8)
    for place in range(0, flat.numel(), max(1, flat.numel() // 50)):
        for bit in (1, 128):
            flat[place] ^= bit
            assert digest([tensor]) != before
            flat[place] ^= bit
    assert digest([tensor]) == before


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


def test_changes_that_cancel_in_a_plain_sum_are_seen():
    a = torch.arange(512, dtype=torch.int64)
    swapped = a.clone()
    swapped[3], swapped[7] = a[7], a[3]
    moved = a.clone()
    moved[100] += 5
    moved[101] -= 5
    assert len({digest([a]), digest([swapped]), digest([moved])}) == 3


def test_views_are_digested_as_what_they_show():
    base = torch.arange(1000, dtype=torch.uint8)
    assert digest([base[3:803]]) == digest([base[3:803].clone()])
    square = torch.arange(64.0).view(8, 8)
    assert digest([square.t()]) == digest([square.t().contiguous()])
    assert digest([square.t()]) != digest([square])
