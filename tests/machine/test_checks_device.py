"""GPUs and links, made up: what is said of each."""

from __future__ import annotations

import pytest

from megatron_offload.backends.base import DeviceInfo
from megatron_offload.machine.checks_device import (
    check_copy_engines,
    check_devices,
    check_iommu,
    check_link,
    check_node_rates,
)
from megatron_offload.machine.pci import PciLink, PciPath
from megatron_offload.machine.profile import CopyRates

H200 = DeviceInfo("NVIDIA H200", "0000:3b:00.0", 140 << 30, 3)
GEN5, GEN3 = PciLink(generation=5, width=16), PciLink(generation=3, width=16)
GEN5_X4 = PciLink(generation=5, width=4)


def make_path(now=GEN5, most=GEN5):
    return PciPath(now=now, most=most)


def make_rates(alone=55.0, both=50.0, node=50.0):
    values = (alone, alone, both, both, node, node)
    return CopyRates(**dict(zip(CopyRates.model_fields, values, strict=True)))


def test_gpus_are_counted_by_kind():
    finding = check_devices([H200, H200._replace(name="NVIDIA H100")], 2)
    assert (finding.level, finding.found) == ("ok", "2 of NVIDIA H100, NVIDIA H200")


def test_no_gpu_is_no_error():
    assert check_devices([], 0).level == "note"


def test_gpus_that_torch_can_t_use_are_a_warning():
    finding = check_devices([], 8)
    assert (finding.level, finding.found) == (
        "warning",
        "the driver shows 8, and PyTorch can use none",
    )
    assert "CUDA_VISIBLE_DEVICES" in finding.advice


@pytest.mark.parametrize(
    ("count", "level"), [(None, "note"), (0, "warning"), (1, "note"), (2, "ok"), (3, "ok")]
)
def test_copy_engines_decide_whether_copies_run_beside_kernels(count, level):
    finding = check_copy_engines(3, H200._replace(num_copy_engines=count))
    assert (finding.level, finding.title) == (level, "GPU 3: copy engines")
    assert bool(finding.advice) == (count in (0, 1))


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
        (make_path(), make_rates(alone=30), "warning", "30.0 back, of PCIe 5.0"),
        (None, make_rates(), "ok", "the driver doesn't show it"),
        (None, None, "note", "unknown"),
        (make_path(), None, "ok", "PCIe 5.0 x16"),
        (make_path(now=GEN3, most=GEN5), None, "note", "while idle"),
    ],
)
def test_copies_are_held_against_their_link(path, rates, level, said):
    finding = check_link(0, path, rates)
    assert finding.level == level
    assert said in finding.found
    assert bool(finding.advice) == (level != "ok")


def test_the_slower_direction_counts():
    rates = make_rates().model_copy(update={"h2d_gbps": 20.0})
    assert check_link(0, make_path(), rates).level == "warning"


@pytest.mark.parametrize(
    ("rates", "num_gpus", "level", "said", "advised"),
    [
        (make_rates(55, 53, 52), 4, "ok", "52.0 and 52.0 while all 4 GPUs copy", ""),
        (make_rates(55, 51, 25.6), 4, "note", "25.6 and 25.6 while all 4", "resident_delta"),
        (make_rates(55, 28, 28), 4, "note", "28.0 GB/s to the host", "copies go both ways"),
        (make_rates(55, 28, 28), 1, "note", "28.0 back at once", "copies go both ways"),
        (make_rates(55, 54, 54), 1, "ok", "54.0 back at once", ""),
    ],
)
def test_what_is_left_when_others_copy_too_is_told(rates, num_gpus, level, said, advised):
    finding = check_node_rates(0, rates, num_gpus)
    assert finding.level == level
    assert said in finding.found
    assert advised in finding.advice
    assert ("while all" in finding.found) == (num_gpus > 1)


@pytest.mark.parametrize(
    ("content", "level", "said"),
    [
        (b"DMA\n", "note", "translates"),
        (b"DMA-FQ\n", "note", "'DMA-FQ'"),
        (b"identity\n", "ok", "pass through"),
        (None, "ok", "none is shown"),
        (b"", "ok", "none is shown"),
        (b"\xff", "ok", "none is shown"),
    ],
)
def test_an_iommu_that_translates_is_noted(tmp_path, content, level, said):
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0/iommu_group"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "type").write_bytes(content)
    finding = check_iommu(0, H200.pci_address, root=tmp_path)
    assert finding.level == level
    assert said in finding.found


def test_without_an_address_the_iommu_is_unknown(tmp_path):
    assert check_iommu(0, None, root=tmp_path).found == "unknown"
