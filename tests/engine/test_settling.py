"""What is read, emptied or complete before its group's end, and what something else keeps.

The latter isn't reloaded, nor copied in the next step.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from programs import (
    KIB,
    TIMINGS,
    assert_nothing_left,
    assert_same,
    in_group,
    make_manager,
    open_group,
)
from programs import save_in_group as offload

from megatron_offload.engine.block_state import MOVES, BlockState
from megatron_offload.engine.group import Block
from megatron_offload.errors import InPlaceModificationError, StateError


def saved(is_leaf):
    x = torch.arange(1024.0, requires_grad=not is_leaf)
    return x if is_leaf else x * 1.0


@pytest.mark.parametrize("is_leaf", [True, False])
def test_what_is_read_before_the_groups_end_is_not_emptied(is_leaf):
    manager, chunk, group = open_group()
    record = chunk.pack(group, saved(is_leaf))
    before = record.unpack()
    assert group.blocks() == [record.block]
    manager.commit(group)
    manager.join_offloads()
    assert record.block.released
    assert torch.equal(before, torch.arange(1024.0))
    assert torch.equal(record.unpack(), before)


def test_what_was_emptied_before_the_groups_end_is_kept():
    # As recompute does: the storage of a view is emptied, and filled again before backward.
    manager = make_manager(begins_chunk=True)
    x, other, third = torch.randn(16, 32, requires_grad=True), torch.randn(32, 16), torch.randn(32)
    expected = torch.autograd.grad((x * other.t() * third).sum(), x)
    values = other.clone()

    def run(x):
        y = x * other.t()
        other.untyped_storage().resize_(0)
        return y * third

    y = in_group(manager, run, x)
    manager.join_offloads()
    assert manager.transfers.stats.offloaded_bytes == third.nbytes
    other.untyped_storage().resize_(values.nbytes)
    other.untyped_storage().copy_(values.untyped_storage())
    assert_same(expected, torch.autograd.grad(y.sum(), x))


# What something else keeps.


def step(manager, *, holder=None, change=None):
    """Save one tensor; something else may hold it until after backward, as schedules do.

    Returns the bytes that were offloaded of it, and those that were reloaded.
    """
    seen = []
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, generator=generator)
    expected = x.clone()
    manager.begin_chunk()
    loss = offload(manager, [x], seen)
    if holder is not None:
        holder.append(x)
    del x
    loss = loss + offload(manager, [torch.randn(1024)], [], "filler")
    if change is not None:
        change(holder)
    loss.sum().backward()
    del loss
    assert torch.equal(seen[0][0], expected)
    seen.clear()
    if holder is not None:
        holder.clear()
    manager.reset()
    assert_nothing_left(manager)
    group = manager.last_step.by_name["group"]
    return group.offloaded_bytes, group.reloaded_bytes


@pytest.mark.parametrize("timing", TIMINGS)
def test_it_is_copied_once_to_find_out_and_then_no_more_while_it_has_another_owner(timing):
    manager = make_manager(timing)
    assert step(manager, holder=[]) == (4 * KIB, 0)
    for _ in range(2):
        assert step(manager, holder=[]) == (0, 0)
        assert manager.last_step.externally_referenced_bytes >= 4 * KIB
    step(manager)  # is kept once more, and is seen to have no other owner
    assert step(manager) == (4 * KIB, 4 * KIB)


def test_it_moves_where_the_other_owner_lets_go_before_backward():
    manager = make_manager()
    for _ in range(3):
        assert step(manager, holder=[], change=list.clear) == (4 * KIB, 4 * KIB)


def test_the_other_owner_may_not_change_it():
    manager = make_manager()
    for _ in range(2):
        with pytest.raises(InPlaceModificationError):
            step(manager, holder=[], change=lambda holder: holder[0].add_(1))
        manager.abort()
        assert_nothing_left(manager)
        step(manager, holder=[])


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_a_source_that_was_emptied_comes_from_the_host(num_bytes):
    manager = make_manager()

    def change(holder):
        holder[0].untyped_storage().resize_(0)
        holder[0].untyped_storage().resize_(num_bytes)

    for _ in range(2):
        assert step(manager, holder=[], change=change) == (4 * KIB, 4 * KIB)


def test_a_block_makes_only_the_moves_of_its_table():
    for here, there in set(product(BlockState, repeat=2)) - set(MOVES):
        with pytest.raises(
            StateError, match=f"a block can't move from {here.name} to {there.name}"
        ):
            MOVES[here, there]


def test_a_reload_that_is_being_issued_is_not_read_without_the_lock(monkeypatch):
    manager, chunk, group = open_group()
    manager.backend.observes = False  # then a reader only looks
    take, record = Block.take_region, chunk.pack(group, torch.randn(512))

    def take_while_read(block):
        region = take(block)
        with pytest.raises(StateError, match="inside a call"):  # in another thread it waits
            record.unpack()
        return region

    manager.commit(group)
    manager.join_offloads()
    monkeypatch.setattr(Block, "take_region", take_while_read)
    manager.enter_backward(group)


def test_what_is_released_while_a_reader_asks_to_keep_it_is_reloaded(monkeypatch):
    manager, chunk, group = open_group(max_inflight_bytes=4 * KIB)
    record, keep = chunk.pack(group, torch.ones(512)), manager.transfers.keep_source
    manager.commit(group)

    def keep_too_late(block):
        manager.join_offloads()  # another thread
        keep(block)

    monkeypatch.setattr(manager.transfers, "keep_source", keep_too_late)
    assert torch.equal(record.unpack(), torch.ones(512))


def test_another_program_is_learned_anew():
    manager = make_manager()
    step(manager, holder=[])
    manager.begin_chunk()
    held = torch.randn(1024)  # under the same key, so what is known of it is kept true
    offload(manager, [held], [], "another").backward()
    manager.reset()
    assert step(manager)[0] == 4 * KIB


def test_a_group_is_held_while_something_of_it_is_needed():
    manager, chunk, group = open_group()
    records = [chunk.pack(group, torch.randn(size)) for size in (256, 512)]
    group.num_bytes = 3 * KIB
    records.pop()
    group.hold()
    assert manager.budget.held_bytes == 3 * KIB
    group.let_go()
    records.pop()
    assert group.is_spent
    group.hold()
    assert manager.budget.held_bytes == 0
