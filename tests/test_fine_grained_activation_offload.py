"""The documented API: what each name does, beside having the right form."""

from __future__ import annotations

import copy
import pickle
from unittest.mock import Mock, call

import pytest
import torch
from programs import assert_same

import megatron_offload
from megatron_offload import fine_grained_activation_offload as facade
from megatron_offload.config import OffloadConfig
from megatron_offload.core.group import GroupState
from megatron_offload.core.units import format_bytes
from megatron_offload.engine import manager as engine_manager
from megatron_offload.errors import StateError
from megatron_offload.fine_grained_activation_offload import (
    ChunkOffloadHandler,
    FineGrainedActivationOffloadingInterface,
    FineGrainedOffloadingBackwardRecordFunction,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    OffloadTensorGroup,
    PipelineOffloadManager,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_offload,
    fine_grained_offloading_group_start,
)
from megatron_offload.megatron_api.handler import REPLACED

CONFIG = OffloadConfig(
    backend="simulated", host_slab_bytes=1 << 20, max_inflight_bytes=0, prefetch_bytes=0
)


@pytest.fixture
def manager():
    manager = PipelineOffloadManager.get_instance()
    manager.configure(CONFIG)
    yield manager
    manager.configure(CONFIG)
    manager.in_replay = False


def begin(manager, min_elements=0, **options):
    manager.init_model_chunk_offload_handler(1, 0, min_elements, **options)
    return manager.cur_forward_chunk()


def layer(x, weight, name="mlp", **commit):
    with FineGrainedActivationOffloadingInterface(True, x, name) as x:
        y = torch.tanh(x @ weight)
    return FineGrainedActivationOffloadingInterface.group_commit(y, name, **commit)


def take_step(manager, x, weight, **options):
    """Take a step of one layer; return what it has moved."""
    begin(manager, **options)
    layer(x, weight).sum().backward()
    manager.reset()
    return manager.last_step.offloaded_bytes


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))


@pytest.fixture
def x():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(4), requires_grad=True)


def reference(x, weight, num_layers=3):
    y = x = x.detach().requires_grad_()
    for _ in range(num_layers):
        y = torch.tanh(y @ weight)
    return torch.autograd.grad(y.sum(), (x, weight))


def assert_exact(x, weight, num_layers=3):
    assert_same(reference(x, weight, num_layers), [x.grad, weight.grad])


def end_exactly(manager, y, x, weight, num_layers):
    """End a step by its backward, whose gradients are those without offload."""
    y.sum().backward()
    manager.reset()
    assert_exact(x, weight, num_layers)


# One manager


def test_one_manager_for_all_callers(manager):
    assert megatron_offload.PipelineOffloadManager.get_instance() is manager.engine
    assert engine_manager.PipelineOffloadManager.get_instance() is manager.engine
    assert PipelineOffloadManager.get_instance() is manager
    assert pickle.loads(pickle.dumps(manager)) is manager  # noqa: S301 - our own bytes
    assert copy.deepcopy(manager) is manager


def test_the_rest_of_the_names_are_the_engine_s(manager):
    assert manager.window is manager.engine.window
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        manager.nonsense  # noqa: B018


def test_reset_instance_makes_a_new_one_of_the_same_class_and_configuration(manager, weight):
    manager.mark_not_offloadable(weight)
    FineGrainedActivationOffloadingInterface.reset_instance()
    new = PipelineOffloadManager.get_instance()
    assert new is not manager
    assert new.engine is not manager.engine
    assert new.config == CONFIG
    # Models name their parameters once, so a new manager has to know them too.
    assert not begin(new).tensor_need_offloading_checker(weight.detach())


def test_front_doors_take_the_documented_manager_too():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    x = torch.randn(8, 16)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    own = PipelineOffloadManager(CONFIG.model_copy(update={"min_tensor_bytes": 0}))
    other = PipelineOffloadManager(CONFIG)
    doors = [
        megatron_offload.offload_modules(model, "1", manager=own),
        megatron_offload.OffloadActivations(min_offload_size=0, manager=other),
    ]
    model.zero_grad()
    with doors[0], doors[1]:
        y = model(x)
    y.sum().backward()
    own.reset()
    assert doors[1].end_step()
    assert own.last_step.offloaded_bytes > 0
    assert other.last_step.offloaded_bytes > 0
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))


# Groups


def test_layers_are_exact_and_move(manager, x, weight):
    begin(manager)
    y = layer(layer(layer(x, weight), weight), weight)
    y.sum().backward()
    manager.reset(process_group=None)
    assert_exact(x, weight)
    assert manager.last_step.offloaded_bytes > 0
    assert manager.offload_summary_bytes.keys() == {"mlp"}
    assert manager.offload_summary_total_bytes == manager.offload_summary_bytes["mlp"]
    assert not any(manager.state_of().values())


@pytest.mark.parametrize("wrap", [tuple, list])
def test_group_functions_take_tuples_and_lists(manager, x, wrap):
    begin(manager)
    plain = torch.ones(3)
    # Equal is what has the same tensors: others have no truth value.
    given = wrap([plain, x, None])
    assert fine_grained_offloading_group_start(given, "g") == given
    assert fine_grained_offloading_group_commit(given[:2], "g") == given[:2]
    assert fine_grained_offloading_group_commit(wrap([]), "g") == wrap([])


def test_outside_a_chunk_everything_is_the_identity(manager, x):
    assert manager.cur_forward_chunk() is None
    assert fine_grained_offloading_group_start(x, "g") is x
    assert fine_grained_offloading_group_commit(x, "g") is x
    assert fine_grained_offloading_group_offload(x, "g") is x
    with FineGrainedActivationOffloadingInterface(True, x, "g") as inside:
        assert inside is x


def test_an_interface_that_is_off_is_the_identity_and_another_lets_go_of_its_input(
    manager, x, weight
):
    chunk = begin(manager)
    interface = FineGrainedActivationOffloadingInterface(False, x, "g")
    with interface as inside:
        assert inside is x
    assert interface.group_offload(x) is x
    assert chunk.is_empty_chunk()
    interface = FineGrainedActivationOffloadingInterface(True, x * 2, "g")
    with interface as inside:
        y = inside @ weight
    assert interface.tensor is None
    interface.group_offload(y)
    assert interface.get_context(True) is manager
    with interface.get_context(False) as nothing:
        assert nothing is None


def test_an_exception_inside_a_group_restores_the_hooks(manager, x, weight):
    begin(manager)
    with pytest.raises(ZeroDivisionError):
        with FineGrainedActivationOffloadingInterface(True, x, "g"):
            raise ZeroDivisionError
    saved = torch.tanh(x).grad_fn._saved_result
    assert isinstance(saved, torch.Tensor)
    manager.abort()
    take_step(manager, x, weight)
    assert_exact(x, weight, num_layers=1)


def test_the_smallest_tensor_is_counted_in_elements(manager, x, weight):
    assert take_step(manager, x, weight, min_elements=x.numel() + 1) == 0
    assert take_step(manager, x, weight, min_elements=x.numel()) > 0


def test_switched_off_nothing_is_recorded(manager, x, weight):
    chunk = begin(manager)
    facade.fine_grained_offloading_disable_offload()
    assert not chunk.do_offload
    assert not PipelineOffloadManager.get_instance().do_offload
    layer(x, weight)
    assert chunk.is_empty_chunk()
    facade.fine_grained_offloading_enable_offload()
    layer(x, weight)
    assert not chunk.is_empty_chunk("mlp")


def test_a_marked_tensor_is_kept(manager, x, weight):
    chunk = begin(manager)
    manager.mark_not_offload(weight)
    manager.mark_not_offload(weight)
    hidden = x * 2
    assert chunk.tensor_need_offloading_checker(hidden)
    FineGrainedActivationOffloadingInterface.mark_not_offload(hidden)
    assert not any(map(chunk.tensor_need_offloading_checker, (hidden, hidden.view(-1), weight)))
    FineGrainedActivationOffloadingInterface.mark_not_offloadable(None)


def test_forced_release_empties_what_was_copied(manager, x, weight):
    begin(manager)
    hidden = x * 2
    with FineGrainedActivationOffloadingInterface(True, hidden, "g") as inside:
        y = torch.tanh(inside @ weight)
    y = fine_grained_offloading_group_commit(y, "g", forced_released_tensors=[hidden])
    manager.engine.window.drain()
    assert hidden.untyped_storage().nbytes() == 0
    y.sum().backward()
    assert torch.equal(weight.grad, reference(x.detach() * 2, weight, 1)[1])


# Chunks


def test_fraction_delta_and_bound_reach_the_policy(manager):
    manager.init_model_chunk_offload_handler(2, 2, 1, 0, 100, 0.5, max_inflight_offloads=3)
    assert (manager.learner.policy.fraction, manager.learner.policy.keep_bytes) == (0.5, 200)
    chunk = manager.cur_forward_chunk()
    assert (chunk.chunk.rules.max_inflight_groups, chunk.vpp_rank) == (3, 1)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_at_most_so_many_groups_of_a_name_are_in_flight(manager, x, weight, bound):
    manager.configure(CONFIG.model_copy(update={"max_inflight_bytes": 1 << 30}))
    manager.init_model_chunk_offload_handler(0, 1, 0, 0, max_inflight_offloads=bound)
    y = x
    for i in range(4):
        y = layer(y, weight)
        assert manager.engine.window.num_inflight == min(i + 1, bound)
    end_exactly(manager, y, x, weight, 4)


def test_the_bound_counts_each_name_alone(manager, x, weight):
    manager.configure(CONFIG.model_copy(update={"max_inflight_bytes": 1 << 30}))
    manager.init_model_chunk_offload_handler(0, 1, 0, 0, max_inflight_offloads=1)
    y = layer(layer(layer(x, weight, "a"), weight, "b"), weight, "c")
    assert manager.engine.window.num_inflight == 3
    y = layer(y, weight, "b")
    # Copies are made in order: whatever was issued before the oldest "b" is done with it.
    assert manager.engine.window.num_inflight == 2
    end_exactly(manager, y, x, weight, 4)


# Delayed commits


@pytest.mark.parametrize("form", ["documented", "later", "later, in a replay"])
def test_the_later_form_delays_only_in_a_replay(manager, x, weight, form):
    chunk = begin(manager)
    if form == "later, in a replay":
        FineGrainedActivationOffloadingInterface.enter_replay()
    interface = FineGrainedActivationOffloadingInterface(True, x, "g")
    with interface as inside:
        y = torch.tanh(inside @ weight)
    if form == "documented":
        y = interface.group_commit(y, "g", delay_offload=True)
    else:
        y = interface.group_offload(y, delay_offload=True)
    FineGrainedActivationOffloadingInterface.exit_replay()
    (group,) = chunk.offload_groups
    assert (group.state is GroupState.RECORDING) == (form != "later")
    FineGrainedActivationOffloadingInterface.flush_delayed_groups()
    assert group.state is not GroupState.RECORDING
    end_exactly(manager, y, x, weight, 1)
    assert manager.last_step.offloaded_bytes > 0


@pytest.mark.parametrize("named", [False, True])
def test_a_pushed_commit_is_bound_to_its_group_at_once(manager, named):
    chunk = begin(manager)
    first = chunk.on_group_start_forward("g")
    source = torch.randn(4, 8).t()
    record, expected = chunk.tensor_push(source), source.clone()
    arguments = ("g", []) if named else ([],)
    manager.push_offload_groups(chunk.on_group_commit_forward, *arguments)
    later = chunk.on_group_start_forward("g")
    manager.flush_delayed_groups()
    assert first.state is not GroupState.RECORDING
    assert later.state is GroupState.RECORDING
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


def chunk_by_hand(manager, *arguments):
    manager.init_model_chunk_offload_handler(*(arguments or (1, 0, 0)))
    handler = manager.cur_forward_chunk()
    group, record, bits = group_by_hand(handler)
    handler.on_group_commit_forward([])
    return handler, group, record, bits


def test_the_backward_queue_of_two_stages_is_the_schedule_s(manager):
    saved = {(stage, i): chunk_by_hand(manager, 2, stage, 0) for stage in (0, 1) for i in (0, 1)}
    chunks = {key: handler for key, (handler, *_) in saved.items()}
    popped = []
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


# CUDA graphs, as far as they can be had without CUDA


def test_forward_record_joins_the_copies_to_the_host(manager, x, weight):
    assert FineGrainedActivationOffloadingInterface.cuda_graph_stream() is None, "without CUDA"
    assert FineGrainedActivationOffloadingInterface.cuda_graph_event() is None
    FineGrainedActivationOffloadingInterface.forward_record()
    manager.configure(CONFIG.model_copy(update={"max_inflight_bytes": 1 << 30}))
    begin(manager)
    y = layer(x, weight)
    manager.flush_delayed_groups()
    assert manager.engine.window.num_inflight == 1
    event = Mock()
    facade.fine_grained_offloading_forward_record(event)
    assert event.record.call_args_list == [call(manager.backend.compute_stream())]
    assert manager.engine.window.num_inflight == 0
    y.sum().backward()
    assert_exact(x, weight, num_layers=1)


@pytest.mark.parametrize("with_event", [False, True])
def test_backward_record_joins_the_reloads(manager, x, weight, with_event):
    begin(manager)
    event = Mock()
    arguments = (event,) if with_event else ()
    y = layer(x, weight)
    y = FineGrainedActivationOffloadingInterface.backward_record(y, *arguments)
    y = layer(y, weight)
    marked = FineGrainedOffloadingBackwardRecordFunction.apply(y, *arguments)
    assert torch.equal(marked, y)
    manager.engine.window.drain()
    marked.sum().backward()
    assert event.record.call_count == (2 if with_event else 0)
    manager.reset()
    assert_exact(x, weight, num_layers=2)


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


# Tables and messages


def test_the_table_needs_no_torch_distributed(capsys):
    facade.print_offload_summary_table({"core_attn": 3 << 20, "mlp": 1 << 19})
    text = capsys.readouterr().out
    assert "core_attn" in text
    assert "3.50" in text
    assert "moved once" not in text
    facade.print_offload_summary_table({"a": 1 << 20}, {"a": 2 << 20}, None)
    assert "moved once" in capsys.readouterr().out


def test_debug_messages_are_printed_and_only_when_on(manager, monkeypatch, capsys, x):
    begin(manager)
    fine_grained_offloading_group_start(x, "quiet")
    facade.debug_rank("quiet")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(facade, "DEBUG", True)
    fine_grained_offloading_group_start(x, "loud")
    assert capsys.readouterr().out == "start of group loud\n"
    monkeypatch.setattr(facade, "DEBUG_RANK", 1)
    facade.debug_rank("another rank's")
    assert capsys.readouterr().out == ""


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


def test_the_callback_after_warm_up_learns_and_prints(manager, x, weight, capsys):
    begin(manager)
    layer(x, weight).sum().backward()
    manager.post_warmup_callback()
    text = capsys.readouterr().out
    assert "mlp" in text
    assert manager.learner.profile is not None
    assert format_bytes(manager.offload_summary_bytes["mlp"], 2) in text
    begin(manager)
    y = layer(x, weight)
    profile = manager.learner.profile
    manager.post_warmup_callback()
    assert manager.learner.profile is profile, "a graph is alive, so the step goes on"
    y.sum().backward()


def test_a_commit_by_hand_releases_what_it_is_asked_to(manager):
    handler = begin(manager)
    handler.on_group_start_forward("mlp")
    source = torch.randn(64)
    record, expected = handler.tensor_push(source), source.clone()
    handler.on_group_commit_forward("mlp", [source])
    assert source.untyped_storage().nbytes() == 0
    assert torch.equal(record.unpack(), expected)


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


@pytest.mark.by_default
def test_groups_marked_by_hand_are_offloaded_as_they_are_marked(caplog, monkeypatch):
    manager = engine_manager.PipelineOffloadManager(OffloadConfig())
    monkeypatch.setattr(engine_manager.PipelineOffloadManager, "instance", manager)
    weight = torch.nn.Parameter(torch.randn(512, 512))
    for _ in range(4):
        with manager.step():
            x = torch.randn(1024, 512, requires_grad=True)
            for _ in range(3):
                x = facade.group_start(x, "mlp")
                with manager:
                    x = torch.relu(x @ weight)
                x = facade.group_commit(x, "mlp")
            x.sum().backward()
    mlp = manager.last_step.by_name["mlp"]
    assert mlp.num_groups == 3
    assert mlp.offloaded_bytes > 0
    assert {record.module for record in caplog.records} == {"verdicts"}
