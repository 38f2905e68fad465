"""Memory next to a device: made-up machines, and this one's own CPUs."""

from __future__ import annotations

import os

import pytest

from megatron_offload.backends.host_limit import near_cpus, running_on

DEVICE = "0000:dc:02.0"


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        (b"0\n", {0}),
        (b"0-1,8,16-17\n", {0, 1, 8, 16, 17}),
        *((text, set()) for text in (b"", b"\n", b"none", b"0-", b"-1", b"1-x", b"0,,1", b"\xff")),
    ],
)
def test_cpus_next_to_a_device_are_read_or_unknown(tmp_path, text, cpus):
    file = tmp_path / "bus/pci/devices" / DEVICE / "local_cpulist"
    file.parent.mkdir(parents=True)
    file.write_bytes(text)
    assert near_cpus(DEVICE, sysfs=tmp_path) == cpus
    assert near_cpus("0000:01:00.0", sysfs=tmp_path) == near_cpus(None, sysfs=tmp_path) == set()


@pytest.mark.parametrize("unknown", [frozenset(), frozenset({100_000})])
def test_this_thread_runs_there_inside_if_it_may_and_where_it_ran_after(unknown):
    before = os.sched_getaffinity(0)
    near = frozenset({max(before)})
    with running_on(near):
        assert os.sched_getaffinity(0) == near
    assert os.sched_getaffinity(0) == before
    with running_on(unknown):
        assert os.sched_getaffinity(0) == before
