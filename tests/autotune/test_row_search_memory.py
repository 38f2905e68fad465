"""Targets, and devices without room: what a search follows then."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from layered_job import (
    BARE_US,
    FULL_BYTES,
    LayeredJob,
    PlainLayer,
    auto,
    found_job,
    target,
)

from megatron_offload.autotune import search_steps
from megatron_offload.autotune.row_search import RowSearch
from megatron_offload.backends.base import DeviceMemory

pytestmark = pytest.mark.by_default


def test_a_job_without_room_to_look_at_its_layers_keeps_what_there_is_room_for():
    job = LayeredJob(policy=auto(3))
    search = RowSearch([job.net], job.manager, mock.Mock())
    search._search = search._agree(refusal="they are too large")
    search._take_next()
    assert "only what the device has no room for is offloaded: they are too large" in search.said
    assert job.manager.learner.is_open


def test_a_layer_alone_in_too_little_memory_is_recomputed_and_no_error():
    job = LayeredJob(1.0, 30_000, policy=auto(40), num_layers=1)
    job.net.forward = lambda x: job.net.head(torch.nn.Sequential(*[job.net.layers[0]] * 6)(x))
    for _ in range(60):
        with contextlib.suppress(torch.OutOfMemoryError):
            job.step()
    assert "layers can't be recomputed here unasked, or it has one" in job.search.said


def test_rows_of_which_nothing_leaves_are_not_followed(monkeypatch):
    monkeypatch.setattr(search_steps, "_LARGE_SHARE", 0.0)
    job = found_job(1.0, policy=auto(20), layer=PlainLayer, num_layers=2)
    assert "needed again at once" in job.search.said
    assert not job.manager.rows


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_target_is_kept(share):
    job = found_job(0.01, policy=target(int(share * FULL_BYTES)))
    job.manager.backend.trim_device()
    job.step()
    _, took_us, peak_bytes = job.steps[-1]
    assert peak_bytes <= share * FULL_BYTES
    assert took_us < 1.34 * BARE_US, "less than all layers recomputed"


def test_a_target_that_can_not_be_kept_ends_with_the_most_that_can_be_freed():
    job = LayeredJob(0.001, policy=target("1KiB"))
    search = job.found()
    assert {row.layers for row in job.manager.rows} == {"0-5"}
    assert "1.00 KiB is wanted" in search.said


def test_a_target_above_what_is_needed_changes_nothing():
    job = LayeredJob(policy=target(10 * FULL_BYTES))
    assert "all fits" in job.found().said


@pytest.mark.parametrize("capacity_bytes", [60_000, 70_000, 80_000])
def test_a_device_without_room_for_all_gets_through_the_first_steps(capacity_bytes):
    job = found_job(0.01, capacity_bytes)
    for _ in range(3):
        job.step()
    assert job.manager.rows, "no step without them would fit"
    assert job.num_ooms == 0


def test_where_memory_runs_out_later_more_is_freed():
    job = LayeredJob(0.001, policy=auto(10))
    search = job.found()
    before = search.plan.freed_bytes
    job.capacity_bytes = 30_000
    with pytest.raises(torch.OutOfMemoryError):
        job.step()
    job.capacity_bytes = None
    job.step()
    assert search.plan.freed_bytes > before
    assert job.steps[-1][2] < job.steps[-2][2]


def test_a_target_is_not_left_for_what_an_evaluation_has_reserved(monkeypatch):
    job = found_job(0.01, policy=target(int(0.7 * FULL_BYTES)))
    rows = job.manager.rows
    for _ in range(4):
        with torch.no_grad(), job.offload:
            job.meter.observe(torch.zeros(100_000))
        job.step()
    assert job.manager.rows == rows


def test_where_memory_is_not_known_a_target_is_said_to_be_none():
    job = LayeredJob(policy=target("1KiB"))
    job.backend.memory = DeviceMemory
    assert "so no target can be kept" in job.found().said
