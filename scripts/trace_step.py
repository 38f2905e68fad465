"""Trace one 1F1B step of a small transformer-like stack: a Chrome trace, a picture, and numbers.

python scripts/trace_step.py --output runs/trace_step

On CUDA where there is a device. Else on the simulated device's virtual clock: compute takes the
time it is told to, copies the time of their bytes, and nothing depends on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron_offload.backends import create_backend
from megatron_offload.backends.simulated import SimulatedBackend
from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.core.trace import StepTrace
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.errors import ConfigError
from megatron_offload.observe.trace_step import trace_step
from megatron_offload.report.plots import plot_timeline

NUM_LAYERS, NUM_MICROBATCHES, DEPTH = 4, 6, 3
GBPS, WORK_US = 2.5, 100.0
"""Of the simulated device: its bandwidth each way, and the time of an MLP."""

ADVANCE = Callable[[float], None]


class Work(torch.autograd.Function):
    """Identity that takes virtual time, twice as much in backward as in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, advance: ADVANCE, duration_us: float) -> torch.Tensor:
        ctx.advance, ctx.duration_us = advance, duration_us
        advance(duration_us)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.advance(2 * ctx.duration_us)
        return grads[0], None, None


class Layer(nn.Module):
    """Attention and MLP, each with its norm as a group; `Work` stands for the time they take."""

    def __init__(self, width: int, heads: int, advance: ADVANCE, work_us: float) -> None:
        super().__init__()
        self.heads, self.advance, self.work_us = heads, advance, work_us
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        x = Work.apply(self.attn_norm(x), self.advance, 0.7 * self.work_us)
        rows, width = x.shape
        q, k, v = self.qkv(x).view(1, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(rows, width))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        x = Work.apply(self.mlp_norm(x), self.advance, self.work_us)
        return self.fc2(functional.gelu(self.fc1(x)))

    def forward(self, x: torch.Tensor, manager: PipelineOffloadManager) -> torch.Tensor:
        for name, module in (("attention", self.attention), ("mlp", self.mlp)):
            y = start_group(manager, x, name)
            with manager:
                y = module(y)
            x = x + commit_group(manager, y, name)
        return x


def one_forward_one_backward(num_microbatches: int, depth: int) -> list[tuple[str, int]]:
    order = [("F", m) for m in range(depth)]
    for m in range(depth, num_microbatches):
        order += [("B", m - depth), ("F", m)]
    return order + [("B", m) for m in range(num_microbatches - depth, num_microbatches)]


def run_step(
    model: nn.ModuleList,
    manager: PipelineOffloadManager,
    inputs: torch.Tensor,
    order: list[tuple[str, int]],
) -> None:
    model.zero_grad()
    losses = {}
    with manager.step():
        for action, microbatch in order:
            if action == "B":
                losses.pop(microbatch).backward()
                continue
            manager.begin_chunk()
            x = inputs[microbatch].clone().requires_grad_()
            for layer in model:
                x = layer(x, manager)
            losses[microbatch] = x.float().square().mean()


def trace(backend_name: str) -> tuple[StepTrace, str]:
    on_gpu = backend_name == "cuda" or (backend_name == "auto" and torch.cuda.is_available())
    config = OffloadConfig(
        backend="cuda" if on_gpu else "simulated",
        min_tensor_bytes=0,
        host_memory_bytes="32GiB" if on_gpu else "256MiB",
        host_slab_bytes="1GiB" if on_gpu else "16MiB",
        simulated=SimulatedConfig(d2h_gbps=GBPS, h2d_gbps=GBPS),
    )
    backend = create_backend(config)
    advance: ADVANCE = backend.advance_compute if isinstance(backend, SimulatedBackend) else abs
    width, rows = (8192, 4096) if on_gpu else (64, 128)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    heads = width // 128 if on_gpu else 2
    layers = (Layer(width, heads, advance, WORK_US) for _ in range(NUM_LAYERS))
    model = nn.ModuleList(layers).to(device, dtype)
    inputs = torch.randn(NUM_MICROBATCHES, rows, width).to(device, dtype)
    order = one_forward_one_backward(NUM_MICROBATCHES, DEPTH)
    manager = PipelineOffloadManager(config, backend=backend)
    for _ in range(3):  # the order of backwards is learned, and the allocator has its memory
        run_step(model, manager, inputs, order)
    with trace_step(manager) as result:
        run_step(model, manager, inputs, order)
    manager.close()
    where = torch.cuda.get_device_name() if on_gpu else "simulated device"
    return result, f"{NUM_LAYERS} layers, {NUM_MICROBATCHES} microbatches in 1F1B, {where}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace one step and draw its timeline.")
    parser.add_argument("--output", type=Path, default=Path("runs/trace_step"))
    parser.add_argument("--backend", choices=["auto", "cuda", "simulated"], default="auto")
    args = parser.parse_args()
    result, title = trace(args.backend)
    result.write_chrome(args.output / "trace.json")
    print("\n".join(result.summary().facts()))
    print(f"wrote {args.output / 'trace.json'}")
    try:
        plot_timeline([result], args.output / "timeline.png", title)
        print(f"wrote {args.output / 'timeline.png'}")
    except ConfigError as error:
        print(f"no picture: {error}")


if __name__ == "__main__":
    main()
