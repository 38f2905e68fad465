"""Operations that run as one: each one's saved tensors follow its own setting."""

from __future__ import annotations

import sys

import pytest
import small_fuser
import torch
from small_fuser import (
    WIDTH,
    FusedOperation,
    FusibleOperation,
    Sequential,
    choose,
    fused,
    gradient,
    moved,
)

from megatron_offload.errors import IntegrationError
from megatron_offload.frontends.ratio import CPUOffload
from megatron_offload.integrations import transformer_engine as policy

pytestmark = pytest.mark.usefixtures("manager")


def test_hooks_of_others_around_a_run_are_left_all_of_it():
    model = fused()
    expected = gradient(model)
    choose(model, fc1=True, act=False)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    around = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    assert moved(model, expected, around) == 0
    assert len(packed) == 4, "those of the run, and the loss's"


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
    model = fused()
    expected = gradient(model)
    choose(model, fc1=True)
    CPUOffload(0.0, "rest", policy.operation_groups().manager.config)
    assert moved(model, expected, CPUOffload(0.0, "rest")) == 1
    assert CPUOffload(0.0, "rest").last_step.offloaded_bytes == 0


def test_another_fuser_is_refused(monkeypatch):
    with monkeypatch.context() as other:
        other.delattr(small_fuser, "prepare_for_saving")
        with pytest.raises(IntegrationError, match="has no prepare_for_saving"):
            policy.set_activation_offloading(FusibleOperation(WIDTH), True)


def test_a_fuser_that_makes_other_contexts_is_refused():
    original = small_fuser.OperationContext
    model = fused()
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
    model = fused()
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
