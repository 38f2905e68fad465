"""Random jobs for the tests of planning."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_offload.machine.profile import Machine
from megatron_offload.planning.job import GroupWork, Job, StageWork
from megatron_offload.planning.schedule import make_schedule

MIB = 2**20

PIPELINE = {
    "layers": 8,
    "vocabulary": 1000,
    "sequence": 4096,
    "num_microbatches": 4,
    "pipeline_parallel": 2,
    "virtual_stages": 2,
    "peak_tflops": 989.0,
    "memory_gbps": 4800.0,
}
"""Of a described job all but the sizes of its layers."""


def plain_machine(gbps, **more):
    """Return a machine whose links carry as much each way, alone and together; the node far more.

    The node has one limit for both ways.
    """
    rates = {"d2h_gbps": gbps, "h2d_gbps": gbps, "both_gbps": gbps, "node_gbps": 100 * gbps}
    return Machine(**{**rates, "node_d2h_gbps": None, "node_h2d_gbps": None, **more})


def random_job(rng):
    """Return a small pipeline of unequal stages, some parts of which no engine sees."""
    num_ranks = rng.randint(1, 4)
    name = rng.choice(["1f1b", "gpipe", "interleaved"])
    num_virtual = rng.randint(1, 2) if name == "interleaved" else 1
    schedule = make_schedule(name, num_ranks, num_ranks * rng.randint(1, 3), num_virtual)

    def group(index):
        us = rng.choice([0.0 if index else 1.0, rng.uniform(100, 4000), rng.uniform(1000, 9000)])
        return GroupWork(
            f"part{index}",
            rng.choice([0, 1, rng.randint(1, 64)]) * rng.choice([MIB, 100_003]),
            us,
            2 * us,
            rng.randint(0, 9) * MIB,
            forward_temp_bytes=rng.randint(0, 40) * MIB,
            backward_temp_bytes=rng.randint(0, 40) * MIB,
            is_marked=rng.random() < 0.8,
        )

    stages = tuple(
        StageWork(
            tuple(group(index) for index in range(rng.randint(1, 5))),
            rng.randint(0, 9) * MIB,
            rng.randint(0, 9) * MIB,
        )
        for _ in range(schedule.num_stages)
    )
    static_bytes = tuple(rng.randint(0, 500) * MIB for _ in range(num_ranks))
    machine = Machine(both_gbps=rng.uniform(5, 60), gpus_per_node=rng.randint(1, 4))
    num_launches = rng.choice([math.inf, 0.0, rng.uniform(1, 2000)])
    stages = tuple(replace(stage, num_launches=num_launches) for stage in stages)
    return Job(schedule, stages, static_bytes, machine)
