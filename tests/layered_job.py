"""A model of layers on the virtual clock, in a context that is given the model."""

from __future__ import annotations

import random

import torch
from programs import make_config
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_clock import MeteredJob, Tick

from megatron_offload import get_act_offloading_ctx_manager

WIDTH = 32


def auto(percent):
    return {"kind": "auto", "most_slowdown_percent": percent}


class TimedMlp(nn.Module):
    """Takes virtual time by its rows."""

    def __init__(self, job):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.job = (job,)  # no module

    def forward(self, x):
        (job,) = self.job
        x = Tick.apply(x, job.backend.advance_compute, job.us_per_row * len(x))
        hidden = job.note(job.note(self.up(x)).sigmoid())
        return job.note(self.down(hidden))


class PlainLayer(nn.Module):
    """One that its library doesn't let be recomputed."""

    mlp_type = TimedMlp

    def __init__(self, job):
        super().__init__()
        self.norm, self.mlp, self.job = nn.LayerNorm(WIDTH), self.mlp_type(job), (job,)

    def forward(self, x):
        (job,) = self.job
        return job.note(x + self.mlp(job.note(self.norm(x))))


class GradientCheckpointingLayer(PlainLayer):
    """One that it does, by the name of the class."""


class RandomLayer(GradientCheckpointingLayer):
    """Draws random numbers of Python."""

    def forward(self, x):
        return super().forward(x) * random.random()


class LayeredNet(nn.Module):
    def __init__(self, job, layer, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(layer(job) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 3)
        self.is_checkpointed = False

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(x)


class LayeredJob(MeteredJob):
    """Steps of any length; each has the bits that it has without a context.

    Args:
        gbps: what copies get, each way.
        capacity_bytes: of the device, for activations.
        us_per_row: what an MLP's forward takes.
        settings: of the configuration.
    """

    def __init__(
        self,
        gbps=1.0,
        capacity_bytes=None,
        *,
        us_per_row=10.0,
        layer=GradientCheckpointingLayer,
        num_layers=6,
        **settings,
    ):
        torch.manual_seed(0)
        self.us_per_row = us_per_row
        config = make_config(max_inflight_bytes=None, prefetch_bytes=None, **settings)
        self.meter_device(config, gbps, capacity_bytes)
        self.net = LayeredNet(self, layer, num_layers)
        self.meter_activations(self.net)
        self.steps = []
        """Of each its rows, its virtual time, and its peak."""
        self.offload = self.context()

    def context(self):
        return get_act_offloading_ctx_manager(self.net, manager=self.manager, min_offload_size=0)

    @property
    def search(self):
        return self.manager.tuner

    def note(self, tensor):
        """Count a new tensor."""
        return self.has_room_for(tensor) if self.us_per_row else tensor  # else it is compared with

    def now(self):
        return self.backend.timestamp(self.backend.compute_stream())

    def step(self, rows=16):
        """Take a step; return its virtual time."""
        x, seed = torch.randn(rows, WIDTH), random.randrange(1000)
        random.seed(seed)
        began_us, self.peak_bytes = self.now(), 0
        with self.offload:
            loss = self.net(x).square().sum()
        loss.backward()
        took_us = self.now() - began_us
        self.steps.append((rows, took_us, self.peak_bytes))
        found = [x.grad for x in self.net.parameters() if x.grad is not None]
        self.net.zero_grad()
        before = self.capacity_bytes, self.most_bytes, self.us_per_row
        self.capacity_bytes, self.us_per_row = None, 0.0
        random.seed(seed)
        self.net(x).square().sum().backward()
        expected = [x.grad for x in self.net.parameters() if x.grad is not None]
        self.net.zero_grad()
        self.capacity_bytes, self.most_bytes, self.us_per_row = before
        assert all(map(torch.equal, found, expected))
        return took_us

    def found(self, rows=(16,), most_steps=150):
        """Take steps until no more are looked at; return the search."""
        draw = random.Random(0)
        for _ in range(most_steps):
            if self.search.is_converged:
                break
            self.step(draw.choice(rows))
        assert self.search.is_converged
        for _ in range(2):  # the first shows rows anew when tensors are needed
            self.step(rows[-1])
        return self.search


BARE_US = 16 * 10.0 * 6 * 3


FULL_BYTES = 79872
"""What a step of 16 rows takes at its peak without offload."""


def target(num_bytes):
    return {"kind": "memory_target", "memory_target": num_bytes}


def found_job(*given, lengths=(16,), **settings):
    """Return a job that has found its rows."""
    job = LayeredJob(*given, **settings)
    job.found(lengths)
    return job


def actions(rows):
    return {(row.site, row.offload or "recompute") for row in rows}
