"""Machines, made up: what is said of their GPUs, memory, settings and versions."""

from __future__ import annotations

import importlib.metadata
import os
import sys

import pytest

from megatron_offload.machine import examine as checks
from megatron_offload.machine.examine import NEWEST_SEEN
from megatron_offload.machine.profile import CopyRates, PciLink, PciPath

GPU = "0000:3b:00.0"
GIB_IN_KIB = 1 << 20
GEN5, GEN3 = PciLink(generation=5, width=16), PciLink(generation=3, width=16)
GEN5_X4 = PciLink(generation=5, width=4)


def make_path(now=GEN5, most=GEN5):
    return PciPath(now=now, most=most)


def make_rates(alone=55.0, both=50.0, node=50.0):
    values = (alone, alone, both, both, node, node)
    return CopyRates(**dict(zip(CopyRates.model_fields, values, strict=True)))


@pytest.mark.parametrize(
    ("names", "num_shown", "level", "said"),
    [
        (["H200", "H100", "H200"], 3, "ok", "3 of H100, H200"),
        ([], 0, "note", "the simulated device"),
        ([], 8, "warning", "the driver shows 8, and PyTorch can use none"),
    ],
)
def test_gpus_are_counted_by_kind(names, num_shown, level, said):
    finding = checks.check_devices(names, num_shown)
    assert finding.level == level
    assert said in finding.found
    assert ("CUDA_VISIBLE_DEVICES" in finding.advice) == (level == "warning")


@pytest.mark.parametrize(
    ("path", "rates", "level", "said"),
    [
        (make_path(), make_rates(), "ok", "55.0 GB/s to the host, 55.0 back, of PCIe 5.0 x16"),
        (make_path(), make_rates(alone=44.2), "ok", "of PCIe 5.0 x16"),
        (make_path(), make_rates(alone=44.0), "warning", "44.0 GB/s to the host, 44.0 back, of"),
        (make_path(now=GEN3), make_rates(alone=12), "warning", "runs as PCIe 3.0 x16"),
        (make_path(now=GEN5_X4), make_rates(alone=12), "warning", "runs as PCIe 5.0 x4"),
        # What a virtual bus claims is less than what was measured.
        (make_path(now=GEN3), make_rates(), "ok", "55.0 GB/s"),
        (make_path(), make_rates().model_copy(update={"h2d_gbps": 20.0}), "warning", "20.0 back"),
        (None, make_rates(), "ok", "the driver doesn't show it"),
        (None, None, "note", "doesn't show"),
        (make_path(now=GEN3, most=GEN5), None, "note", "while idle"),
    ],
)
def test_copies_are_held_against_their_link(path, rates, level, said):
    finding = checks.check_link(0, path, rates)
    assert finding.level == level
    assert said in finding.found
    assert bool(finding.advice) == (level != "ok")


@pytest.mark.parametrize(
    ("rates", "num_gpus", "level", "said", "advised"),
    [
        (make_rates(55, 53, 52), 4, "ok", "52.0 and 52.0 while all 4 GPUs copy", ""),
        (make_rates(55, 51, 25.6), 4, "note", "25.6 and 25.6 while all 4", "delta_bytes_across"),
        (make_rates(55, 28, 28), 4, "note", "28.0 GB/s to the host", "copies go both ways"),
        (make_rates(55, 28, 28), 1, "note", "28.0 back at once", "copies go both ways"),
        (make_rates(55, 54, 54), 1, "ok", "54.0 back at once", ""),
    ],
)
def test_what_is_left_when_others_copy_too_is_told(rates, num_gpus, level, said, advised):
    finding = checks.check_node_rates(0, rates, num_gpus)
    assert finding.level == level
    assert said in finding.found
    assert advised in finding.advice
    assert ("while all" in finding.found) == (num_gpus > 1)


@pytest.mark.parametrize(
    ("content", "level", "said"),
    [
        (b"DMA-FQ\n", "note", "translates this GPU's addresses (domain type 'DMA-FQ')"),
        (b"identity\n", "ok", "pass through"),
        (None, "ok", "none is shown"),
        (b"\xff", "ok", "none is shown"),
    ],
)
def test_an_iommu_that_translates_is_noted(tmp_path, content, level, said):
    folder = tmp_path / f"sys/bus/pci/devices/{GPU}/iommu_group"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "type").write_bytes(content)
    finding = checks.check_iommu(0, GPU, root=tmp_path)
    assert finding.level == level
    assert said in finding.found
    assert checks.check_iommu(0, None, root=tmp_path).found == "unknown"


# Memory of the host


class Machine:
    """A made-up ``/`` with a GPU and what is free."""

    def __init__(self, root):
        self.root = root
        self.free(100 * GIB_IN_KIB)

    def write(self, path, content):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def free(self, available_kib):
        self.write("proc/meminfo", f"MemAvailable: {available_kib} kB\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("near", "level", "said"),
    [("", "note", "unknown"), ("0-7", "ok", "next to it"), ("4-7", "warning", "no CPU of this")],
)
def test_pinned_memory_comes_from_where_the_process_runs(machine, monkeypatch, near, level, said):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    machine.write(f"sys/bus/pci/devices/{GPU}/local_cpulist", near)
    finding = checks.check_memory_node(0, GPU, root=machine.root)
    assert finding.level == level
    assert said in finding.found
    assert checks.check_memory_node(0, None, root=machine.root).found == "unknown"


def test_what_each_rank_may_pin_is_told(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "garbage")  # the user's own plays no part

    def check(num_ranks):
        return checks.check_host_memory(num_ranks, 256 << 20, root=machine.root)

    assert check(4).found.startswith("12.5 GiB may be pinned by each of 4 ranks (50%")
    assert check(1).found.startswith("50.0 GiB")
    machine.free(GIB_IN_KIB)
    assert check(2).level == "ok"
    assert check(4).level == "warning"
    assert "less than one slab of 256.0 MiB" in check(4).found
    machine.free(100 * GIB_IN_KIB)
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/memory.max", str(8 << 30))
    machine.write("sys/fs/cgroup/job/memory.current", "0")
    assert check(1).found.startswith("4.0 GiB")


# Versions


@pytest.mark.parametrize(
    ("changed", "is_newer"),
    [
        ({}, False),
        ({"torch": "2.12.0a0+nv26.1"}, False),
        ({"torch": "2.99"}, True),
        ({"torch": "3.0"}, True),
        ({"torch": "of my own"}, False),
        ({"megatron-core": "0.20.0rc1"}, True),
        ({"megatron-core": NEWEST_SEEN["megatron-core"] + ".7"}, False),
    ],
)
def test_versions_that_are_newer_than_any_that_was_run_with_are_told(
    monkeypatch, changed, is_newer
):
    monkeypatch.setattr(checks, "found_versions", lambda: {"python": "3.11.7", **changed})
    finding = checks.check_versions()
    assert finding.level == ("note" if is_newer else "ok")
    assert all(f"{name} {version}" in finding.found for name, version in changed.items())
    assert [f"{name} {NEWEST_SEEN[name]}" in finding.advice for name in changed] == (
        [is_newer] * len(changed)
    )


@pytest.fixture
def another_megatron(tmp_path, monkeypatch):
    """A megatron-core that comes first on the path, as sources do that pip knows nothing of."""
    folder = tmp_path / "megatron/core"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "package_info.py").write_text(
        "MAJOR = 0\nMINOR = 23\nPATCH = 4\nPRE_RELEASE = 'rc1'\n"
        "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    sys.modules.pop("megatron", None)


def test_the_version_is_of_the_megatron_core_that_is_imported(another_megatron):
    assert checks.found_versions()["megatron-core"] == "0.23.4rc1"
    assert "megatron-core 0.23.4rc1" in checks.check_versions().found
    assert checks.found_versions()["numpy"] == importlib.metadata.version("numpy")
    (another_megatron / "package_info.py").write_text("MAJOR = input()")
    listed = importlib.metadata.version("megatron-core")
    assert checks.found_versions()["megatron-core"] == listed


# The environment


@pytest.mark.parametrize(
    ("environ", "level", "said"),
    [
        ({}, "note", "not set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, "note", "not set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "ok", "expandable"),
        ({"PYTORCH_ALLOC_CONF": "a:[1:2,3:4], expandable_segments:True"}, "ok", "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "note", "False"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "note", "not PyTorch's own"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "note", "native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ":,,::\x1b[31m"}, "note", r"\x1b[31m"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x" * 9999}, "note", "..."),
        (dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "x:1"), "note", "x:1"),
        ({"PYTORCH_ALLOC_CONF": "x:2", "PYTORCH_CUDA_ALLOC_CONF": "x:1"}, "warning", "both are"),
    ],
)
def test_the_allocator_s_settings_are_told(environ, level, said):
    (finding,) = checks.check_environment(environ)
    assert finding.level == level
    assert said in finding.found
    assert len(finding.found) < 200


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("CUDA_LAUNCH_BLOCKING", "", None),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warning"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "note"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", None),
    ],
)
def test_variables_that_matter_are_told(name, value, level):
    found = {finding.title: finding for finding in checks.check_environment({name: value})}
    assert (found[name].level if name in found else None) == level
