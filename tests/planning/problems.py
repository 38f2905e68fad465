"""Random profiles and jobs for the tests of planning."""

from __future__ import annotations

import itertools
from dataclasses import replace

from job_profiles import profiles_of

from megatron_offload.core.machine import Machine
from megatron_offload.core.profile import GroupKey, GroupProfile, GroupTimes, RunShape, StepProfile
from megatron_offload.planning.job import GroupWork, Job, StageWork
from megatron_offload.planning.replay import RankWork
from megatron_offload.planning.schedule import PassKind, make_schedule

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


def random_profile(rng):
    """Return what some step might have shown, every field of it set."""
    num_chunks, pp_size = rng.randint(1, 4), rng.randint(1, 4)
    keys = [GroupKey(c, g) for c in range(num_chunks) for g in range(rng.randint(0, 4))]
    most_bytes = rng.choice([2, 2**62])
    at_bytes = sorted(rng.randrange(most_bytes) for _ in range(2 * len(keys)))
    groups = tuple(
        GroupProfile(
            key,
            rng.choice(["core_attn", "décoder.layers.*.mlp", '<script>"', ""]),
            rng.choice([0, rng.randrange(2**62)]),
            at,
            rng.randrange(2**40),
        )
        for key, at in zip(keys, at_bytes, strict=False)
    )
    order = rng.sample(keys, rng.randint(0, len(keys)))
    has_clock = rng.random() < 0.8
    allocated_bytes = rng.choice([0, rng.randrange(2**62)])
    return StepProfile(
        groups=groups,
        backward_order=tuple(order),
        backward_at_bytes=tuple(at_bytes[len(keys) :][: len(order)]) if has_clock else (),
        times=tuple(GroupTimes(*sorted(rng.uniform(0, 1e9) for _ in range(4))) for _ in keys)
        if rng.random() < 0.8
        else (),
        step_us=rng.uniform(0, 1e9),
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=allocated_bytes + rng.randrange(2**40),
        run=RunShape(
            rng.randint(1, 99),
            rng.randrange(pp_size),
            pp_size,
            rng.randint(1, 4),
            rng.randrange(1000),
            ("core_attn", "mlp_act")[: rng.randint(0, 2)],
            (("torch", "2.13"), ("python", "3.11"))[: rng.randint(0, 2)],
        ),
        offloaded_bytes=rng.choice([0, rng.randrange(2**62)]),
    )


def fields_of(profile):
    """Return all of a profile: its own comparison leaves out what differs from step to step."""
    return [getattr(profile, name) for name in profile.__dataclass_fields__]


def plain_machine(gbps, **more):
    """Return a machine whose links carry as much each way, alone and together; the node far more.

    The node has one limit for both ways.
    """
    rates = {"d2h_gbps": gbps, "h2d_gbps": gbps, "both_gbps": gbps, "node_gbps": 100 * gbps}
    return Machine(**{**rates, "node_d2h_gbps": None, "node_h2d_gbps": None, **more})


GROUPS = (
    ("qkv_linear", 192, 0.8),
    ("core_attn", 128, 1.5),
    ("attn_proj", 64, 0.5),
    ("mlp_fc1", 320, 2.5),
    ("mlp_act", 256, 0.2),
)


def make_job(*, ranks=2, virtual=1, microbatches=4, layers=1, name=None, scale=1.0, machine=None):
    """Return a pipeline of equal stages, about 1 GiB a layer and microbatch."""
    groups = tuple(
        GroupWork(
            group,
            int(mib * scale) * MIB,
            ms * 4e3,
            ms * 8e3,
            kept_bytes=8 * MIB,
            forward_temp_bytes=32 * MIB,
            backward_temp_bytes=300 * MIB,
        )
        for group, mib, ms in GROUPS
    )
    schedule = make_schedule(
        name or ("interleaved" if virtual > 1 else "1f1b"), ranks, microbatches, virtual
    )
    stage = StageWork(groups * layers, output_bytes=64 * MIB)
    stages = (stage,) * schedule.num_stages
    return Job(schedule, stages, (4 << 30,) * ranks, machine or Machine())


def random_job(rng, most_ranks=4):
    """Return a small pipeline of unequal stages, some parts of which no engine sees."""
    num_ranks = rng.randint(1, most_ranks)
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
    num_launches = rng.choice([None, 0.0, rng.uniform(1, 2000)])
    stages = tuple(replace(stage, num_launches=num_launches) for stage in stages)
    return Job(schedule, stages, static_bytes, machine)


def profiles(**settings):
    """Return the profiles of a job's ranks; see `make_job`."""
    return profiles_of(make_job(**settings))


def replay(job, rank, settings, **asked):
    """Return what one rank's streams do in a steady step."""
    return RankWork(job, rank, settings.recompute).replay(settings, **asked)


def peak_in_flight(schedule, rank):
    """Return the most forwards of a rank at one time whose activations are needed still."""
    changes = {PassKind.FORWARD: 1, PassKind.BACKWARD: -1}
    counts = itertools.accumulate(changes[one.kind] for one in schedule.ranks[rank])
    return max(counts)
