"""What stays on the device is counted by why it stayed."""

from __future__ import annotations

import pytest
from programs import KIB, make_manager, make_model, one_forward_one_backward, run_step

ROOMY = {"max_inflight_bytes": 64 * KIB, "prefetch_bytes": 64 * KIB}


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({}, set()),
        ({"fraction": 0.0}, {"beyond the fraction 0 of its chunk"}),
        ({"fraction": 0.5}, {"beyond the fraction 0.5 of its chunk"}),
        (
            {"resident_bytes": 8 * KIB, **ROOMY},
            {"its backward follows soonest, and the resident room takes it"},
        ),
        (ROOMY, {"backward needs it before it could leave and come back"}),
        ({"host_memory_bytes": 8 * KIB, "host_slab_bytes": 4 * KIB}, {"the host memory is full"}),
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
    manager.close()
