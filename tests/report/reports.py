"""Reports to render, made by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from megatron_offload.core.profile import GroupKey
from megatron_offload.core.trace import ByteCount, Counter, Span, StepTrace
from megatron_offload.engine.stats import GroupStats
from megatron_offload.planning.description import job_from_model, load_description
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.plan import GroupChoice, MeasuredCost, OffloadPlan, RankPlan
from megatron_offload.planning.simulate import simulate
from megatron_offload.report.report import MemoryKind, Pair, Report
from megatron_offload.report.tables import TradeOff, TradeOffPoint

GIB = 1024**3
HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>{{ 7 * 7 }}"


def trace(rank):
    names = (ByteCount.LIVE, ByteCount.HELD, ByteCount.INFLIGHT, ByteCount.PREFETCHED)
    return StepTrace(
        rank,
        [
            Span("compute", "forward", HOSTILE, 0, 900),
            Span("compute", "stall", HOSTILE, 900, 100, wait="W4"),
            Span("compute", "backward", HOSTILE, 1000, 1500),
            Span("d2h", "d2h", HOSTILE, 200, 500, 1000),
            Span("h2d", "h2d", HOSTILE, 500, 500, 1000),
        ],
        [Counter(name, at_us, at_us * 1e6) for name in names for at_us in (0, 700, 1800)],
    )


def gpu_report(**changes):
    """Return a comparison on two GPUs in which every part is there."""
    moved = GroupStats(HOSTILE, 2, 3 * GIB, 3 * GIB, GIB, GIB // 2, {HOSTILE: GIB // 2}, 1)
    groups = [asdict(moved), asdict(GroupStats("layers.*.mlp", 2))]
    ranks = [
        {"rank": rank, "pp_rank": rank, "dp_rank": 0, "groups": groups}
        | {"offloaded_bytes": 6 * GIB, "reloaded_bytes": 6 * GIB, "recomputed_bytes": GIB}
        | {"num_late_reloads": 2, "num_cancelled_offloads": 1}
        | {"peak_host_bytes": 5 * GIB, "pinned_host_bytes": 7 * GIB}
        for rank in range(2)
    ]
    memory = [
        MemoryKind("reserved memory", (Pair(38 * GIB, 30 * GIB), Pair(33 * GIB, 28 * GIB))),
        MemoryKind("allocated memory", (Pair(36 * GIB, 28 * GIB), Pair(31 * GIB, 27 * GIB))),
    ]
    points = (
        TradeOffPoint(label="no offload", peak_bytes=int(37.04 * GIB), step_time_percent=0.0),
        TradeOffPoint(label=HOSTILE, peak_bytes=30 * GIB, step_time_percent=0.4, kind="plan"),
        TradeOffPoint(label="all", peak_bytes=20 * GIB, step_time_percent=3.0, kind="predicted"),
    )
    choices = tuple(
        GroupChoice(GroupKey(0, order), HOSTILE, GIB, order < 2, HOSTILE) for order in range(3)
    )
    plan = RankPlan(choices, GIB, 2 * GIB, 30 * GIB, 1_490_000.0, 29 * GIB + GIB // 4)
    report = Report(
        title=HOSTILE,
        num_steps=5,
        device="NVIDIA H200",
        is_simulated=False,
        date="2026-11-21 20:00 UTC",
        memory=memory,
        ranks=ranks,
        step_time_s=Pair(1.4844, 1.4903),
        config=HOSTILE,
        versions={"torch": HOSTILE},
        findings={"losses of 5 steps": True},
        traces=[trace(0), trace(1)],
        tradeoff=TradeOff(memory="reserved memory", points=points),
        plan=OffloadPlan(
            HOSTILE,
            4,
            1,
            (plan, replace(plan, predicted_step_us=None)),
            HOSTILE,
            MeasuredCost(1_490_300.0, 5_900.0),
        ),
    )
    return replace(report, **changes)


def many_ranks():
    """Return what a simulated step of 64 pipeline ranks was, as a run's report."""
    sizes = {"layers": 64, "pipeline_parallel": 64, "virtual_stages": 1, "num_microbatches": 32}
    models = Path(__file__).parents[2] / "configs" / "models"
    model = load_description(models / "gpt_16x8192_pp4_vpp2.yaml").model
    job = job_from_model(model.model_copy(update=sizes))
    found = simulate(job, RankSettings(), record=True).ranks
    ranks = [
        {**gpu_report().ranks[0], "rank": index, "pp_rank": index}
        | {"offloaded_bytes": one.offloaded_bytes, "reloaded_bytes": one.reloaded_bytes}
        for index, one in enumerate(found)
    ]
    reserved = tuple(Pair(None, one.peak_reserved_bytes) for one in found)
    return gpu_report(
        title="64 ranks",
        is_simulated=True,
        memory=[MemoryKind("reserved memory", reserved)],
        ranks=ranks,
        findings=None,
        traces=[one.trace for one in found],
    )


def bare_report():
    """Return a run on a CPU that measured nothing and moved nothing."""
    ranks = [dict.fromkeys(gpu_report().ranks[0], 0) | {"groups": ()}]
    return gpu_report(
        title="bare",
        device="simulated on 2 CPU cores",
        is_simulated=True,
        memory=(),
        ranks=ranks,
        step_time_s=Pair(None, None),
        findings=None,
        traces=(),
        tradeoff=None,
        plan=None,
    )
