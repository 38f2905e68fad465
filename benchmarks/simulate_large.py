"""Simulate jobs with thousands of GPUs, and say what that takes in time and memory.

python benchmarks/simulate_large.py --output docs/benchmarks/simulation_llama3_405b.json

The first job is configs/models/llama3_405b.yaml: Llama 3 405B on 16,384 GPUs as its report has it
(arXiv:2407.21783), with 400 TFLOP/s a GPU. One step of that length is what the achieved share is
fitted to. The second has 1,024 pipeline ranks that all differ.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import time
from datetime import UTC, datetime
from pathlib import Path

from megatron_offload.core.trace import PIPELINE_WAIT
from megatron_offload.machine.profile import Machine
from megatron_offload.planning.description import (
    fit,
    job_from_model,
    load_description,
)
from megatron_offload.planning.job import GroupWork, Job, RankSettings, StageWork
from megatron_offload.planning.parameters import weights_of
from megatron_offload.planning.schedule import make_schedule
from megatron_offload.planning.simulate import RELEASE, RELOAD, simulate

GIB, MIB = 2**30, 2**20
NUM_RANKS, NUM_MICROBATCHES = 1024, 32
"""Of the second job."""
NUM_GPUS, DATA_PARALLEL, REPORTED_TFLOPS = 16_384, 128, 400.0

LLAMA_3_405B = load_description(
    Path(__file__).parent.parent / "configs" / "models" / "llama3_405b.yaml"
)


def reported_step_us() -> float:
    """Return the step that the report's TFLOP/s make: 6 FLOP a weight and token, and attention."""
    model = LLAMA_3_405B.model
    tokens = model.sequence * model.num_microbatches * DATA_PARALLEL
    weights = sum(
        weights_of(model, rank).number * model.tensor_parallel
        for rank in range(model.pipeline_parallel)
    )
    flop = 6.0 * weights * tokens + 6.0 * model.layers * model.hidden * model.sequence * tokens
    return flop / (NUM_GPUS * REPORTED_TFLOPS * 1e6)


def row(name: str, simulation) -> dict:
    ranks = simulation.ranks
    return {
        "settings": name,
        "step_ms": round(simulation.step_us / 1e3, 1),
        "allocated_gib": [round(rank.peak_device_bytes / GIB, 1) for rank in ranks],
        "host_gib_per_gpu": [round(rank.peak_host_bytes / GIB, 1) for rank in ranks],
        "moved_gib": [round(rank.offloaded_bytes / GIB, 1) for rank in ranks],
        "stall_ms": {
            cause: round(max(rank.stall_us[cause] for rank in ranks) / 1e3, 1)
            for cause in (PIPELINE_WAIT, RELEASE, RELOAD)
        },
        "late": sum(rank.num_late for rank in ranks),
    }


def llama() -> dict:
    step_us = reported_step_us()
    machine = LLAMA_3_405B.machine
    model = fit(LLAMA_3_405B.model, step_us, machine)
    job = job_from_model(model, machine)
    rows = [row("no offload", simulate(job))]
    for inflight, prefetch in ((1024, 1024), (2048, 2048), (4096, 4096)):
        settings = RankSettings(max_inflight_bytes=inflight * MIB, prefetch_bytes=prefetch * MIB)
        rows.append(row(f"everything, {inflight} / {prefetch} MiB", simulate(job, settings)))
    return {
        "what": "prediction, not measured: Llama 3 405B, TP 8, PP 16, DP 128, 16,384 GPUs",
        "reported_step_ms": round(step_us / 1e3, 1),
        "achieved_share": round(model.achieved_share, 4),
        "rows": rows,
    }


def deep_job(num_ranks: int, num_microbatches: int) -> Job:
    """Return a pipeline whose ranks all differ, in sizes and in the schedule's warm-up."""
    stages = tuple(
        StageWork(
            tuple(
                GroupWork(f"g{index}", 32 * MIB + 4096 * stage, 300.0 + stage / 50, 600.0)
                for index in range(6)
            ),
            output_bytes=32 * MIB,
        )
        for stage in range(num_ranks)
    )
    machine = Machine(gpus_per_node=8, node_gbps=410.0, node_d2h_gbps=328.0)
    schedule = make_schedule("1f1b", num_ranks, num_microbatches)
    return Job(schedule, stages, (GIB,) * num_ranks, machine)


def on_lines(record: dict) -> str:
    """Return indented JSON, with the numbers of all ranks on one line."""
    return re.sub(r"\[[^][{}\"]*\]", lambda m: " ".join(m[0].split()), json.dumps(record, indent=1))


def timed(what) -> tuple[dict, float]:
    started_s = time.process_time()
    result = what()
    return result, round(time.process_time() - started_s, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate jobs with thousands of GPUs.")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    known, known_s = timed(llama)
    known |= {"simulations": "1 each row and those that fit the share", "cpu_s": known_s}
    job = deep_job(NUM_RANKS, NUM_MICROBATCHES)
    settings = RankSettings(max_inflight_bytes=256 * MIB, prefetch_bytes=256 * MIB)
    deep, deep_s = timed(lambda: row("everything, 256 / 256 MiB", simulate(job, settings)))
    deep = {name: deep[name] for name in ("settings", "step_ms", "stall_ms")}
    deep |= {"ranks": NUM_RANKS, "microbatches": NUM_MICROBATCHES, "cpu_s": deep_s}
    record = {
        "command": "python benchmarks/simulate_large.py --output FILE",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"one core of a CPU, {platform.machine()}, Python {platform.python_version()}",
        "llama_3_405b": known,
        "distinct_ranks": deep,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(on_lines(record))
    if args.output:
        args.output.write_text(f"{on_lines(record)}\n")


if __name__ == "__main__":
    main()
