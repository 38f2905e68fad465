"""What the kernels and the host of a training step take without offload, for layers of many sizes.

    python3 benchmarks/measure_layers.py --output FILE

One GPU and one process take the steps of `bench_peers.py` (megatron-core's GPT with
TransformerEngine's layers, nothing offloaded) for every shape below. Each gives the time of a step,
what the host took to launch it, and, from one more step under torch's profiler, how often each
kernel ran and its microseconds in all. `planning/model_cost.py` was fitted to the kernels, and
`compare_simulation.py` holds it against the steps. A shape that fails or comes too late is said.
``--device cpu --shapes NAME`` takes the steps of tiny layers without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from bench_peers_measure import versions
from bench_peers_modes import Nothing
from bench_peers_worker import Program, build_chunks, join_ranks, prepared_megatron

BASE = {"vocabulary": 32000, "dtype": "bf16", "pp": 1, "vpp": 1, "normalization": "RMSNorm"}
BASE |= {"positions": "rope", "mbs": 1, "microbatches": 2, "seed": 1234, "deterministic": False}
SHAPES = {
    "8192": {"layers": 4, "hidden": 8192, "seq": 4096, "mbs": 2},
    "4096": {"layers": 8, "hidden": 4096, "seq": 8192},
    "2048": {"layers": 16, "hidden": 2048, "seq": 4096, "mbs": 4},
    "launches": {"layers": 16, "hidden": 1024, "seq": 64, "microbatches": 8},
    "2048-small": {"layers": 16, "hidden": 2048, "seq": 4096, "microbatches": 4},
    "4096-small": {"layers": 8, "hidden": 4096, "seq": 4096, "microbatches": 4},
    "8192-small": {"layers": 4, "hidden": 8192, "seq": 2048, "microbatches": 4},
    "2048-long": {"layers": 8, "hidden": 2048, "seq": 16384},
    "4096-wide": {"layers": 8, "hidden": 4096, "seq": 4096, "mbs": 4},
    "8192-long": {"layers": 3, "hidden": 8192, "seq": 8192},
    "gated": {"layers": 8, "hidden": 4096, "seq": 4096, "mbs": 2, "groups": 8, "gated": True},
    "1024": {"layers": 24, "hidden": 1024, "seq": 4096, "microbatches": 4},
}
"""In the order of their worth: time may run out. A head is 128 wide."""
TINY = {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocabulary": 128, "dtype": "fp32"}


class Sized(Nothing):
    """No offload, with the options of `TransformerConfig` that a shape asks for."""

    def transformer_options(self):
        options = {"gated_linear_unit": self.spec.get("gated", False)}
        if "groups" in self.spec:
            options["num_query_groups"] = self.spec["groups"]
        return options


def measure(spec, device, warmup, steps):
    """Return what the steps of one shape took."""
    mode = Sized(spec)
    program = Program(spec, mode, build_chunks(spec, mode, device), device)
    taken = [program.timed_step(number)[:2] for number in range(warmup + steps)]
    result = {
        "step_ms": statistics.median(step_ms for step_ms, _ in taken[warmup:]),
        "host_ms": statistics.median(host_ms for _, host_ms in taken[warmup:]),
        "steps_ms": [step_ms for step_ms, _ in taken],
    }
    if device.type == "cuda":
        result["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        result |= traced(program, warmup + steps)
    return result


def traced(program, number):
    """Return the kernels of one more step: by name how often they ran, and how long in all."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        traced_ms = program.timed_step(number)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("cat") in kinds:
            counts = kernels[event["name"][:160]]
            counts[0] += 1
            counts[1] = round(counts[1] + event["dur"], 2)
    by_time = dict(sorted(kernels.items(), key=lambda item: -item[1][1]))
    return {"traced_ms": traced_ms, "kernels": by_time}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds; no shape begins later")
    args = parser.parse_args()
    started = time.perf_counter()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    on_gpu = args.device == "cuda"
    device = join_ranks(args.device, 120)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    found = {}
    with prepared_megatron(on_gpu=on_gpu, is_deterministic=False):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        for name in args.shapes:
            spec = {**BASE, **(SHAPES[name] if on_gpu else TINY), "kind": "none", "rank": 0}
            spec.setdefault("heads", max(1, spec["hidden"] // 128))
            result = {"error": "no time left"}
            if time.perf_counter() - started < args.limit:
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                try:
                    result = measure(spec, device, args.warmup, args.steps)
                except Exception as error:  # noqa: BLE001 - the other shapes are still worth it
                    result = {"error": f"{type(error).__name__}: {error}"[:300]}
            found[name] = {"sizes": spec, **result}
            said = result.get("error") or f"{result['step_ms']:.1f} ms"
            print(f"{time.perf_counter() - started:6.1f} s  {name}: {said}", flush=True)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    data = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": versions(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("NVTE_", "CUBLAS"))
        },
        "shapes": found,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(data))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
