"""The whole machine, with made-up GPUs."""

from __future__ import annotations

import pytest

from megatron_offload.machine import examine as module
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.examine import examine
from megatron_offload.machine.profile import CopyRates

GPUS = ("NVIDIA H200",) * 2
RATES = CopyRates(**dict.fromkeys(CopyRates.model_fields, 50.0))


class Machine:
    """Stands in for the devices and for the processes that measure them."""

    def __init__(self, root):
        self.root = root
        self.devices = GPUS
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
        return (RATES,) * num_gpus

    def examine(self, **settings):
        return examine(environ={}, root=self.root, **settings)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    monkeypatch.setattr(module, "visible_devices", machine.visible_devices)
    monkeypatch.setattr(module, "measure_gpus", machine.measure_gpus)
    return machine


def levels(examination):
    return {finding.level for finding in examination.findings}


def test_every_gpu_is_measured_and_looked_at(machine):
    examination = machine.examine()
    assert machine.measured == [2]
    titles = [finding.title for finding in examination.findings]
    assert titles[:3] == ["GPUs", "GPU 0: copies", "GPU 1: copies"]
    assert len(set(titles)) == len(titles)
    assert {"host memory", "versions"} <= set(titles)
    assert "error" not in levels(examination)


def test_without_a_measurement_no_copies_are_reported(machine):
    examination = machine.examine(bandwidth=False)
    assert examination.profile is None
    assert machine.measured == []
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
    examination = examine(bandwidth=False)
    assert examination.findings
    assert "error" not in levels(examination)
