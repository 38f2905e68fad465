"""Memory of made-up machines: what is said of it."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from megatron_offload.files.kernel import read_members
from megatron_offload.machine.checks_host import (
    check_host_memory,
    check_memlock,
    check_memory_node,
    check_swap,
    may_place_pages,
)

GPU = "0000:3b:00.0"
GIB_IN_KIB = 1 << 20


class Machine:
    """A made-up ``/`` with two memory nodes, a GPU at the second, and eight CPUs."""

    def __init__(self, root, monkeypatch):
        self.root = root
        self.cpus, self.swap_bytes = [], 0
        process = SimpleNamespace(cpu_affinity=lambda: self.cpus)
        monkeypatch.setattr(psutil, "Process", lambda: process)
        monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=self.swap_bytes))
        self.write("sys/devices/system/node/online", "0-1\n")
        self.write("sys/devices/system/node/node0/cpulist", "0-3\n")
        self.write("sys/devices/system/node/node1/cpulist", "4-7\n")
        self.write(f"sys/bus/pci/devices/{GPU}/numa_node", "1\n")
        self.allow(cpus="0-7", nodes="0-1")
        self.free(100 * GIB_IN_KIB)

    def write(self, path, content):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def allow(self, cpus, nodes):
        self.cpus = sorted(read_members(cpus))
        self.write("proc/self/status", f"Name:\tpython\nMems_allowed_list:\t{nodes}\n")

    def free(self, available_kib):
        self.write("proc/meminfo", f"MemAvailable: {available_kib} kB\n")

    def node(self, *, may_place=True, address=GPU):
        asked = []
        finding = check_memory_node(
            0, address, root=self.root, may_place=lambda node: asked.append(node) or may_place
        )
        assert set(asked) <= {1}
        return finding


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


# Memory nodes.


def test_memory_that_can_be_placed_is_fine(machine):
    finding = machine.node()
    assert (finding.level, finding.found) == ("ok", "1, where pinned memory comes from")


def test_one_node_is_no_question(machine):
    machine.write("sys/devices/system/node/online", "0\n")
    assert machine.node(may_place=False).level == "ok"


@pytest.mark.parametrize("content", ["-1\n", "", "7\n", "x", b"\xff", b"9" * (5 << 20)])
def test_an_unknown_node_is_a_note(machine, content):
    machine.write(f"sys/bus/pci/devices/{GPU}/numa_node", content)
    finding = machine.node()
    assert finding.level == "note"
    assert finding.found.startswith("unknown; the machine has 2")


def test_a_gpu_without_address_and_a_machine_that_says_nothing_are_unknown(machine, tmp_path):
    assert machine.node(address=None).level == "note"
    finding = check_memory_node(0, GPU, root=tmp_path / "empty", may_place=lambda node: True)
    assert finding.found == "unknown; the machine has an unknown number"


def test_a_cpuset_without_the_near_node_is_a_warning(machine):
    machine.allow(cpus="0-3", nodes="0")
    finding = machine.node()
    assert finding.level == "warning"
    assert "may only use [0]" in finding.found
    assert "--cpuset-mems" in finding.advice


def test_where_pages_can_t_be_placed_the_process_s_cpus_decide(machine):
    machine.allow(cpus="4-5", nodes="0-1")
    assert machine.node(may_place=False).level == "ok"
    machine.allow(cpus="0-7", nodes="0-1")
    assert machine.node(may_place=False).level == "note"
    machine.allow(cpus="0-3", nodes="0-1")
    finding = machine.node(may_place=False)
    assert finding.level == "warning"
    assert "refuses mbind(2)" in finding.found
    assert "--cpunodebind=1" in finding.advice


def test_cpus_far_from_the_gpu_are_a_note_where_memory_is_near(machine):
    machine.allow(cpus="0-3", nodes="0-1")
    finding = machine.node()
    assert finding.level == "note"
    assert "no CPU of this process is there" in finding.found


@pytest.mark.parametrize("content", ["", "garbage", b"\xff\x00", "Mems_allowed_list:\tall\n"])
def test_a_status_that_can_t_be_read_restricts_nothing(machine, content):
    machine.write("proc/self/status", content)
    assert machine.node().level == "ok"
    assert machine.node(may_place=False).level == "note"


def test_this_kernel_answers_whether_pages_may_be_placed():
    assert may_place_pages(0) in (True, False)
    assert may_place_pages(1 << 20) is False


# How much there is.


def test_what_each_rank_may_pin_is_told(machine):
    finding = check_host_memory(4, 256 << 20, root=machine.root)
    assert finding.level == "ok"
    assert finding.found.startswith("12.5 GiB may be pinned by each of 4 ranks (50%")
    assert check_host_memory(1, 256 << 20, root=machine.root).found.startswith("50.0 GiB")


def test_less_than_a_slab_is_a_warning(machine):
    machine.free(GIB_IN_KIB)
    assert check_host_memory(2, 256 << 20, root=machine.root).level == "ok"
    finding = check_host_memory(4, 256 << 20, root=machine.root)
    assert finding.level == "warning"
    assert "less than one slab of 256.0 MiB" in finding.found


def test_a_control_group_s_limit_counts(machine):
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/memory.max", str(8 << 30))
    machine.write("sys/fs/cgroup/job/memory.current", "0")
    assert check_host_memory(1, 256 << 20, root=machine.root).found.startswith("4.0 GiB")


def test_the_user_s_own_number_of_ranks_plays_no_part(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "garbage")
    assert check_host_memory(1, 256 << 20, root=machine.root).level == "ok"


@pytest.mark.parametrize(("limit", "level"), [(None, "ok"), (8 << 20, "note"), (0, "note")])
def test_a_limit_of_locked_memory_is_a_note(limit, level):
    assert check_memlock(limit).level == level


@pytest.mark.parametrize(("used_gib", "level"), [(0, "ok"), (1, "ok"), (6, "note")])
def test_swap_in_use_is_a_note(machine, used_gib, level):
    machine.swap_bytes = used_gib << 30
    finding = check_swap()
    assert finding.level == level
    assert finding.found == ("0 B" if not used_gib else f"{used_gib}.0 GiB") + " in use"
