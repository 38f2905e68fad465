"""What is recomputed on a real device: every bit, and the memory is there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import assert_nothing_left, assert_same
from test_cuda import MIB, Layer, make_inputs, make_manager, make_model, run_step

from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.recompute.recipes import recomputable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

LAYERS, WIDTH, ROWS = 6, 1024, 2048
MICROBATCHES = 6


class Remade(Layer):
    """A norm, and an activation with dropout that backward recomputes; two groups."""

    def forward(self, x, manager):
        def activation(hidden):
            return F.dropout(F.gelu(hidden), 0.1)

        def make(function, argument):
            return (
                recomputable(function, argument, manager=manager) if manager else function(argument)
            )

        y = start_group(manager, x, "norm") if manager else x
        with manager or torch.enable_grad():
            hidden = self.fc1(make(self.norm, y))
        hidden = commit_group(manager, hidden, "norm") if manager else hidden
        y = start_group(manager, hidden, "act") if manager else hidden
        with manager or torch.enable_grad():
            y = self.fc2(make(activation, y))
        return x + (commit_group(manager, y, "act") if manager else y)


def recomputed_bytes(model, num_microbatches=MICROBATCHES, rows=ROWS):
    """Return what norms and activations make in a step."""
    width = model[0].norm.weight.numel()
    return len(model) * num_microbatches * rows * (width + 4 * width) * 4


def step(model, manager, inputs, **options):
    torch.manual_seed(7)  # of the dropouts
    return run_step(model, manager, inputs, **options)


@pytest.fixture(scope="module")
def trained(deterministic):
    """A model, its inputs, and what a step without offload gives."""
    model = make_model(LAYERS, WIDTH, kind=Remade)
    inputs = make_inputs(model, MICROBATCHES, ROWS)
    return model, inputs, step(model, None, inputs)


SETTINGS = [{"max_inflight_bytes": limit, "prefetch_bytes": limit} for limit in (0, 96 * MIB, None)]
SETTINGS += [{"checking": True}, {"host_memory_bytes": 0}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_bit_is_the_same(trained, settings):
    model, inputs, expected = trained
    manager = make_manager(**settings)
    for _ in range(4):
        assert_same(expected, step(model, manager, inputs))
        assert_nothing_left(manager)
    stats = manager.last_step
    assert stats.refused_recipe_bytes == {}
    assert stats.recomputed_bytes == recomputed_bytes(model)
    assert (stats.reloaded_bytes > 0) == (settings != {"host_memory_bytes": 0})
    manager.close()


def test_what_is_recomputed_takes_no_memory_meanwhile(trained):
    model, _, _ = trained
    inputs = make_inputs(model, 2, 4 * ROWS)
    order = [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    without = make_manager(host_memory_bytes=0)
    peaks = []
    for manager in (None, without):  # neither moves anything
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            step(model, manager, inputs, order=order)
        peaks.append(torch.cuda.max_memory_allocated())
    dropped_bytes = without.last_step.recomputed_bytes
    assert dropped_bytes == recomputed_bytes(model, 2, 4 * ROWS)
    # Less what is recomputed for one layer's backward.
    assert peaks[0] - peaks[1] > dropped_bytes * (1 - 1 / LAYERS)
    without.close()
