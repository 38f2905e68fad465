"""The documented API: what each name does, beside having the right form."""

from __future__ import annotations

import copy
import pickle
from unittest.mock import Mock, call

import pytest
import torch
from one_layer import CONFIG, assert_exact, begin, end_exactly, layer, take_step

import megatron_offload
from megatron_offload import fine_grained_activation_offload as facade
from megatron_offload.config import OffloadConfig
from megatron_offload.core.group import GroupState
from megatron_offload.core.units import format_bytes
from megatron_offload.engine import manager as engine_manager
from megatron_offload.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface,
    FineGrainedOffloadingBackwardRecordFunction,
    PipelineOffloadManager,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_offload,
    fine_grained_offloading_group_start,
)

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


# Tables and messages


def test_the_table_needs_no_torch_distributed(capsys):
    facade.print_offload_summary_table({"core_attn": 3 << 20, "mlp": 1 << 19})
    text = capsys.readouterr().out
    assert "core_attn" in text
    assert "3.50" in text
    assert "offloaded once" not in text
    facade.print_offload_summary_table({"a": 1 << 20}, {"a": 2 << 20}, None)
    assert "offloaded once" in capsys.readouterr().out


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


def test_the_callback_after_warm_up_learns_and_prints(manager, x, weight, capsys):
    begin(manager)
    layer(layer(x, weight), weight).sum().backward()
    manager.post_warmup_callback()
    text = capsys.readouterr().out
    assert "mlp" in text
    assert manager.offload_summary_bytes == {"mlp": manager.offload_summary_total_bytes}
    assert manager.learner.profile is not None
    assert format_bytes(manager.offload_summary_bytes["mlp"], 2) in text
    begin(manager)
    y = layer(x, weight)
    profile = manager.learner.profile
    manager.post_warmup_callback()
    assert manager.learner.profile is profile, "a graph is alive, so the step goes on"
    y.sum().backward()


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
