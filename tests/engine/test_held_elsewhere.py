"""What something else keeps on the device isn't reloaded, nor copied in the next step."""

from __future__ import annotations

import pytest
import torch
from programs import KIB, TIMINGS, assert_nothing_left, make_manager
from programs import save_in_group as offload

from megatron_offload.errors import InPlaceModificationError


def step(manager, *, holder=None, change=None):
    """Save one tensor; something else may hold it until after backward, as schedules do."""
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
    return manager.last_step.by_name["group"]


@pytest.mark.parametrize("timing", TIMINGS)
def test_it_is_copied_once_to_find_out_and_then_no_more(timing):
    manager = make_manager(timing)
    first = step(manager, holder=[])
    assert (first.offloaded_bytes, first.reloaded_bytes) == (4 * KIB, 0)
    for _ in range(2):
        later = step(manager, holder=[])
        assert (later.offloaded_bytes, later.reloaded_bytes) == (0, 0)
        assert manager.last_step.externally_referenced_bytes >= 4 * KIB


def test_it_moves_again_when_no_one_else_keeps_it_any_more():
    manager = make_manager()
    for _ in range(2):
        step(manager, holder=[])
    step(manager)  # stays once more, and is seen to have no other owner
    again = step(manager)
    assert (again.offloaded_bytes, again.reloaded_bytes) == (4 * KIB, 4 * KIB)


def test_it_moves_where_the_other_owner_lets_go_before_backward():
    manager = make_manager()
    for _ in range(3):
        moved = step(manager, holder=[], change=list.clear)
        assert (moved.offloaded_bytes, moved.reloaded_bytes) == (4 * KIB, 4 * KIB)


def test_the_other_owner_may_not_change_it():
    manager = make_manager()

    def change(holder):
        holder[0].add_(1)

    for _ in range(2):
        with pytest.raises(InPlaceModificationError):
            step(manager, holder=[], change=change)
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
        moved = step(manager, holder=[], change=change)
        assert (moved.offloaded_bytes, moved.reloaded_bytes) == (4 * KIB, 4 * KIB)


def test_another_program_is_learned_anew():
    manager = make_manager()
    step(manager, holder=[])
    manager.begin_chunk()
    held = torch.randn(1024)  # under the same key, so what is known of it is kept true
    offload(manager, [held], [], "another").backward()
    manager.reset()
    assert step(manager).offloaded_bytes == 4 * KIB


def test_a_group_is_held_while_something_of_it_is_needed():
    manager = make_manager()
    chunk = manager.begin_chunk()
    group = manager.start_group(chunk, "g")
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
