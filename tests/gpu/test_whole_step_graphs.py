"""A whole step in a CUDA graph: replays have the bits of one without offload, and less memory."""

from __future__ import annotations

import gc

import pytest
import torch
from test_cuda import MIB, Layer, make_inputs, make_manager, make_model

from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.recompute.recipes import recomputable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

LAYERS, WIDTH, ROWS, MICROBATCHES = 8, 512, 1024, 3


class Remade(Layer):
    """A norm and an activation, which backward recomputes, in one group."""

    def forward(self, x, manager):
        def make(function, argument):
            if manager is None:
                return function(argument)
            return recomputable(function, argument, preserve_rng_state=False, manager=manager)

        y = start_group(manager, x, "mlp") if manager else x
        with manager or torch.enable_grad():
            hidden = self.fc1(make(self.norm, y))
            y = self.fc2(make(torch.nn.functional.gelu, hidden))
        return x + (commit_group(manager, y, "mlp") if manager else y)


def take_step(model, manager, inputs):
    """Return the losses; gradients are the parameters'."""
    for parameter in model.parameters():
        parameter.grad.zero_()
    graphs = []
    for x in inputs:
        x = x.clone().requires_grad_()
        if manager:
            manager.begin_chunk()
        for block in model:
            x = block(x, manager)
        graphs.append(x.float().square().mean())
    losses = torch.stack([loss.detach() for loss in graphs])
    del x
    while graphs:
        graphs.pop().backward()
    if manager:
        manager.reset()
    return losses


def captured(model, manager, inputs):
    """Return a graph of a step, its losses, and the bytes that it has reserved."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            take_step(model, manager, inputs)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        losses = take_step(model, manager, inputs)
    return graph, losses, torch.cuda.memory_reserved() - before


def replayed(graph, losses, model):
    graph.replay()
    torch.cuda.synchronize()
    return [losses.clone(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("kind", [Layer, Remade])
@pytest.mark.parametrize("limit", [0, 12 * MIB])
def test_replays_have_every_bit_and_reserve_less(kind, limit):
    model = make_model(LAYERS, WIDTH, kind=kind)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs = make_inputs(model, MICROBATCHES, ROWS)
    without = captured(model, None, inputs)
    manager = make_manager(max_inflight_bytes=limit, prefetch_bytes=limit)
    with_offload = captured(model, manager, inputs)
    stats = manager.last_step
    assert stats.is_captured
    assert stats.reloaded_bytes > 0
    assert (stats.recomputed_bytes > 0) == (kind is Remade)
    gone_bytes = without[2] - with_offload[2]
    assert gone_bytes >= 0.8 * (stats.peak_released_bytes - 2 * limit)
    for number in range(20):
        inputs.normal_(generator=torch.Generator("cuda").manual_seed(number))
        expected = replayed(*without[:2], model)
        if number % 5 == 0:
            with torch.no_grad():  # an evaluation
                take = inputs[0]
                for block in model:
                    take = block(take, manager)
        if number == 10:  # a step that is in no graph, with host memory of its own
            take_step(model, manager, inputs)
            assert not manager.last_step.is_captured
        found = replayed(*with_offload[:2], model)
        assert all(map(torch.equal, expected, found)), f"replay {number}"
        assert expected[0].isfinite().all()
    del without, with_offload
    manager.close()
