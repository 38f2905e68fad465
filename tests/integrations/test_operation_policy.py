"""A decision for each operation: exactly its tensors are offloaded, and the bits stay."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from programs import TWO_TIMINGS, Keep, make_manager
from small_fuser import BYTES, CHOICES, ROWS, WIDTH, choose, fused, gradient, moved, separate
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from megatron_offload.frontends.whole_model import OffloadActivations
from megatron_offload.integrations import transformer_engine as policy

OF_BOTH = pytest.mark.parametrize("make_model", [separate, fused])


@OF_BOTH
@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("timing", TWO_TIMINGS)
def test_exactly_the_chosen_operations_move(chosen, make_model, manager):
    model = make_model()
    expected = gradient(model)
    choose(model, **dict.fromkeys(chosen, True))
    for _ in range(3):
        assert moved(model, expected) == len(chosen)


@OF_BOTH
@pytest.mark.parametrize("kept", CHOICES)
def test_exactly_the_chosen_operations_are_kept_inside_an_offloaded_model(
    kept, make_model, manager
):
    model = make_model()
    expected = gradient(model)
    choose(model, **dict.fromkeys(kept, False))
    offload = OffloadActivations(min_offload_size=0, manager=make_manager())
    for _ in range(2):
        assert torch.equal(gradient(model, offload), expected)
        assert offload.end_step() == (len(kept) < 3)
        assert offload.last_step.offloaded_bytes == (3 - len(kept)) * BYTES
    assert not manager.decisions.groups(), "what moves anyway moves with what surrounds it"


@OF_BOTH
def test_the_innermost_setting_wins(make_model, manager):
    model = make_model()
    expected = gradient(model)
    for outer, inner, number in (
        (True, False, 2), (False, True, 1), (False, None, 0), (None, None, 0),
    ):  # fmt: skip
        policy.set_activation_offloading(model, outer)
        choose(model, act=inner)
        assert policy.activation_offloading(model) is outer
        assert moved(model, expected) == number
    choose(model, act=True)
    alone = model.operations[1]
    assert moved(alone, gradient(alone)) == 1, "called alone"


@OF_BOTH
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_keeps_what_is_its_own(use_reentrant, make_model, manager):
    model = make_model()

    def outer(x):
        return checkpoint(model, x * 2.0, use_reentrant=use_reentrant)

    expected = gradient(outer)
    choose(model, fc1=False, act=True)
    for _ in range(2):
        assert moved(outer, expected) == 0
    assert not manager.decisions.groups()


def test_a_setting_survives_copies_pickles_and_loaded_weights(manager):
    model = separate()
    expected = gradient(model)
    choose(model, act=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - ours
        other.load_state_dict(model.state_dict())
        assert not model.state_dict()
        assert policy.activation_offloading(other.operations[1]) is True
        assert moved(other, expected) == 1


@OF_BOTH
def test_an_error_in_forward_restores_what_surrounds_it(make_model, manager):
    model = make_model()
    expected = gradient(model)
    policy.set_activation_offloading(model, True)
    choose(model, fc1=True, act=True, fc2=False)

    def fail(*_):
        raise RuntimeError("broken on purpose")

    hooked = (model, *model.operations) if make_model is separate else (model,)
    for broken, prepend in ((one, prepend) for one in hooked for prepend in (True, False)):
        handle = broken.register_forward_pre_hook(fail, prepend=prepend)
        with handle, pytest.raises(RuntimeError, match="on purpose"):
            gradient(model)
        assert moved(model, expected) == 2
    model.operations[2].width = WIDTH + 1
    with pytest.raises(RuntimeError, match="must match"):
        gradient(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not vars(policy._entered).get("stack")
    model.operations[2].width = WIDTH
    assert moved(model, expected) == 2


def test_without_grad_nothing_is_entered(manager):
    model = separate()
    policy.set_activation_offloading(model, True)
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))
    assert not manager.decisions.groups()
    assert not vars(policy._entered).get("stack")


def save_in(x, *tensors):
    return Keep.apply(x, [], *tensors)


def ended_step(run):
    """Run in an offloaded forward; return its step, and when its copies to the host end."""
    offload = OffloadActivations(min_offload_size=0, manager=make_manager())
    manager, backend = offload.manager, offload.manager.backend
    with offload:
        y = run(torch.ones(3, requires_grad=True), manager)
    ended_us = backend.timestamp(backend.d2h_stream)
    y.sum().backward()
    assert offload.end_step()
    return offload.last_step, ended_us


def save(*tensors):
    step, _ = ended_step(lambda x, _: save_in(x, *tensors))
    return step.offloaded_bytes


def test_marked_tensors_are_kept_until_the_mark_is_undone():
    tensors = [torch.randn(64), torch.randn(128), TwoTensor(torch.randn(16), torch.randn(16))]
    policy.mark_not_offload(tensors[0], None, tensors[2])
    assert save(*tensors, torch.randn(8)) == 4 * (128 + 8)
    policy.mark_activation_offload(None, *tensors)
    assert save(*tensors) == 4 * (64 + 128 + 2 * 16)
    tensors[1]._TE_do_not_offload = True  # TransformerEngine's own
    assert save(*tensors) == 4 * (64 + 2 * 16)


def test_operations_that_save_for_each_other_are_marked_by_their_settings():
    model = separate()
    choose(model, fc1=False, fc2=True)
    tensors = torch.randn(64), torch.randn(128), torch.randn(256)
    for operation, tensor in zip(model.operations, tensors, strict=True):
        policy.maybe_mark_activation_offload(operation, tensor, None)
    assert save(*tensors) == 4 * (128 + 256)


@pytest.mark.parametrize("tells", [True, False])
def test_a_copy_may_begin_when_its_producer_is_done(tells):
    def one(x, manager):
        first = torch.randn(1 << 10)
        if tells:
            policy.start_offload(first, None)
        manager.backend.advance_compute(1000.0)
        return save_in(x, first)

    def two(x, manager):
        first = torch.randn(1 << 10)
        if tells:
            policy.start_offload(first, None)
        y = save_in(x, first)
        manager.backend.advance_compute(1000.0)  # work that comes later in the same group
        z = save_in(y, torch.randn(4))
        if tells:
            policy.start_offload()
        return z

    step, ended_us = ended_step(one)
    assert (ended_us < 1000.0) == tells
    assert step.reloaded_bytes > 0
    assert ended_step(two)[1] >= 1000.0, "the second tensor's copy waits for its own producer"


def test_a_storage_of_which_only_a_part_is_ready_waits_for_the_rest():
    def run(x, manager):
        first, second = torch.randn(2, 512).unbind()
        policy.start_offload(first)
        y = save_in(x, first)
        manager.backend.advance_compute(1000.0)
        second.data.copy_(torch.randn(512))
        return save_in(y, second.detach())

    assert ended_step(run)[1] >= 1000.0


@pytest.mark.parametrize("change", ["in place", "saved before"])
def test_a_mark_that_went_stale_is_not_heeded(change):
    def run(x, manager):
        first = torch.randn(1 << 10)
        policy.start_offload(first)
        if change == "in place":
            first.add_(1.0)
        else:
            assert save_in(x, first) is not None  # and its graph is dropped
            manager.window.drain()
        manager.backend.advance_compute(1000.0)
        return save_in(x, first)

    assert ended_step(run)[1] >= 1000.0


def test_start_offload_does_nothing_where_nothing_moves():
    tensor = torch.randn(64)
    policy.start_offload(tensor, None)
    assert not vars(tensor)


@pytest.mark.usefixtures("manager")
def test_bad_arguments():
    with pytest.raises(TypeError, match="expected a module"):
        policy.set_activation_offloading(torch.relu, True)
    with pytest.raises(TypeError, match="True, False or None"):
        policy.set_activation_offloading(nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match="exist"):
        policy.operation_groups(manager=make_manager())
