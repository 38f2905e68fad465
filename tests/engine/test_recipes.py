"""What a cheap function made is dropped, and made again in backward: every bit as it was."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from programs import (
    KIB,
    TIMINGS,
    assert_nothing_left,
    assert_same,
    in_group,
    make_manager,
)

from megatron_offload.errors import CorruptionError

ROWS, WIDTH = 16, 32
TENSOR_BYTES = ROWS * WIDTH * 4


class Save(torch.autograd.Function):
    """Saves its second input alone, and hands its first on; backward multiplies by it."""

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        for saved in ctx.saved_tensors:
            grad = grad * saved
        return grad, *[None] * len(ctx.saved_tensors)


def save(x, *tensors):
    return Save.apply(x, *(tensor.detach() for tensor in tensors))


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()


def make(manager, function, *inputs, **options):
    return manager.recomputable(function, *inputs, **options) if manager else function(*inputs)


def run(manager, forward, *, backward=torch.Tensor.backward):
    """Return the loss and the input's gradient of one step of ``forward(manager, x)``."""
    torch.manual_seed(1)
    leaf = rows()
    with manager.step() if manager else nullcontext():
        if manager:
            manager.begin_chunk()
        loss = forward(manager, leaf * 1.0).square().mean()
        torch.manual_seed(2)  # backward has other random numbers before it than forward had
        backward(loss)
        value = loss.detach().clone()
        del loss
    return [value, leaf.grad, torch.rand(1)]


def check(manager, forward, *, num_steps=3, **options):
    """Take steps with the bits of none; return the last one's counters."""
    expected = run(None, forward, **options)
    for _ in range(num_steps):
        assert_same(expected, run(manager, forward, **options))
        assert_nothing_left(manager)
    return manager.last_step


def dropout_of_norm(x):
    return F.dropout(F.layer_norm(x, (WIDTH,)), 0.3)


def norm_then_linear(manager, x):
    """A norm with dropout in one group, what uses it in the next, and an activation there."""
    weight = torch.full((WIDTH, WIDTH), 0.1).requires_grad_()
    y = in_group(manager, lambda x: make(manager, dropout_of_norm, x), x, "norm")

    def mlp(y):
        return make(manager, F.gelu, y @ weight) @ weight

    return x + in_group(manager, mlp, y, "mlp")


BUDGETS = [
    {},
    {"checking": True},
    {"max_inflight_bytes": 2 * TENSOR_BYTES, "prefetch_bytes": 3 * TENSOR_BYTES},
    {"host_memory_bytes": 0},
    {"retained_device_bytes": 64 * KIB},
]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("settings", BUDGETS, ids=str)
def test_what_is_made_again_has_the_same_bits(timing, settings):
    stats = check(make_manager(timing, **settings), norm_then_linear)
    assert stats.by_name["mlp"].remade_bytes == 2 * TENSOR_BYTES
    assert stats.refused_recipe_bytes == {}


def test_its_memory_is_free_from_the_commit_on():
    manager = make_manager()
    manager.begin_chunk()
    x = rows() * 1.0
    y = in_group(manager, lambda x: make(manager, F.gelu, save(x, x)), x, "act")
    before = y.untyped_storage()._weak_ref()
    z = in_group(manager, lambda y: save(y, y), y, "user")
    del y
    assert torch.UntypedStorage._new_with_weak_ptr(before) is None
    z.sum().backward()


@pytest.mark.parametrize("wrong", ["eps", "random state"])
def test_checking_mode_names_a_wrong_recipe(wrong):
    def forward(manager, x):
        def mlp(x):
            y = F.dropout(F.layer_norm(save(x, x), (WIDTH,), eps=1e-5), 0.3)
            if manager and wrong == "eps":
                manager.made_by(y, lambda x: F.layer_norm(x, (WIDTH,), eps=1e-6), x, unit="norm")
            elif manager:
                manager.made_by(y, dropout_of_norm, x, unit="norm")
            return save(y, y)

        return in_group(manager, mlp, x)

    with pytest.raises(CorruptionError, match=r"was made again \('norm'\) with other bits"):
        run(make_manager(checking=True), forward)


def test_another_kind_of_tensor_is_refused():
    def forward(manager, x):
        def mlp(x):
            y = F.gelu(save(x, x))
            manager.made_by(y, lambda x: x.double(), x, unit="act")
            return save(y, y)

        return in_group(manager, mlp, x)

    with pytest.raises(CorruptionError, match=r"float64.*float32"):
        run(make_manager(), forward)


def test_what_it_is_made_of_comes_back_before_it():
    def forward(manager, x):
        y = in_group(manager, lambda x: make(manager, F.gelu, save(x, x)), x, "source")
        z = y * 1.0
        for name in ("between", "between"):
            z = in_group(manager, lambda z: save(z, z.detach() * 1.0), z, name)
        z = in_group(manager, lambda z: save(z, y), z, "user")
        return in_group(manager, lambda z: save(z, z.detach() * 1.0), z, "last")

    manager = make_manager("eager", prefetch_bytes=2 * TENSOR_BYTES)
    stats = check(manager, forward)
    source, *_, user, _ = manager.last_profile.groups
    assert (source.num_bytes, user.num_bytes) == (2 * TENSOR_BYTES, 0)
    (unit,) = user.remade
    assert (unit.num_bytes, unit.needs) == (TENSOR_BYTES, (source.key,))
    # By the order of backwards alone those between would take the room.
    assert stats.by_name["source"].num_late_reloads == 0
    assert stats.by_name["source"].reloaded_bytes == 2 * TENSOR_BYTES
