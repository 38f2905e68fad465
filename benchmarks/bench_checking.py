#!/usr/bin/env python3
"""What checking mode costs: the same steps without and with it, side by side.

    python3 benchmarks/bench_checking.py --output checking.json                  # one GPU
    python3 benchmarks/bench_checking.py --device cpu --output checking.json     # no GPU

A stack of MLPs, two microbatches in flight, all saved tensors moved. Runs alternate; the result is
the ratio of the median step times.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from megatron_offload.config import OffloadConfig
from megatron_offload.engine.boundary import commit_group, start_group
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.files.text import replace_text


def step(layers, manager, x):
    losses = []
    for _ in range(2):
        y = x.clone().requires_grad_()
        manager.begin_chunk()
        for first, second in layers:
            y = start_group(manager, y, "mlp")
            with manager:
                z = F.linear(F.gelu(F.linear(y, first)), second)
            y = y + commit_group(manager, z, "mlp")
        losses.append(y.float().square().mean())
    while losses:
        losses.pop(0).backward()
    manager.reset()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=5, help="measured, in each of three runs")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    width, rows, count = (4096, 8192, 4) if on_gpu else (64, 64, 4)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def parameter(*shape):
        return torch.nn.Parameter(torch.randn(shape, device=options.device, dtype=dtype) * 0.02)

    layers = [(parameter(4 * width, width), parameter(width, 4 * width)) for _ in range(count)]
    x = torch.randn(rows, width, device=options.device, dtype=dtype)
    times, moved_bytes = {False: [], True: []}, 0
    managers = {
        checks: PipelineOffloadManager(
            OffloadConfig(
                backend="cuda" if on_gpu else "simulated",
                min_tensor_bytes=0,
                host_memory_bytes=8 * 2**30 if on_gpu else 2**28,
                checking=checks,
            )
        )
        for checks in (False, True)
    }
    for run in range(4):  # the first is there for what is learned
        for checks, manager in managers.items():
            for _ in range(options.steps):
                if on_gpu:
                    torch.cuda.synchronize()
                started = time.perf_counter()
                step(layers, manager, x)
                if on_gpu:
                    torch.cuda.synchronize()
                if run:
                    times[checks].append(time.perf_counter() - started)
            moved_bytes = manager.last_step.offloaded_bytes
    medians = {checks: statistics.median(values) for checks, values in times.items()}
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu, simulated",
        "torch": torch.__version__,
        "moved_bytes_per_step": moved_bytes,
        "step_ms": {"without": 1e3 * medians[False], "with": 1e3 * medians[True]},
        "ratio": medians[True] / medians[False],
        "step_times_s": {"without": times[False], "with": times[True]},
    }
    replace_text(options.output, json.dumps(result, indent=2) + "\n")
    print(f"{moved_bytes / 2**30:.2f} GiB a step, {result['step_ms']}, ratio {result['ratio']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
