"""What a driver says of GPUs and their links."""

from __future__ import annotations

import pynvml
import pytest

from megatron_offload.machine.profile import PciLink, num_nvidia_gpus, read_pci_path

ADDRESS = "0000:3b:00.0"


class Driver:
    """Answers as NVML does; what it raises instead, it raises."""

    def __init__(self, monkeypatch):
        self.answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 8,
            "nvmlDeviceGetCurrPcieLinkGeneration": 3,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }
        self.calls = []
        for name in self.answers:
            monkeypatch.setattr(pynvml, name, lambda *_, name=name: self.answer(name))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", self.find)

    def answer(self, name):
        self.calls.append(name)
        if isinstance(self.answers[name], Exception):
            raise self.answers[name]
        return self.answers[name]

    def find(self, address):
        if address != ADDRESS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return address


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(monkeypatch)
    yield driver
    assert driver.calls.count("nvmlShutdown") == driver.calls.count("nvmlInit") or isinstance(
        driver.answers["nvmlInit"], Exception
    )


@pytest.mark.parametrize(
    ("generation", "width", "gbps", "text"),
    [
        (1, 16, 4.0, "PCIe 1.0 x16 (4.0 GB/s)"),
        (2, 8, 4.0, "PCIe 2.0 x8 (4.0 GB/s)"),
        (3, 16, 15.75, "PCIe 3.0 x16 (15.8 GB/s)"),
        (4, 16, 31.51, "PCIe 4.0 x16 (31.5 GB/s)"),
        (5, 16, 63.02, "PCIe 5.0 x16 (63.0 GB/s)"),
        (6, 16, 121.0, "PCIe 6.0 x16 (121.0 GB/s)"),
    ],
)
def test_a_link_carries_what_its_generation_says(generation, width, gbps, text):
    link = PciLink(generation=generation, width=width)
    assert link.gbps == pytest.approx(gbps, abs=0.02)
    assert str(link) == text


def test_the_gpu_s_link_is_read_as_it_is_and_could_be(driver):
    path = read_pci_path(ADDRESS)
    assert (path.now.generation, path.now.width) == (3, 8)
    assert (path.most.generation, path.most.width) == (5, 16)
    assert num_nvidia_gpus() == 8


@pytest.mark.parametrize("answer", [0, 255, -1, "x16", pynvml.NVMLError(3)])
@pytest.mark.parametrize("name", ["CurrPcieLinkWidth", "GpuMaxPcieLinkGeneration"])
def test_a_link_that_makes_no_sense_is_unknown(driver, name, answer):
    driver.answers[f"nvmlDeviceGet{name}"] = answer
    assert read_pci_path(ADDRESS) is None


def test_an_address_that_is_none_or_absent_is_unknown_and_without_a_driver_all_is(driver):
    for address in (None, "", "0000:ff:00.0"):
        assert read_pci_path(address) is None
    driver.answers["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert (read_pci_path(ADDRESS), num_nvidia_gpus()) == (None, 0)
