"""Reports to render, made by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from megatron_offload.core.row_config import RowConfig
from megatron_offload.core.trace import ByteCount, Counter, Span, StepTrace
from megatron_offload.engine.stats import GroupStats
from megatron_offload.observe.run_report import RunFacts
from megatron_offload.planning.description import job_from_model, load_description
from megatron_offload.planning.found import FoundPlan, FoundStage, RunFrontier
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.simulate import simulate
from megatron_offload.report.report import MemoryKind, Pair, Report

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


def facts(**changes):
    found = {
        "device": "NVIDIA H200",
        "is_simulated": False,
        "ranks": 2,
        "plan": HOSTILE,
        "verdict": "w" + HOSTILE,
    }
    date = datetime(2026, 11, 21, 20, tzinfo=UTC)
    return RunFacts(**found | {"date": date, "versions": {"torch": HOSTILE}} | changes)


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
    row = RowConfig(site=HOSTILE, offload="all")
    plans = [
        FoundPlan(rows=(row,) * bool(size), freed_bytes=size * GIB, predicted_percent=size / 8)
        for size in range(4)
    ]
    tried = {"measured_percent": (0.1, 0.0, 0.2), "reserved_bytes": 37 * GIB}
    plans[1:3] = (plan.model_copy(update=tried) for plan in plans[1:3])
    stages = [
        FoundStage(name=name, bare_bytes=size, plans=tuple(plans), followed=2)
        for name, size in (("0/" + HOSTILE, 36 * GIB), ("1", 0))
    ]
    report = Report(
        title=HOSTILE,
        facts=facts(),
        num_steps=5,
        memory=memory,
        ranks=ranks,
        step_time_s=Pair(1.4844, 1.4903),
        config=HOSTILE,
        findings={"losses of 5 steps": True},
        traces=[trace(0), trace(1)],
        found=RunFrontier(said=HOSTILE, stages=tuple(stages)),
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
        facts=facts(is_simulated=True),
        memory=[MemoryKind("reserved memory", reserved)],
        ranks=ranks,
        findings=None,
        traces=[one.trace for one in found],
    )


def bare_report(**changes):
    """Return a run on a CPU that measured nothing and moved nothing."""
    ranks = [dict.fromkeys(gpu_report().ranks[0], 0) | {"groups": ()}]
    return gpu_report(
        title="bare",
        facts=facts(device="simulated on 2 CPU cores", is_simulated=True),
        memory=(),
        ranks=ranks,
        step_time_s=Pair(None, None),
        findings=None,
        traces=(),
        **{"found": None, **changes},
    )
