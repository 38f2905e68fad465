"""Operations that run as one: each one's saved tensors follow its own setting."""

from __future__ import annotations

import contextlib
import sys

import pytest
import small_fuser
import torch
from programs import TWO_TIMINGS, assert_nothing_left, make_manager
from small_fuser import FusedOperation, FusibleOperation, OperationFuser, Sequential
from torch.utils.checkpoint import checkpoint

from megatron_offload.errors import IntegrationError
from megatron_offload.frontends.ratio import CPUOffload
from megatron_offload.frontends.whole_model import OffloadActivations
from megatron_offload.integrations import transformer_engine as policy

ROWS, WIDTH = 24, 32
BYTES = 4 * ROWS * WIDTH


@pytest.fixture(autouse=True)
def _fuser(monkeypatch):
    for name in (policy._FUSER, policy._OPERATION):
        monkeypatch.setitem(sys.modules, name, small_fuser)
    found = {
        **{name: getattr(small_fuser, name) for name in ("OperationContext", "prepare_for_saving")},
        "__call__": OperationFuser.__call__,
    }
    policy.reset_operation_groups()
    policy.operation_groups(manager=make_manager())
    yield
    policy.reset_operation_groups()
    policy.uninstall()
    policy.uninstall()
    assert small_fuser.OperationContext is found["OperationContext"]
    assert small_fuser.prepare_for_saving is found["prepare_for_saving"]
    assert OperationFuser.__call__ is found["__call__"]


def make_model():
    """Return fc1, activation and fc2; the second saves its tensor in two parts."""
    return Sequential(*(FusibleOperation(WIDTH, in_parts=i == 1) for i in range(3)))


def gradient(model, around=None):
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with around or contextlib.nullcontext():
        y = model(x * 1.0)
    x.grad = None
    y.sum().backward()
    return x.grad


def moved(model, expected, around=None):
    """Compare the gradient, end the step, and return how many operations' bytes have moved."""
    assert torch.equal(gradient(model, around), expected)
    groups = policy.operation_groups()
    is_over = groups.end_step_if_over()
    assert_nothing_left(groups.manager)
    return groups.manager.last_step.offloaded_bytes / BYTES if is_over else 0


def choose(model, **settings):
    for name, setting in settings.items():
        policy.set_activation_offloading(
            model.operations[("fc1", "act", "fc2").index(name)], setting
        )


CHOICES = [(), ("fc1",), ("act",), ("fc2",), ("fc1", "fc2"), ("fc1", "act", "fc2")]


@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_exactly_the_chosen_operations_move(timing, chosen):
    policy.reset_operation_groups()
    policy.operation_groups(manager=make_manager(timing))
    model = make_model()
    expected = gradient(model)
    choose(model, **dict.fromkeys(chosen, True))
    for _ in range(3):
        assert moved(model, expected) == len(chosen)


@pytest.mark.parametrize("kept", CHOICES)
def test_exactly_the_chosen_operations_are_kept(kept):
    model = make_model()
    expected = gradient(model)
    choose(model, **dict.fromkeys(kept, False))
    offload = OffloadActivations(min_offload_size=0, manager=make_manager())
    for _ in range(2):
        assert torch.equal(gradient(model, offload), expected)
        assert offload.end_step() == (len(kept) < 3)
        assert offload.last_step.offloaded_bytes == (3 - len(kept)) * BYTES


def test_hooks_of_others_around_a_run_are_left_all_of_it():
    model = make_model()
    expected = gradient(model)
    choose(model, fc1=True, act=False)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    around = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    assert moved(model, expected, around) == 0
    assert len(packed) == 4, "those of the run, and the loss's"


def test_the_innermost_setting_wins():
    model = make_model()
    expected = gradient(model)
    policy.set_activation_offloading(model, True)
    choose(model, act=False)
    assert moved(model, expected) == 2
    policy.set_activation_offloading(model, False)
    choose(model, act=True)
    assert moved(model, expected) == 1
    alone = model.operations[1]
    assert moved(alone, gradient(alone)) == 1, "called alone"


def test_an_operation_that_is_made_of_others_passes_its_setting_on():
    linear, bias, other = (FusibleOperation(WIDTH) for _ in range(3))
    whole = FusedOperation(linear, bias)
    model = Sequential(whole, other)
    expected = gradient(model)
    policy.set_activation_offloading(whole, True)
    assert moved(model, expected) == 2
    policy.set_activation_offloading(bias, False)
    assert moved(model, expected) == 1, "the innermost wins"
    policy.set_activation_offloading(whole, None)
    policy.set_activation_offloading(other, True)
    assert moved(model, expected) == 1
    policy.set_activation_offloading(bias, None)
    policy.set_activation_offloading(whole, False)
    assert moved(model, expected) == 1


def test_a_share_of_the_rest_counts_only_the_rest():
    model = make_model()
    expected = gradient(model)
    choose(model, fc1=True)
    CPUOffload(0.0, "rest", policy.operation_groups().manager.config)
    try:
        assert moved(model, expected, CPUOffload(0.0, "rest")) == 1
        assert CPUOffload(0.0, "rest").last_step.offloaded_bytes == 0
    finally:
        CPUOffload.forget("rest")


def test_a_checkpoint_keeps_what_is_its_own():
    model = make_model()

    def recomputed(x):
        return checkpoint(model, x, use_reentrant=False)

    expected = gradient(recomputed)
    choose(model, fc1=True, act=False)
    assert moved(recomputed, expected) == 0


def test_an_error_in_a_run_leaves_nothing_behind():
    model = make_model()
    expected = gradient(model)
    choose(model, fc1=True)
    model.operations[2].width = WIDTH + 1
    with pytest.raises(RuntimeError, match="must match"):
        gradient(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model.operations[2].width = WIDTH
    assert moved(model, expected) == 1


def test_runs_inside_runs_keep_their_own_settings(monkeypatch):
    groups = policy.operation_groups()
    inner = make_model()

    class Outer(FusibleOperation):
        pass

    outer = Sequential(FusibleOperation(WIDTH), Outer(WIDTH))
    rand = torch.rand
    calls = []

    def rand_with_a_run(*shape):
        calls.append(shape)
        if len(calls) == 2:
            with torch.enable_grad():
                inner(torch.ones(ROWS, WIDTH, requires_grad=True))
        return rand(*shape)

    policy.set_activation_offloading(outer.operations[0], True)
    monkeypatch.setattr(torch, "rand", rand_with_a_run)
    y = outer(torch.ones(ROWS, WIDTH, requires_grad=True))
    monkeypatch.undo()
    assert len(calls) == 5
    y.sum().backward()
    del y
    assert groups.end_step_if_over()
    assert groups.manager.last_step.offloaded_bytes == BYTES


def test_another_fuser_is_refused(monkeypatch):
    with monkeypatch.context() as other:
        other.delattr(small_fuser, "prepare_for_saving")
        with pytest.raises(IntegrationError, match="has no prepare_for_saving"):
            policy.set_activation_offloading(FusibleOperation(WIDTH), True)


def test_a_fuser_that_makes_other_contexts_is_refused():
    original = small_fuser.OperationContext
    model = make_model()
    choose(model, fc1=True)
    noted = small_fuser.OperationContext
    small_fuser.OperationContext = original
    try:
        with pytest.raises(IntegrationError, match="0 contexts for 3 operations"):
            gradient(model)
    finally:
        small_fuser.OperationContext = noted


def test_operations_have_the_method_and_the_attribute():
    policy.install()
    policy.install()
    model = make_model()
    expected = gradient(model)
    fc1, activation, fc2 = model.operations
    assert fc1.activation_offloading is None
    fc1.set_activation_offloading(True)
    activation.activation_offloading = False
    assert policy.activation_offloading(activation) is False
    assert (fc1.activation_offloading, fc2.activation_offloading) == (True, None)
    with pytest.raises(TypeError, match="True, False or None"):
        fc2.set_activation_offloading("yes")
    assert moved(model, expected) == 1
    policy.uninstall()
    assert not hasattr(fc1, "set_activation_offloading")


def test_without_transformer_engine_there_is_nothing_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, policy._FUSER, None)
    with pytest.raises(IntegrationError, match="pip install 'transformer-engine"):
        policy.install()
