"""A training program whose compute takes virtual time, the same in every run."""

from __future__ import annotations

import torch

from megatron_offload.backends.base import DeviceMemory
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.observe.live_bytes import LiveActivationMeter


class Tick(torch.autograd.Function):
    """Takes virtual time forward and, so many times as long, backward; changes nothing."""

    @staticmethod
    def forward(ctx, x, clock, duration_us, times=2):
        ctx.clock, ctx.duration_us = clock, times * duration_us
        clock(duration_us)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.clock(ctx.duration_us)
        return grad, None, None, None


class MeteredJob:
    """A job on a virtual clock whose device has so much memory for activations, and counts them."""

    def meter_device(self, config, gbps, capacity_bytes):
        """Set the backend; the manager and the meter are still to come."""
        self.capacity_bytes, self.num_ooms = capacity_bytes, 0
        self.peak_bytes = self.most_bytes = 0
        update = {"d2h_gbps": gbps, "h2d_gbps": gbps, "poison": False, "check_hazards": False}
        self.backend = SimulatedBackend(config.simulated.model_copy(update=update))
        has_clock = {"simulated": config.simulated.model_copy(update={"host_time": True})}
        self.backend.capacity_bytes = lambda: self.capacity_bytes
        self.backend.memory = lambda: DeviceMemory(
            self.meter.live_bytes, self.meter.peak_bytes, self.most_bytes, self.num_ooms
        )
        self.backend.trim_device = lambda: self.meter.reset_peak()
        config = config.model_copy(update=has_clock)
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
            self.num_ooms += 1
            raise torch.OutOfMemoryError("the simulated device is full")
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        self.most_bytes = max(self.most_bytes, live_bytes)
        return tensor
