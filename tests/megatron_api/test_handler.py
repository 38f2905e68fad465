"""A chunk's handler, its groups and the manager's queues, called one by one."""

from __future__ import annotations

import pytest
import torch
from one_layer import CONFIG, assert_exact, begin, end_exactly, layer

from megatron_offload import fine_grained_activation_offload as facade
from megatron_offload.core.group import GroupState
from megatron_offload.errors import StateError
from megatron_offload.fine_grained_activation_offload import (
    ChunkOffloadHandler,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    OffloadTensorGroup,
)
from megatron_offload.megatron_api.handler import REPLACED


@pytest.mark.parametrize("named", [False, True])
def test_a_pushed_commit_is_bound_to_its_group_at_once(manager, named):
    chunk = begin(manager)
    first = chunk.on_group_start_forward("g")
    source = torch.randn(4, 8).t()
    record, expected = chunk.tensor_push(source), source.clone()
    arguments = ("g", [source]) if named else ([source],)
    manager.push_offload_groups(chunk.on_group_commit_forward, *arguments)
    later = chunk.on_group_start_forward("g")
    manager.flush_delayed_groups()
    assert first.state is not GroupState.RECORDING
    assert later.state is GroupState.RECORDING
    assert source.untyped_storage().nbytes() == 0, "it was asked to release it"
    del source
    restored = chunk.tensor_pop(record)
    assert torch.equal(restored, expected)
    assert restored.stride() == (1, 8)
    assert chunk.tensor_pop(restored) is restored


def test_any_other_hook_is_called_at_the_flush(manager):
    begin(manager)
    seen = []
    manager.push_offload_groups(lambda *arguments: seen.append(arguments), ["t"])
    manager.push_offload_groups(lambda *arguments: seen.append(arguments), "n", ["u"])
    assert seen == []
    manager.flush_delayed_groups()
    manager.flush_delayed_groups()
    assert seen == [(["t"],), ("n", ["u"])]
    manager.push_offload_groups(seen.append, [])
    manager.reset()
    manager.flush_delayed_groups()
    assert len(seen) == 2, "what was put off in a step ends with it"


# Handler and autograd functions, called one by one


def test_backward_takes_the_newest_group_of_a_name_that_waits(manager):
    chunk = begin(manager)
    first, second = chunk.on_group_start_forward("g"), chunk.on_group_start_forward("g")
    assert chunk.tensor_push(torch.randn(64)).block.group is second
    chunk.on_group_commit_forward([])
    chunk.on_group_commit_forward([])
    chunk.on_group_start_forward("g")
    chunk.on_group_commit_backward("g")
    chunk.on_group_commit_backward("g")
    assert manager.decisions.backward_order == [second.key, first.key]
    with pytest.raises(StateError, match="no group 'g' of this chunk waits"):
        chunk.on_group_commit_backward("g")


def test_a_chunk_says_which_groups_it_has_and_resets_to_none_open(manager):
    chunk = begin(manager)
    with pytest.raises(StateError, match="on_group_start_forward first"):
        chunk.tensor_push(torch.ones(1))
    assert chunk.on_group_commit_forward([]) is None
    assert chunk.is_empty_chunk()
    group = chunk.on_group_start_forward("a")
    assert chunk.offload_groups == [group]
    assert not chunk.is_empty_chunk("a")
    assert chunk.is_empty_chunk("b")
    chunk.reset()
    assert chunk.on_group_commit_forward("a", []) is None
    chunk.on_group_commit_backward("a")
    chunk.reset()
    with pytest.raises(StateError, match="call on_group_commit_backward"):
        chunk.on_group_start_backward()


def test_cur_backward_chunk_is_the_one_whose_backward_runs(manager, x, weight):
    first = begin(manager)
    y = layer(x, weight)
    second = begin(manager)
    z = layer(x, weight)
    assert manager.cur_backward_chunk() is None
    z.sum().backward()
    assert manager.cur_backward_chunk() is second
    y.sum().backward()
    assert manager.cur_backward_chunk() is first
    manager.reset()
    assert manager.cur_backward_chunk() is None


def group_by_hand(handler, name="mlp"):
    """Record one group of one tensor; return the group, the record and the bits."""
    group = handler.on_group_start_forward(name)
    source = torch.randn(64)
    return group, handler.tensor_push(source), source.clone()


def test_the_backward_queue_of_two_stages_is_the_schedule_s(manager):
    chunks, kept, popped = {}, [], []
    for stage, number in ((0, 0), (0, 1), (1, 0), (1, 1)):
        manager.init_model_chunk_offload_handler(2, stage, 0)
        chunks[stage, number] = handler = manager.cur_forward_chunk()
        kept.append(group_by_hand(handler))
        handler.on_group_commit_forward([])
    while manager.front_backward_chunk() is not None:
        front = manager.front_backward_chunk()
        assert manager.pop_backward_chunk() is front is manager.cur_backward_chunk()
        popped.append(next(key for key, chunk in chunks.items() if chunk is front))
    assert popped == [(1, 0), (1, 1), (0, 0), (0, 1)]
    with pytest.raises(StateError, match="no chunk with a group is queued"):
        manager.pop_backward_chunk()
    manager.push(front)
    manager.reset()
    assert manager.front_backward_chunk() is None, "a queue belongs to its step"
    assert manager.cur_backward_chunk() is None


def test_push_queues_a_chunk_and_empty_ones_are_skipped(manager):
    empty = ChunkOffloadHandler(0, manager.cpu_tensor_pool)
    full = ChunkOffloadHandler(0, manager.cpu_tensor_pool)
    kept = group_by_hand(full, "a")
    full.on_group_commit_forward([])
    for handler in (empty, full):
        manager.push(handler)
    assert manager.front_backward_chunk("b") is None
    assert manager.front_backward_chunk("a") is full
    assert manager.pop_backward_chunk("a") is full
    assert manager.front_backward_chunk() is None
    full.on_group_commit_backward("a")
    assert torch.equal(full.tensor_pop(kept[1]), kept[2])


@pytest.mark.parametrize("name", REPLACED)
def test_what_steps_through_groups_says_what_replaces_it(manager, name):
    handler, replacement = begin(manager), REPLACED[name]
    with pytest.raises(StateError, match=rf"^{name}\(\) steps .*; use {replacement}$"):
        getattr(handler, name)("mlp")
    assert hasattr(handler, replacement.split(",")[0])


def test_a_tensor_group_keeps_tensors_totals_and_events_of_the_managers_streams(manager):
    group = OffloadTensorGroup("core_attn")
    tensor = torch.ones(4, 2, dtype=torch.float16)
    group.push_tensor((1, 0), tensor)
    group.update_offload_info(tensor)
    assert (group.total_offload_bytes, group.total_tensor_count) == (16, 1)
    assert group.pop_tensor((1, 0)) is tensor
    with pytest.raises(KeyError):
        group.pop_tensor((1, 0))
    compute = manager.backend.compute_stream()
    group.wait_offload_event(compute)
    group.wait_reload_event(compute)
    group.record_offload_event(manager.d2h_stream)
    group.wait_offload_event(manager.h2d_stream)
    group.record_reload_event(manager.h2d_stream)
    group.wait_reload_event(compute)
    source, host = torch.ones(8), torch.zeros(8)
    manager.backend.copy([(host, source)], manager.d2h_stream, "by hand")
    group.record_offload_event(manager.d2h_stream)
    assert host.sum() == 0, "late, as any copy"
    group.wait_offload_event(compute)
    assert host.sum() == 8


# Chunks driven by hand


def weights_of(num_layers):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(16, 16, generator=generator, requires_grad=True) for _ in range(num_layers)]


@pytest.mark.parametrize("era", ["0.16", "later"])
def test_a_chunk_driven_by_hand_is_exact(manager, x, era):
    """Forward and backward of one chunk, layer by layer, through the documented methods alone."""
    weights = weights_of(4)
    y = x.detach().requires_grad_()
    for weight in weights:
        y = torch.tanh(y @ weight)
    expected = torch.autograd.grad(y.sum(), weights)

    is_later = era == "later"
    arguments = (0, 1, 0, 0) if is_later else (1, 0, 0)
    for number in range(2):
        manager.init_model_chunk_offload_handler(*arguments)
        handler = manager.pop_forward_chunk(*(["mlp"] if is_later else []))
        assert isinstance(handler, ChunkOffloadHandler)
        assert handler is manager.cur_forward_chunk()
        y, layers = x, []
        for weight in weights:
            y = y.detach().requires_grad_()
            layers.append([y])
            group = handler.on_group_start_forward("mlp")
            with torch.autograd.graph.saved_tensors_hooks(handler.tensor_push, handler.tensor_pop):
                y = torch.tanh(y * 1 @ weight)
            layers[-1].append(y)
            handler.on_group_commit_forward(*(["mlp"] if is_later else []), [])
            # The first step knows no weights yet: by its measure backward of the second is near.
            states = [GroupState.ON_HOST, GroupState.RELOADING][: 1 + number]
            assert group.state in states
        grads, grad = [], torch.ones(8, 16)
        for i in reversed(range(4)):
            handler.on_group_commit_backward("mlp")
            hidden, y = layers.pop()
            grad, of_weight = torch.autograd.grad(y, (hidden, weights[i]), grad)
            grads.insert(0, of_weight)
            handler.on_group_start_backward()
        assert all(map(torch.equal, grads, expected))
        assert all(g.state is GroupState.DONE for g in handler.offload_groups)
        manager.reset()
        assert manager.last_step.offloaded_bytes > 0
        assert not any(manager.state_of().values())


# The pool of host tensors


def test_the_pool_shows_what_the_engine_has_on_the_host(manager, x, weight):
    pool = manager.cpu_tensor_pool
    begin(manager)
    y = layer(x, weight)
    status = pool.get_pool_status()
    assert isinstance(pool, facade.GPUTensorPool)
    assert status["global_stats"]["current_in_use"] == 2
    assert status["pools"].keys() == {((8, 16), torch.float32)}
    mine = pool.allocate((8, 16))
    assert pool.get_pool_status((8, 16), torch.float32)["allocated_count"] == 3
    assert manager.engine.host_pool.stats.in_use_bytes == 3 * 512
    pool.free(mine)
    y.sum().backward()
    del y
    assert pool.get_pool_status()["global_stats"]["current_in_use"] == 0


def test_offload_takes_memory_as_it_is_asked_to(manager, monkeypatch):
    handler = begin(manager)
    source = torch.randn(16, 16).t()
    stats = manager.engine.host_pool.stats
    pinned = []
    empty_host = manager.backend.empty_host
    monkeypatch.setattr(manager.backend, "empty_host", lambda n: pinned.append(n) or empty_host(n))
    device, copied, is_pooled = handler.offload(source, use_cpu_pool=False)
    assert (stats.in_use_bytes, pinned, is_pooled) == (0, [1024], False)
    unpinned = handler.offload(source, pin_memory=False, use_cpu_pool=False)
    assert pinned == [1024]
    for state in ((device, copied, is_pooled), unpinned):
        assert torch.equal(handler.reload(state, non_blocking=False), source)
    once = handler.offload(source)
    assert torch.equal(handler.reload(once), source)
    assert stats.in_use_bytes == 0
    with pytest.raises(ValueError, match="freed before"):
        handler.reload(once)
    lent = handler.offload(source)
    assert stats.in_use_bytes == 1024
    assert manager.cpu_tensor_pool.get_pool_status()["global_stats"]["current_in_use"] == 1
    manager.reset()
    assert stats.in_use_bytes == 0
    with pytest.raises(ValueError, match="freed before"):
        handler.reload(lent)
    manager.configure(CONFIG.model_copy(update={"host_memory_bytes": 4096}))
    handler = begin(manager)
    with pytest.raises(RuntimeError, match="raise host_memory_bytes"):
        handler.offload(torch.randn(4096))


def test_boundaries_are_autograd_functions(manager, x, weight):
    chunk = ChunkOffloadHandler(0, manager.cpu_tensor_pool)
    assert chunk.cpu_tensor_pool is manager.cpu_tensor_pool
    assert chunk.min_offloaded_tensor_size == 0
    assert (chunk.d2h_stream, chunk.h2d_stream) == (manager.d2h_stream, manager.h2d_stream)
    y = FineGrainedOffloadingGroupStartFunction.apply(x, chunk, "g")
    assert type(y.grad_fn).__name__ == "FineGrainedOffloadingGroupStartFunctionBackward"
    with torch.autograd.graph.saved_tensors_hooks(chunk.tensor_push, chunk.tensor_pop):
        y = torch.tanh(y @ weight)
    y = FineGrainedOffloadingGroupCommitFunction.apply(y, chunk, "g", [], True)
    (group,) = chunk.offload_groups
    assert group.state is GroupState.RECORDING
    manager.flush_delayed_groups()
    assert group.state is GroupState.ON_HOST
    y.sum().backward(retain_graph=True)
    assert group.state is GroupState.DONE
    with torch.no_grad():
        assert FineGrainedOffloadingGroupStartFunction.apply(x, chunk, "g") is x
    assert_exact(x, weight, num_layers=1)
    x.grad = weight.grad = None
    end_exactly(manager, y, x, weight, 1)
