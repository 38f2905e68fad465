"""What a step's counters say to programs and to people."""

from __future__ import annotations

from dataclasses import fields

import torch
from programs import in_group, make_manager

from megatron_offload.engine.stats import GroupStats, StepStats

NAMES = [
    "num_groups",
    "offloaded_bytes",
    "reloaded_bytes",
    "recomputed_bytes",
    "kept_bytes",
    "num_late_reloads",
    "num_cancelled_offloads",
    "num_refused_blocks",
    "refused_bytes",
    "num_unpinnable_blocks",
    "num_memory_shortages",
    "num_hidden_groups",
    "externally_referenced_bytes",
    "peak_host_bytes",
    "peak_released_bytes",
    "proven_bytes",
]


def test_metrics_are_flat_and_have_the_same_names_before_and_after_a_step():
    manager = make_manager()
    assert manager.last_step.metrics() == {f"offload/{name}": 0 for name in NAMES}
    x = torch.randn(1024, 512, requires_grad=True)
    for _ in range(2):
        with manager.step():
            in_group(manager, torch.sin, x * 2, "mlp").sum().backward()
    metrics = manager.last_step.metrics()
    assert list(metrics) == [f"offload/{name}" for name in NAMES]
    assert metrics["offload/offloaded_bytes"] == 2 << 20


def test_metrics_are_the_sums_over_groups_and_all_counters_of_a_step():
    stats = StepStats(num_late_reloads=3, refused_bytes=5, peak_host_bytes=7)
    for name in ("attention", "mlp"):
        stats.by_name[name] = GroupStats(name, 2, 100, 90, 30, num_late_reloads=1)
        stats.by_name[name].keep(11, "too small")
    metrics = stats.metrics()
    found = {name.removeprefix("offload/"): value for name, value in metrics.items() if value}
    assert found == {
        "num_groups": 4,
        "offloaded_bytes": 200,
        "reloaded_bytes": 180,
        "recomputed_bytes": 60,
        "kept_bytes": 22,
        "num_late_reloads": 3,
        "refused_bytes": 5,
        "peak_host_bytes": 7,
    }
    counters = {x.name for x in fields(StepStats) if type(getattr(stats, x.name)) is int}
    assert counters < {name.removeprefix("offload/") for name in metrics}


def test_a_step_prints_as_a_table():
    stats = StepStats(peak_released_bytes=3 << 20, peak_host_bytes=1 << 30)
    stats.by_name["mlp"] = GroupStats("mlp", 2, 5 << 20, 4 << 20, 1 << 10, num_late_reloads=12)
    stats.by_name["attention"] = GroupStats("attention", 10)
    assert stats.by_name["asked for"].kept_bytes == 0
    assert str(stats).splitlines() == [
        "group      groups  offloaded  reloaded  recomputed  kept  late",
        "mlp             2    5.0 MiB   4.0 MiB     1.0 KiB   0 B    12",
        "attention      10        0 B       0 B         0 B   0 B     0",
        "most at a time: 3.0 MiB off the device, 1.0 GiB on the host",
    ]
    assert len(str(StepStats()).splitlines()) == 2
