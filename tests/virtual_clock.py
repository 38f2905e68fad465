"""A training program whose compute takes virtual time, the same in every run."""

from __future__ import annotations

import torch
from programs import assert_nothing_left, assert_same, in_group, make_config, run_step

from megatron_offload.backends.base import DeviceMemory
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.core.profile import RunShape
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.live_bytes import LiveActivationMeter

NUM_MICROBATCHES = 6
RUN = RunShape(num_microbatches=NUM_MICROBATCHES)
ORDER = [(action, microbatch) for action in "FB" for microbatch in range(NUM_MICROBATCHES)]


class Tick(torch.autograd.Function):
    """Takes virtual time forward and backward; changes nothing."""

    @staticmethod
    def forward(ctx, x, clock, duration_us):
        ctx.clock, ctx.duration_us = clock, duration_us
        clock(duration_us)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.clock(2 * ctx.duration_us)
        return grad, None, None


class TimedBlock(torch.nn.Module):
    """A norm and a linear layer, each a group that takes virtual time."""

    def __init__(self, width, duration_us):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.fc = torch.nn.Linear(width, width)
        self.duration_us = duration_us
        self.clock = lambda duration_us: None

    def forward(self, x, manager):
        for name, module in (("norm", self.norm), ("fc", self.fc)):

            def run(x, module=module):
                return module(Tick.apply(x, self.clock, self.duration_us)).square()

            x = in_group(manager, run, x, name)
        return x


class VirtualJob:
    """A program on the virtual clock; each of its steps is compared with the one without offload.

    Args:
        gbps: what copies really get, each way.
        group_us: what the forward of a group takes; backward takes twice that.
        settings: of the configuration.
    """

    def __init__(self, gbps, *, group_us=20.0, **settings):
        torch.manual_seed(0)
        blocks = [TimedBlock(32, group_us) for _ in range(4)]
        self.model = torch.nn.ModuleList(blocks)
        self.expected = run_step(self.model, None, ORDER)
        config = make_config(max_inflight_bytes=None, prefetch_bytes=None, **settings)
        update = {"d2h_gbps": gbps, "h2d_gbps": gbps}
        simulated = config.simulated.model_copy(update=update)
        self.backend = SimulatedBackend(simulated)
        config = config.model_copy(update={"simulated": simulated})
        self.manager = PipelineOffloadManager(config, backend=self.backend)
        self.meter = LiveActivationMeter(self.model.parameters())
        self.manager.observers.append(self.meter)
        for block in blocks:
            block.clock = self.backend.advance_compute
        self.moved_bytes = []
        """Of each step so far."""

    def step(self):
        assert_same(self.expected, run_step(self.model, self.manager, ORDER))
        assert_nothing_left(self.manager)
        self.moved_bytes.append(self.manager.last_step.offloaded_bytes)

    def warmed_up(self):
        for _ in range(2):
            self.step()
        self.moved_bytes.clear()
        return self

    def step_us(self):
        """Take a step; return its virtual time."""
        began_us = self.backend.timestamp(self.backend.compute_stream())
        self.step()
        return self.backend.timestamp(self.backend.compute_stream()) - began_us


class MeteredJob:
    """A job on a virtual clock whose device has so much memory for activations, and counts them."""

    def meter_device(self, config, gbps, capacity_bytes):
        """Set the backend; the manager and the meter are still to come."""
        self.capacity_bytes, self.peak_bytes, self.most_bytes = capacity_bytes, 0, 0
        update = {"d2h_gbps": gbps, "h2d_gbps": gbps, "poison": False, "check_hazards": False}
        self.backend = SimulatedBackend(config.simulated.model_copy(update=update))
        self.backend.capacity_bytes = lambda: self.capacity_bytes
        self.backend.memory = lambda: DeviceMemory(self.meter.live_bytes, self.meter.peak_bytes)
        self.backend.trim_device = lambda: self.meter.reset_peak()
        self.manager = PipelineOffloadManager(config, backend=self.backend)

    def meter_activations(self, model):
        """Count from here on."""
        self.meter = LiveActivationMeter(model.parameters())
        self.meter.needs_groups = False
        self.manager.observers.append(self.meter)

    def has_room_for(self, tensor):
        """Count a new tensor."""
        self.meter.observe(tensor)
        live_bytes = self.meter.live_bytes
        if self.capacity_bytes is not None and live_bytes > self.capacity_bytes:
            raise torch.OutOfMemoryError("the simulated device is full")
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        self.most_bytes = max(self.most_bytes, live_bytes)
        return tensor
