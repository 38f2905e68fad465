"""Steps of programs with recipes, compared with those of the same programs without."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from programs import Times, assert_nothing_left, assert_same, in_group

from megatron_offload.recompute.recipes import recomputable

ROWS, WIDTH = 16, 32
TENSOR_BYTES = ROWS * WIDTH * 4


save = Times.apply


def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()


def make(manager, function, *inputs):
    return recomputable(function, *inputs, manager=manager) if manager else function(*inputs)


def run(manager, forward, *, backward=torch.Tensor.backward):
    """Return the loss and the input's gradient of one step of ``forward(manager, x)``."""
    torch.manual_seed(1)
    leaf = rows()
    with manager.step() if manager else nullcontext():
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


def one_group(inner):
    """Return a forward of one group, which runs ``inner(manager, x)``."""
    return lambda manager, x: in_group(manager, lambda x: inner(manager, x), x)


OTHER_BITS = "it was compared when it was recomputed, and had other bits"


def refusals(manager, forward):
    """Take two steps, whose bits are those of none; return why the second made nothing again."""
    stats = check(manager, forward, num_steps=2)
    assert stats.recomputed_bytes == 0
    return stats.refused_recipe_bytes


def of(function, *, saves=True):
    """Return a forward of one group that saves what ``function`` makes of what is saved."""
    return one_group(
        lambda manager, x: save(save(x, x), make(manager, function, x if saves else x * 1.0))
    )
