"""Links of made-up buses."""

from __future__ import annotations

import pytest

from megatron_offload.machine.pci import PciLink, num_nvidia_gpus, read_pci_path

GPU = "0000:3b:00.0"


@pytest.fixture
def bus(tmp_path):
    """A ``/sys`` in which a GPU sits behind a bridge, below a root port."""
    bus = Bus(tmp_path)
    bus.add("pci0000:3a/0000:3a:00.0", "32.0 GT/s PCIe", 16)
    bus.add("pci0000:3a/0000:3a:00.0/0000:3b:00.0", "32.0 GT/s PCIe", 16)
    return bus


class Bus:
    def __init__(self, root):
        self.root = root
        (root / "sys/bus/pci/devices").mkdir(parents=True)

    def add(self, path, speed, width):
        folder = self.root / "sys/devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        self.write(path, current_link_speed=speed, max_link_speed=speed)
        self.write(path, current_link_width=width, max_link_width=width)
        (self.root / "sys/bus/pci/devices" / folder.name).symlink_to(folder)

    def write(self, path, **files):
        for name, text in files.items():
            content = text if isinstance(text, bytes) else f"{text}\n".encode()
            (self.root / "sys/devices" / path / name).write_bytes(content)


BRIDGE, DEVICE = "pci0000:3a/0000:3a:00.0", f"pci0000:3a/0000:3a:00.0/{GPU}"


@pytest.mark.parametrize(
    ("gtps", "width", "gbps", "text"),
    [
        (2.5, 16, 4.0, "PCIe 1.0 x16 (4.0 GB/s)"),
        (5.0, 8, 4.0, "PCIe 2.0 x8 (4.0 GB/s)"),
        (8.0, 16, 15.75, "PCIe 3.0 x16 (15.8 GB/s)"),
        (16.0, 16, 31.51, "PCIe 4.0 x16 (31.5 GB/s)"),
        (32.0, 16, 63.02, "PCIe 5.0 x16 (63.0 GB/s)"),
        (12.0, 2, 2.95, "12 GT/s x2 (3.0 GB/s)"),
    ],
)
def test_a_link_carries_what_its_generation_says(gtps, width, gbps, text):
    link = PciLink(gtps=gtps, width=width)
    assert link.gbps == pytest.approx(gbps, abs=0.01)
    assert str(link) == text


def test_the_gpu_s_own_link_is_read_as_it_is_and_could_be(bus):
    bus.write(DEVICE, current_link_speed="8 GT/s", current_link_width=8)
    path = read_pci_path(GPU, root=bus.root)
    assert (path.now.gtps, path.now.width) == (8.0, 8)
    assert (path.most.gtps, path.most.width) == (32.0, 16)
    assert path.narrowest == path.now


def test_the_narrowest_link_may_be_further_up(bus):
    bus.write(BRIDGE, current_link_width=4)
    path = read_pci_path(GPU, root=bus.root)
    assert path.now.width == 16
    assert (path.narrowest.gtps, path.narrowest.width) == (32.0, 4)


def test_a_bridge_that_tells_nothing_is_passed_over(bus):
    bus.write(BRIDGE, current_link_speed="Unknown", current_link_width=0)
    path = read_pci_path(GPU, root=bus.root)
    assert path.narrowest == path.now


@pytest.mark.parametrize("name", ["current_link_speed", "max_link_speed"])
@pytest.mark.parametrize(
    "content", ["Unknown", "", "0.0 GT/s", "fast", b"\xff", "9" * 99 + " GT/s", b"9" * (5 << 20)]
)
def test_a_speed_that_makes_no_sense_is_unknown(bus, name, content):
    bus.write(DEVICE, **{name: content})
    assert read_pci_path(GPU, root=bus.root) is None


@pytest.mark.parametrize("width", ["0", "255", "-1", "", "x16", "9" * 30])
def test_a_width_that_makes_no_sense_is_unknown(bus, width):
    bus.write(DEVICE, current_link_width=width)
    assert read_pci_path(GPU, root=bus.root) is None


@pytest.mark.parametrize(
    "address", [None, "", f"../../../devices/{DEVICE}", "0000:3b:00", "0000:ff:00.0"]
)
def test_an_address_that_is_none_or_absent_is_unknown(bus, address):
    assert read_pci_path(address, root=bus.root) is None


def test_a_link_of_no_lanes_can_t_be_made():
    with pytest.raises(ValueError, match="width"):
        PciLink(gtps=8, width=0)


def test_nvidia_s_gpus_are_counted_on_the_bus(bus):
    assert num_nvidia_gpus(root=bus.root) == 0
    bus.write(DEVICE, vendor="0x10de", **{"class": "0x030200"})
    bus.write(BRIDGE, vendor="0x10de", **{"class": "0x068000"})  # an NVSwitch
    assert num_nvidia_gpus(root=bus.root) == 1
    assert num_nvidia_gpus(root=bus.root / "absent") == 0
