"""What is kept on the device is counted by why it was kept; what counters say."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from programs import (
    KIB,
    Keep,
    in_group,
    make_manager,
    make_model,
    one_forward_one_backward,
    run_step,
)

from megatron_offload.engine.marks import Marks
from megatron_offload.engine.stats import GroupStats, StepStats

ROOMY = {"max_inflight_bytes": 64 * KIB, "prefetch_bytes": 64 * KIB}
FULL_HOST = "the host memory is full"
FULL = {"host_memory_bytes": 4 * KIB, "host_slab_bytes": 4 * KIB}


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({}, set()),
        ({"fraction": 0.0, "recompute": ["norm"]}, {"the fraction that may be offloaded is 0"}),
        ({"fraction": 0.5}, {"the fraction that may be offloaded is 0.5"}),
        (ROOMY, {"needed too soon in backward"}),
        ({"host_memory_bytes": 8 * KIB, "host_slab_bytes": 4 * KIB}, {FULL_HOST}),
    ],
)
def test_every_kept_byte_has_its_reason(settings, reasons):
    manager = make_manager(**settings)
    model, order = make_model(), one_forward_one_backward(4, depth=2)
    for _ in range(3):
        run_step(model, manager, order)
    groups = manager.last_step.by_name.values()
    assert {reason for group in groups for reason in group.kept_bytes_by_reason} >= reasons
    for group in groups:
        assert sum(group.kept_bytes_by_reason.values()) == group.kept_bytes
    if reasons:
        assert sum(group.kept_bytes for group in groups) > 0
    assert (manager.last_step.num_refused_blocks > 0) == (FULL_HOST in reasons)
    manager.close()


def stats_of(saved, **settings):
    """Return the counters of a step whose groups save these tensors."""
    manager = make_manager(**settings, begins_chunk=True)
    y = torch.ones(1, requires_grad=True) * 1.0
    for name, tensors in saved.items():
        y = in_group(manager, lambda y, tensors=tensors: Keep.apply(y, [], *tensors), y, name)
    y.backward()
    manager.reset()
    stats = manager.last_step
    manager.close()
    return stats


@pytest.mark.parametrize("limit", [{"min_tensor_bytes": 4 * KIB}, {"min_tensor_elements": 1024}])
def test_what_is_too_small_to_move_is_kept_and_counted_once(limit):
    small, large = torch.ones(1000), torch.ones(1024)
    weight = torch.nn.Parameter(torch.ones(10))
    stats = stats_of(
        {
            "small": [small, weight, small.view(10, 100)],
            "both": [large, large[:8], torch.ones(10), torch.empty(0)],
            "again": [small],
        },
        **limit,
    ).by_name
    assert stats["small"].offloaded_bytes == 0
    assert stats["both"].offloaded_bytes == large.nbytes
    kept = {name: group.kept_bytes for name, group in stats.items()}
    assert kept == {"small": small.nbytes, "both": 10 * 4, "again": 0}
    (reason,) = stats["small"].kept_bytes_by_reason
    assert reason == "smaller than what is offloaded (min_tensor_bytes, min_tensor_elements)"


def test_what_is_expanded_counts_by_the_bytes_that_it_has():
    few, many = torch.ones(10).expand(1000, 10), torch.ones(1000).expand(2, 1000)
    stats = stats_of({"few": [few], "many": [many]}, min_tensor_bytes=1000)
    assert (stats.by_name["few"].offloaded_bytes, stats.by_name["few"].kept_bytes) == (0, 40)
    assert stats.by_name["many"].offloaded_bytes == 4000


@pytest.mark.parametrize("settings", [{"fraction": 0.0, "recompute": ["norm"]}, FULL])
def test_storage_that_two_groups_save_is_kept_once(settings):
    shared, other = torch.ones(2048), torch.ones(1536)
    stats = stats_of({"first": [shared[:1280], other], "second": [shared, other]}, **settings)
    # What the second has of the shared storage beyond the first's part is its own.
    kept = {name: group.kept_bytes for name, group in stats.by_name.items()}
    assert kept == {"first": 1280 * 4 + other.nbytes, "second": 768 * 4}
    assert stats.refused_bytes == sum(kept.values()) * ("host_memory_bytes" in settings)
    for group in stats.by_name.values():
        assert sum(group.kept_bytes_by_reason.values()) == group.kept_bytes


def test_where_a_parameter_was_no_activation_is_taken_for_it():
    marks, weight = Marks(), torch.nn.Parameter(torch.ones(8))
    marks.add(weight)
    assert marks.keeps(weight.untyped_storage()._cdata)
    weight.data = torch.ones(9)  # within the step, as FSDP1 does
    others = [torch.ones(8).untyped_storage() for _ in range(100)]
    assert not any(marks.keeps(storage._cdata) for storage in others)


# What a step's counters say to programs and to people.


def test_metrics_are_flat_and_have_the_same_names_before_and_after_a_step():
    manager, sizes = make_manager(), ("saved", "offloaded", "kept", "peak_host")
    assert manager.last_step.metrics() == {f"offload/{name}_mib": 0 for name in sizes}
    before = manager.last_step.metrics(all_counters=True)
    x = torch.randn(1024, 512, requires_grad=True)
    for _ in range(2):
        with manager.step():
            in_group(manager, torch.sin, x * 2, "mlp").sum().backward()
    assert list(manager.last_step.metrics()) == [f"offload/{name}_mib" for name in sizes]
    assert [*manager.last_step.metrics().values()] == [2.0, 2.0, 0.0, 2.0]
    assert list(manager.last_step.metrics(all_counters=True)) == list(before)


def test_metrics_are_the_sums_over_groups_and_all_counters_of_a_step():
    stats = StepStats(num_late_reloads=3, peak_host_bytes=7 << 20, peak_released_bytes=5 << 20)
    stats.recomputed_bytes_by_unit["norm"] = 1 << 20  # among what is released
    for name in ("attention", "mlp"):
        stats.by_name[name] = GroupStats(name, 2, 100, 90, 3 << 20, num_late_reloads=1)
        stats.by_name[name].keep(11, "too small")
    metrics = stats.metrics(all_counters=True)
    found = {name.removeprefix("offload/"): value for name, value in metrics.items() if value}
    assert found == {
        "saved_mib": 10.0,
        "offloaded_mib": 200 / 2**20,
        "kept_mib": 22 / 2**20,
        "peak_host_mib": 7.0,
        "num_groups": 4,
        "offloaded_bytes": 200,
        "reloaded_bytes": 180,
        "recomputed_bytes": 6 << 20,
        "kept_bytes": 22,
        "num_late_reloads": 3,
        "peak_host_bytes": 7 << 20,
        "peak_released_bytes": 5 << 20,
        "saved_bytes": 10 << 20,
    }
    counters = {x.name for x in fields(StepStats) if type(getattr(stats, x.name)) is int}
    assert counters < {name.removeprefix("offload/") for name in metrics}


def test_a_step_prints_as_a_table():
    stats = StepStats(
        peak_recorded_bytes=5 << 20, peak_released_bytes=3 << 20, peak_host_bytes=1 << 30
    )
    stats.by_name["mlp"] = GroupStats("mlp", 2, 5 << 20, 4 << 20, 1 << 20, num_late_reloads=12)
    stats.by_name["mlp"].keep(2 << 20, "needed too soon in backward")
    stats.by_name["attention"] = GroupStats("attention", 10)
    stats.by_name["mlp"].kept_bytes_by_reason["too little to be named"] = 2 << 10
    assert stats.by_name["asked for"].kept_bytes == 0
    assert str(stats).splitlines() == [
        "group      groups  offloaded  reloaded  recomputed     kept  late",
        "mlp             2    5.0 MiB   4.0 MiB     1.0 MiB  2.0 MiB    12",
        "attention      10        0 B       0 B         0 B      0 B     0",
        "at most 6.0 MiB of activations were saved, 4.0 MiB of them off the device, 1.0 GiB on the "
        "host; 1.0 MiB recomputed; kept: 2.0 MiB (needed too soon in backward)",
    ]
    assert str(StepStats()) == "nothing was offloaded or recomputed"
