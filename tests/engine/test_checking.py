"""Checking mode stops at the first bit that was reloaded wrong, says where, and names what
leaks."""

from __future__ import annotations

import itertools
import logging
import re

import pytest
import torch
from programs import (
    KIB,
    check_steps,
    forward,
    in_group,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)

from megatron_offload.errors import CorruptionError
from megatron_offload.memory.checksum import checksum

ORDER = one_forward_one_backward(3, depth=2)


def flip_a_bit(monkeypatch, backend, direction, position, number):
    """Let the copy of this number in a direction flip a bit of the byte at a position."""
    copy, numbers = backend.copy, itertools.count(1)

    def copy_badly(pairs, stream, label):
        event = copy(pairs, stream, label)
        if stream is getattr(backend, direction) and next(numbers) == number:
            pairs[0][0].view(-1).view(torch.uint8)[position] ^= 1
        return event

    monkeypatch.setattr(backend, "copy", copy_badly)


@pytest.mark.parametrize("direction", ["d2h_stream", "h2d_stream"])
@pytest.mark.parametrize("position", [0, 4, -1])
def test_one_flipped_bit_stops_the_step_and_is_named(monkeypatch, direction, position):
    model, manager = make_model(), make_manager("eager", checking=True)
    flip_a_bit(monkeypatch, manager.backend, direction, position, number=5)
    with pytest.raises(CorruptionError) as caught, manager.step():
        run_step(model, manager, ORDER)
    assert re.search(
        r"group (mlp|norm)\[chunk \d, group \d\]: a tensor of shape \[16, \d+\] and dtype "
        r"torch.float32 \(number \d that '(mlp|norm)' saved\) was reloaded .*checksum -?0x",
        str(caught.value),
    )
    monkeypatch.undo()
    check_steps(model, manager, ORDER)


@pytest.mark.parametrize("part", [0, 1])
def test_a_bit_of_any_tensor_that_a_storage_holds_counts(monkeypatch, part):
    manager = make_manager("eager", checking=True, begins_chunk=True)
    flip_a_bit(monkeypatch, manager.backend, "d2h_stream", part * 8192, number=1)

    def run(x):
        base = torch.randn(4096)
        return x * base[:64] * base[2048:2112]

    y = in_group(manager, run, torch.ones(64, requires_grad=True))
    manager.join_offloads()
    with pytest.raises(CorruptionError, match="a region of"):
        y.sum().backward()


def test_what_lies_between_saved_parts_may_change():
    manager = make_manager(checking=True, max_inflight_bytes=4096 * KIB, begins_chunk=True)
    storage = torch.zeros(4096)
    left, right = (torch.randn(64, requires_grad=True) for _ in range(2))
    parts = [storage.detach()[:64], storage.detach()[2048:2112]]
    x = torch.randn(64, requires_grad=True)
    z = in_group(manager, lambda y: left * parts.pop() * y + right * parts.pop() * y, x.clone())
    storage.data[500:600] = 1.0
    del storage, x  # else something keeps it on the device, and nothing is reloaded
    manager.join_offloads()
    z.sum().backward()
    assert manager.transfers.stats.reloaded_bytes > 2048 * 4


def test_a_graph_that_outlives_the_step_is_reported(caplog):
    model, manager = make_model(layers=1), make_manager(checking=True)
    loss = forward(model, manager)
    with caplog.at_level(logging.WARNING):
        manager.reset()
    leaks = manager.last_step.leaks
    assert leaks
    assert all(
        re.fullmatch(r"(mlp|norm)\[chunk 0, group \d\]: .* \(ON_HOST\)", leak) for leak in leaks
    )
    assert leaks[0] in caplog.text
    del loss
    run_step(model, manager, ORDER)
    assert manager.last_step.leaks == ()


def test_without_checking_nothing_is_summed(monkeypatch):
    monkeypatch.setattr("megatron_offload.engine.observer.checksum", None)
    model, manager = make_model(), make_manager()
    run_step(model, manager, ORDER)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("offset", [0, 2, 7])
def test_a_checksum_sees_every_bit_and_every_swap(size, offset):
    generator = torch.Generator().manual_seed(size)
    whole = torch.randint(0, 256, (size + offset,), dtype=torch.uint8, generator=generator)
    region = whole[offset:]
    before = checksum(region)
    for position in range(size):
        for bit in (1, 128):
            region[position] ^= bit
            assert not torch.equal(checksum(region), before)
            region[position] ^= bit
    assert torch.equal(checksum(region), before)
    if size > 1 and region[0] != region[-1]:
        region[0], region[-1] = region[-1].clone(), region[0].clone()
        assert not torch.equal(checksum(region), before)


def test_a_checksum_is_the_same_wherever_chunks_end(monkeypatch):
    region = torch.arange(4096, dtype=torch.int64).view(torch.uint8)
    whole = checksum(region)
    monkeypatch.setattr("megatron_offload.memory.checksum._CHUNK_WORDS", 100)
    assert torch.equal(checksum(region), whole)
