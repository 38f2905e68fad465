"""Machines, made up: what is said of their GPUs, memory, settings and versions."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest

from megatron_offload.machine import examine as checks
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.profile import CopyRates

GIB_IN_KIB = 1 << 20


def make_rates(alone=55.0, both=50.0, node=50.0):
    values = (alone, alone, both, both, node, node)
    return CopyRates(**dict(zip(CopyRates.model_fields, values, strict=True)))


@pytest.mark.parametrize(
    ("names", "level", "said"),
    [(["H200", "H100", "H200"], "ok", "3 of H100, H200"), ([], "note", "the simulated device")],
)
def test_gpus_are_counted_by_kind(names, level, said):
    finding = checks.check_devices(names)
    assert finding.level == level
    assert said in finding.found
    assert ("CUDA_VISIBLE_DEVICES" in finding.advice) == (level == "note")


@pytest.mark.parametrize(
    ("rates", "num_gpus", "level", "said", "advised"),
    [
        (make_rates(55, 53, 52), 4, "ok", "52.0 and 52.0 while all 4 GPUs copy", ""),
        (make_rates(55, 51, 25.6), 4, "note", "25.6 and 25.6 while all 4", "copies go both ways"),
        (make_rates(55, 28, 28), 4, "note", "55.0 GB/s to the host", "copies go both ways"),
        (make_rates(55, 28, 28), 1, "note", "at once 28.0 and 28.0", "copies go both ways"),
        (make_rates(55, 54, 54), 1, "ok", "55.0 back", ""),
        (make_rates(12, 12, 12), 1, "warning", "12.0 back", "lspci"),
        (make_rates().model_copy(update={"h2d_gbps": 19.0}), 1, "warning", "19.0 back", "iommu=pt"),
    ],
)
def test_rates_alone_and_when_others_copy_too_are_reported(rates, num_gpus, level, said, advised):
    finding = checks.check_rates(0, rates, num_gpus)
    assert finding.level == level
    assert said in finding.found
    assert advised in finding.advice
    assert bool(finding.advice) == (level != "ok")
    assert ("while all" in finding.found) == (num_gpus > 1)


# Memory of the host


def free(root, available_kib):
    """Say in a made-up ``/`` how much memory is free."""
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {available_kib} kB\n")


def test_what_each_rank_may_pin_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "garbage")  # the user's own plays no part

    def check(num_ranks):
        return checks.check_host_memory(num_ranks, 256 << 20, root=tmp_path)

    free(tmp_path, 100 * GIB_IN_KIB)
    assert check(4).found.startswith("12.5 GiB may be pinned by each of 4 ranks (50%")
    assert check(1).found.startswith("50.0 GiB")
    free(tmp_path, GIB_IN_KIB)
    assert check(2).level == "ok"
    assert check(4).level == "warning"
    assert "less than one slab of 256.0 MiB" in check(4).found


# Versions


def test_the_version_is_of_the_megatron_core_that_was_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__="0.23.4rc1"))
    assert checks.found_versions()["megatron-core"] == "0.23.4rc1"
    assert checks.found_versions()["numpy"] == importlib.metadata.version("numpy")
    monkeypatch.delitem(sys.modules, "megatron.core")
    listed = importlib.metadata.version("megatron-core")
    assert checks.found_versions()["megatron-core"] == listed


# The environment


@pytest.mark.parametrize(
    ("environ", "level", "said"),
    [
        ({}, "note", "not set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, "note", "not set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "ok", "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ":,,::\x1b[31m"}, "ok", r"\x1b[31m"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x" * 9999}, "ok", "..."),
    ],
)
def test_the_allocator_s_settings_are_reported(environ, level, said):
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
def test_variables_that_matter_are_reported(name, value, level):
    found = {finding.title: finding for finding in checks.check_environment({name: value})}
    assert (found[name].level if name in found else None) == level


# The whole machine


class Machine:
    """Stands in for the devices and for the processes that measure them."""

    def __init__(self, root):
        self.root = root
        self.devices = ("NVIDIA H200",) * 2
        self.error = None
        self.measured = []

    def visible_devices(self):
        if isinstance(self.devices, Exception):
            raise self.devices
        return self.devices

    def measure_gpus(self, num_gpus):
        self.measured.append(num_gpus)
        if self.error is not None:
            raise self.error
        return (make_rates(),) * num_gpus

    def examine(self, **settings):
        return checks.examine(environ={}, root=self.root, **settings)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    monkeypatch.setattr(checks, "visible_devices", machine.visible_devices)
    monkeypatch.setattr(checks, "measure_gpus", machine.measure_gpus)
    return machine


def levels(examination):
    return {finding.level for finding in examination.findings}


def test_every_gpu_is_looked_at_and_measured_where_that_is_not_left_out(machine):
    examination = machine.examine()
    assert machine.measured == [2]
    titles = [finding.title for finding in examination.findings]
    assert titles[:3] == ["GPUs", "GPU 0: copies", "GPU 1: copies"]
    assert len(set(titles)) == len(titles)
    assert {"host memory", "versions"} <= set(titles)
    assert "error" not in levels(examination)
    examination = machine.examine(bandwidth=False)
    assert examination.profile is None
    assert machine.measured == [2], "no second time"
    assert "GPU 0: copies" not in [finding.title for finding in examination.findings]


def test_a_measurement_that_fails_is_an_error_and_the_rest_is_reported(machine):
    machine.error = BandwidthError("measuring GPU 1 failed: pinning failed")
    examination = machine.examine()
    (error,) = [finding for finding in examination.findings if finding.level == "error"]
    assert (error.title, error.found) == ("bandwidth", "measuring GPU 1 failed: pinning failed")
    assert examination.profile is None
    assert "versions" in [finding.title for finding in examination.findings]


def test_without_a_gpu_nothing_is_measured_and_nothing_is_wrong(machine):
    machine.devices = ()
    examination = machine.examine()
    assert machine.measured == []
    assert examination.profile is None
    assert levels(examination) <= {"ok", "note"}


def test_a_cuda_that_can_t_be_started_is_an_error(machine):
    machine.devices = RuntimeError("CUDA error: system not yet initialized\nmore lines")
    examination = machine.examine()
    (error,) = [finding for finding in examination.findings if finding.level == "error"]
    assert error.found == "it can't be started: CUDA error: system not yet initialized"
    assert "host memory" in [finding.title for finding in examination.findings]


def test_this_machine_as_it_is_can_be_examined():
    examination = checks.examine(bandwidth=False)
    assert examination.findings
    assert "error" not in levels(examination)
