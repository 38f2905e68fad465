"""Trains under each schedule of ``torch.distributed.pipelining`` without and with offload.

Started by torchrun: ``pipelining_worker.py CASE [CASE ...]``, a case being a schedule's name, with
``/`` and a copy timing behind it where the device is simulated. Rank 0 prints, for each case, what
every rank found, as JSON. With ``--device cuda`` each rank takes a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from megatron_offload.config import OffloadConfig, SimulatedConfig
from megatron_offload.integrations.torch_pipelining import offload_pipeline

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
STEPS = 4


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(x)
        y = y * y.mean(dim=-1, keepdim=True)
        return x + self.second(nn.functional.gelu(self.first(y)))


def indices(name, rank, size):
    """Return the stages of a rank, and how many there are."""
    if name in SINGLE:
        return [rank], size
    if name in V_SHAPED:
        return [rank, 2 * size - 1 - rank], 2 * size
    return [rank, rank + size], 2 * size


def build(name, device, options):
    """Return a schedule and its stages' modules."""
    kind = getattr(pipelining, name, None) or getattr(schedules, name)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, num_stages = indices(name, rank, size)
    modules, stages = [], []
    for index in mine:
        torch.manual_seed(index)
        module = nn.Sequential(*(Layer(options.width) for _ in range(options.layers)))
        modules.append(module.to(device, options.dtype))
        stages.append(PipelineStage(modules[-1], index, num_stages, device))

    def loss_of(output, target):
        return (output.float() - target).square().mean()

    schedule = kind(
        stages[0] if name in SINGLE else stages,
        n_microbatches=options.microbatches,
        loss_fn=loss_of,
    )
    return schedule, stages, modules


def train(name, device, options, config):
    """Return losses and gradients of every step, and what was offloaded."""
    schedule, stages, modules = build(name, device, options)
    offload = offload_pipeline(schedule, config=config) if config is not None else None
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    results, moved, late = [], 0, 0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        shape = (options.microbatches * options.batch, options.rows, options.width)
        x = torch.randn(shape, generator=generator).to(device, options.dtype)
        target = torch.randn(shape, generator=generator).to(device)
        for module in modules:
            module.zero_grad()
        losses = []
        arguments = (x.requires_grad_(),) if has_first else ()
        labels = {"target": target, "losses": losses} if has_last else {}
        if step == 2 and name not in V_SHAPED:  # torch's own can't evaluate under those
            with torch.no_grad():
                schedule.eval(*(t.detach() for t in arguments), **labels)
            losses.clear()
        schedule.step(*arguments, **labels)
        results += [loss.detach().clone() for loss in losses]
        results += [p.grad.clone() for module in modules for p in module.parameters()]
        if offload is not None:
            moved += offload.last_step.reloaded_bytes
            late = offload.last_step.num_late_reloads
    if offload is not None:
        left = {k: v for k, v in offload.manager.state_of().items() if v}
        assert not left, left
        assert offload.last_step.recomputed_bytes > 0
        offload.remove()
        assert "step" not in vars(schedule)
        assert not any("forward_one_chunk" in vars(stage) for stage in stages)
    return results, moved, late


def config_of(timing, options):
    everything = {"policy": "modules", "min_tensor_bytes": 0, "recompute": ("norm",)}
    if options.device == "cuda":
        budgets = {
            "max_inflight_bytes": options.inflight,
            "prefetch_bytes": options.prefetch or "128MiB",
        }
        return OffloadConfig(backend="cuda", **everything, **budgets)
    return OffloadConfig(
        **everything,
        backend="simulated",
        simulated=SimulatedConfig(copy_timing=timing),
        max_inflight_bytes=0,
        prefetch_bytes=options.prefetch or "16KiB",
        host_memory_bytes="1GiB",
        host_slab_bytes="1MiB",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--inflight", default="64MiB")
    parser.add_argument("--prefetch")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    findings = {}
    for case in options.cases:
        name, _, timing = case.partition("/")
        expected, _, _ = train(name, device, options, None)
        actual, moved, late = train(name, device, options, config_of(timing or "late", options))
        mine = {
            "same": len(expected) == len(actual)
            and all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)),
            "num_results": len(expected),
            "gradients_are_real": all(bool(result.any()) for result in expected),
            "reloaded_bytes": moved,
            "late_in_last_step": late,
        }
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        findings[case] = found
    if dist.get_rank() == 0:
        print(json.dumps(findings))  # noqa: T201 - a worker's report
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
