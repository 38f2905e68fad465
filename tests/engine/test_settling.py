"""What a group has saved finds its blocks at the group's end, as it was when it was saved."""

from __future__ import annotations

import pytest
import torch
from programs import KIB, assert_same, in_group, make_manager
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_offload.engine.chunk import READY_MARK


def saved(is_leaf):
    x = torch.arange(1024.0, requires_grad=not is_leaf)
    return x if is_leaf else x * 1.0


@pytest.mark.parametrize("is_leaf", [True, False])
def test_what_is_read_before_the_groups_end_is_not_emptied(is_leaf):
    manager = make_manager()
    chunk = manager.begin_chunk()
    group = manager.start_group(chunk, "g")
    record = chunk.pack(group, saved(is_leaf))
    before = record.unpack()
    assert record.block is None
    assert group.blocks() == [record.block]
    manager.commit(group, must_move=True)
    manager.join_offloads()
    assert record.block.released
    assert torch.equal(before, torch.arange(1024.0))
    assert torch.equal(record.unpack(), before)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_what_is_dropped_before_the_groups_end_is_free_at_once(is_leaf):
    manager = make_manager()
    chunk = manager.begin_chunk()
    group = manager.start_group(chunk, "g")
    tensor = saved(is_leaf)
    storage = StorageWeakRef(tensor.untyped_storage())
    record = chunk.pack(group, tensor)
    del tensor
    assert not storage.expired()
    del record
    assert storage.expired()
    manager.commit(group)
    assert group.num_bytes == 0


def test_what_was_emptied_before_the_groups_end_is_kept():
    # As recompute does: the storage of a view is emptied, and filled again before backward.
    manager = make_manager()
    manager.begin_chunk()
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


def test_each_tensor_belongs_to_the_stream_on_which_it_was_saved():
    manager = make_manager()
    backend = manager.backend
    chunk = manager.begin_chunk()
    group = manager.start_group(chunk, "g")
    records = [chunk.pack(group, torch.randn(KIB))]
    with backend.computing_on(backend.side_stream):
        records += [chunk.pack(group, torch.randn(KIB)) for _ in range(2)]
    records.append(chunk.pack(group, torch.randn(KIB)))
    assert len(group.blocks()) == 4
    here, side = backend.compute_stream(), backend.side_stream
    assert [record.block.stream for record in records] == [here, side, side, here]


def test_an_event_behind_one_of_several_tensors_says_nothing_of_the_others():
    manager = make_manager()
    chunk = manager.begin_chunk()
    group = manager.start_group(chunk, "g")
    x, y = torch.randn(KIB), torch.randn(KIB)
    of_x = [chunk.pack(group, x)]
    event = manager.backend.record(manager.backend.compute_stream())
    part = x[16:]
    for told in (part, y):
        setattr(told, READY_MARK, (told._version, event))
    of_x.append(chunk.pack(group, part))
    of_y = chunk.pack(group, y)
    assert of_x[0].block is of_x[1].block
    assert of_x[0].block.ready is None
    assert of_y.block.ready is event


def test_an_aborted_step_leaves_no_group_unsettled():
    manager = make_manager()
    chunk = manager.begin_chunk()
    group = manager.start_group(chunk, "g")
    record = chunk.pack(group, torch.ones(KIB))
    manager.abort()
    assert group.unresolved is None
    assert torch.equal(record.unpack(), torch.ones(KIB))
