"""Reports to render, made by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from megatron_offload.core.row_config import RowConfig
from megatron_offload.core.trace import ByteCount, Counter, Span, StepTrace
from megatron_offload.engine.stats import GroupStats
from megatron_offload.observe.run_report import RankSummary, RunFacts
from megatron_offload.planning.description import job_from_model, load_description
from megatron_offload.planning.found import FoundPlan, FoundStage, RunFrontier
from megatron_offload.planning.job import RankSettings
from megatron_offload.planning.simulate import simulate
from megatron_offload.report.report import Report

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


def ranks_of(*sizes, **changes):
    """Return what each rank comes to, by its peaks of reserved and of allocated memory."""
    moved = GroupStats(HOSTILE, 2, 3 * GIB, 3 * GIB, GIB, GIB // 2, {HOSTILE: GIB // 2}, 1)
    found = {
        "groups": (moved, GroupStats("layers.*.mlp", 2)),
        "offloaded_bytes": 6 * GIB,
        "reloaded_bytes": 6 * GIB,
        "recomputed_bytes": GIB,
        "num_late_reloads": 2,
        "num_cancelled_offloads": 1,
        "peak_host_bytes": 5 * GIB,
        "pinned_host_bytes": 7 * GIB,
    }
    peaks = ("peak_reserved_bytes", "peak_allocated_bytes")
    return tuple(
        RankSummary(
            **found
            | {"rank": rank, "pp_rank": rank}
            | dict(zip(peaks, each, strict=True))
            | changes
        )
        for rank, each in enumerate(sizes)
    )


def facts(**changes):
    found = {
        "device": "NVIDIA H200",
        "is_simulated": False,
        "ranks": 2,
        "plan": HOSTILE,
        "verdict": "w" + HOSTILE,
        "num_steps": 5,
        "step_time_s": 1.4903,
        "by_rank": ranks_of((30 * GIB, 28 * GIB), (28 * GIB, 27 * GIB)),
    }
    date = datetime(2026, 11, 21, 20, tzinfo=UTC)
    return RunFacts(**found | {"date": date, "versions": {"torch": HOSTILE}} | changes)


def gpu_report(**changes):
    """Return a comparison on two GPUs in which every part is there."""
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
    before = ranks_of((38 * GIB, 36 * GIB), (33 * GIB, 31 * GIB))
    report = Report(
        title=HOSTILE,
        facts=facts(),
        plain=facts(step_time_s=1.4844, by_rank=before),
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
    ranks = ranks_of(*((one.peak_reserved_bytes, None) for one in found))
    return gpu_report(
        title="64 ranks",
        facts=facts(is_simulated=True, by_rank=ranks),
        plain=None,
        findings=None,
        traces=[one.trace for one in found],
    )


def bare_report(**changes):
    """Return a run on a CPU that measured nothing and moved nothing."""
    bare = {"by_rank": (RankSummary(rank=0),), "step_time_s": None}
    return gpu_report(
        title="bare",
        facts=facts(device="simulated on 2 CPU cores", is_simulated=True, **bare),
        plain=None,
        findings=None,
        traces=(),
        **{"found": None, **changes},
    )
