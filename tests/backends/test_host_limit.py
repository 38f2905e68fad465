"""How much may be pinned by default, and memory next to a device, read off made-up machines."""

from __future__ import annotations

import os

import pytest

from megatron_offload.backends.host_limit import (
    default_cap_bytes,
    near_cpus,
    read_field,
    running_on,
)

KIB = 1024
FREE = 2000 * KIB
DEVICE = "0000:dc:02.0"
V1_NO_LIMIT = 9223372036854771712


class Machine:
    """A file tree of what the kernel says, with 2000 KiB of memory free."""

    def __init__(self, root):
        self.root = root
        self.write("proc/meminfo", "MemTotal:  4000 kB\nMemFree: 9 kB\nMemAvailable:   2000 kB\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    def use_v2(self, group="/"):
        self.write("proc/self/cgroup", f"0::{group}\n")

    def use_v1(self, group="/"):
        self.write("proc/self/cgroup", f"5:cpu,cpuacct:/other\n4:memory:{group}\n0::/\n")

    def limit_v2(self, group, limit, used=0, cached=0, high="max"):
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {cached}\nslab 2\n")

    def limit_v1(self, group, limit, used=0, cached=0):
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(
            f"{folder}/memory.stat", f"inactive_file 7\ntotal_inactive_file {cached}\ntotal_rss 3\n"
        )

    def free(self):
        """Return what is found to be free, in bytes."""
        return default_cap_bytes(1.0, root=self.root)

    def free_of_job(self, limit, **accounts):
        """Return it where this is the limit of the group ``job``."""
        self.limit_v2("job", limit, **accounts)
        return self.free()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# Shares.


def test_half_of_what_is_free_is_the_default(machine):
    assert default_cap_bytes(root=machine.root) == FREE // 2
    assert default_cap_bytes(0.25, root=machine.root) == FREE // 4


def test_a_machine_without_any_account_still_has_a_cap(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    with running_on(near_cpus(DEVICE, sysfs=tmp_path)):
        assert default_cap_bytes(root=tmp_path) == 4 << 30


def test_this_machine_s_accounts_leave_at_most_its_memory():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 <= default_cap_bytes(1.0) <= total


# Version 2.


def test_a_group_s_limit_counts_without_its_page_cache(machine):
    machine.use_v2("/job")
    assert machine.free_of_job(1_000_000, used=700_000) == 300_000
    assert machine.free_of_job(1_000_000, used=700_000, cached=100_000) == 400_000
    # A cache larger than all that is used is out of date, and nothing that makes no sense counts.
    assert machine.free_of_job(1_000_000, used=700_000, cached=900_000) == 1_000_000
    assert machine.free_of_job(500_000, used="much", cached="-1") == 500_000
    assert machine.free_of_job("max", used=700_000) == FREE
    assert machine.free_of_job(100, used=200) == machine.free_of_job(0) == 0


@pytest.mark.parametrize("tight", ["a", "a/b", "a/b/c"])
def test_the_tightest_of_a_group_and_those_above_it_counts(machine, tight):
    machine.use_v2("/a/b/c")
    for group in ("a", "a/b", "a/b/c"):
        machine.limit_v2(group, 600_000 if group == tight else 900_000, used=100_000)
    machine.limit_v2("a/b/c/below", 1)
    machine.limit_v2("beside", 1)
    assert machine.free() == 500_000


def test_what_slows_a_group_down_counts_as_its_limit(machine):
    machine.use_v2("/job")
    for limit in (900_000, "max"):
        assert machine.free_of_job(limit, used=100_000, high=300_000) == 200_000


@pytest.mark.parametrize("group", ["/", "/../outside", "/docker/abc"])
def test_a_container_s_own_group_lies_at_the_mount_whatever_it_is_called(machine, group):
    machine.use_v2(group)
    machine.limit_v2("", 400_000)
    assert machine.free() == 400_000
    machine.use_v1(group)
    machine.limit_v2("", "max")
    machine.limit_v1("", 250_000)
    assert machine.free() == 250_000


# Version 1, and both.


def test_version_1_counts_its_limit_usage_and_whole_page_cache(machine):
    machine.use_v1("/a/b")
    machine.limit_v1("a/b", 1_000_000, used=700_000, cached=100_000)
    machine.limit_v1("a", 2_000_000)
    machine.limit_v1("", V1_NO_LIMIT, used=10**12)
    machine.write("sys/fs/cgroup/cpu/a/memory.limit_in_bytes", "1")
    assert machine.free() == 400_000
    machine.limit_v1("a", 300_000, used=100_000)
    assert machine.free() == 200_000


def test_with_both_versions_the_one_with_the_limit_counts(machine):
    machine.write("proc/self/cgroup", "4:memory:/job\n1:name=systemd:/x\n0::/job\n")
    machine.limit_v1("job", 700_000)
    assert machine.free() == 700_000
    assert machine.free_of_job(600_000) == 600_000


# What makes no sense.


@pytest.mark.parametrize(
    "text",
    [
        *("", "max", "-5", "5.5", "0x10", "1e3", "²", "9" * 30, "5 5", "a\n5"),
        *(b"\xff\xfe", b"\0\0", b"5" + b"\0" * 10),
    ],
    ids=lambda text: repr(text[:12]),
)
@pytest.mark.parametrize("use", ["v1", "v2"])
def test_a_limit_that_is_no_number_is_none(machine, text, use):
    getattr(machine, f"use_{use}")("/job")
    machine.limit_v1("job", V1_NO_LIMIT)
    machine.limit_v2("job", "max")
    machine.write("sys/fs/cgroup/job/memory.max", text)
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", text)
    assert machine.free() == FREE


def test_an_account_that_is_a_pipe_or_a_folder_is_absent(machine):
    machine.use_v2("/job")
    (machine.root / "sys/fs/cgroup/job/memory.max").mkdir(parents=True)
    os.mkfifo(machine.root / "sys/fs/cgroup/job/memory.high")
    assert machine.free() == FREE


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "::", "0:", "0::", "0:memory", "\n\n", "memory:/job"),
        *("0::" + "/.." * 100, "4:memory:/\x00", b"\xff\xfe:", "0::/job\\040"),
    ],
)
def test_a_list_of_groups_that_makes_no_sense_is_survived(machine, text):
    machine.use_v2("/job")
    machine.write("proc/self/cgroup", text)
    assert machine.free() == FREE


def test_a_field_is_found_by_its_whole_name(tmp_path):
    (tmp_path / "file").write_text("SwapTotalled: 3 kB\nSwapTotal: 5 kB\nSwapFree:\n")
    assert read_field(tmp_path / "file", "SwapTotal:") == 5
    assert read_field(tmp_path / "file", "SwapFree:") is None


# Next to a device.


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
