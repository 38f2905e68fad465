"""Memory next to a device: made-up machines, the system call's arguments, and one real call."""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform

import pytest
import torch

from megatron_offload.backends.numa import node_of_device, online_nodes, prefer_node

MIB = 1 << 20
MPOL_PREFERRED = 1
DEVICE = "bus/pci/devices/0000:dc:02.0/numa_node"


class Machine:
    """A made-up ``/sys`` with two memory nodes and one device."""

    def __init__(self, root):
        self.root = root
        self.write("devices/system/node/online", "0-1\n")
        self.write(DEVICE, "1\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    def node(self):
        """Return the node that the device is found at."""
        return node_of_device("0000:dc:02.0", sysfs=self.root)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("0\n", {0}),
        ("0-3\n", {0, 1, 2, 3}),
        ("0-1,8,16-17\n", {0, 1, 8, 16, 17}),
        *((text, set()) for text in ("", "\n", "none", "0-", "-1", "1-x", "0,,1", "²", "0-" * 99)),
        (b"\xff", set()),
    ],
)
def test_nodes_are_read_or_unknown(machine, text, nodes):
    machine.write("devices/system/node/online", text)
    assert online_nodes(sysfs=machine.root) == nodes


def test_a_device_is_found_by_its_address(machine):
    assert machine.node() == 1
    machine.write("bus/pci/devices/10000:01:1f.0/numa_node", "0\n")
    assert node_of_device("10000:01:1f.0", sysfs=machine.root) == 0
    assert node_of_device("0000:01:02.0", sysfs=machine.root) is None
    assert node_of_device(None, sysfs=machine.root) is None
    machine.write("devices/system/node/online", "1\n")
    assert machine.node() is None, "nothing to choose"
    assert online_nodes(sysfs=machine.root / "empty") == frozenset()
    assert node_of_device("0000:dc:02.0", sysfs=machine.root / "empty") is None


@pytest.mark.parametrize("text", ["-1\n", "", "2\n", "one", "²", b"\xff", "1 1"])
def test_an_unknown_node_is_none(machine, text, caplog):
    machine.write(DEVICE, text)
    with caplog.at_level(logging.DEBUG):
        assert machine.node() is None
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG


# The system call.


class Kernel:
    """Takes note of what it is asked."""

    def __init__(self, result=0):
        self.result = result
        self.asked = []

    def __call__(self, number, address, length, mode, mask, num_bits, flags):
        bits = [
            word * 8 * ctypes.sizeof(ctypes.c_ulong) + bit
            for word, value in enumerate(mask)
            for bit in range(64)
            if value >> bit & 1
        ]
        self.asked.append(
            (number.value, address.value, length.value, mode.value, bits, flags.value)
        )
        assert max(bits) < num_bits.value - 1 <= 8 * ctypes.sizeof(mask)
        return self.result


@pytest.mark.parametrize(("machine_name", "number"), [("x86_64", 237), ("aarch64", 235)])
@pytest.mark.parametrize("node", [0, 1, 63, 64, 200])
def test_the_kernel_is_asked_to_prefer_exactly_that_node(machine_name, number, node, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine_name)
    kernel = Kernel()
    assert prefer_node(0x7F0000000000, 3 * MIB, node, syscall=kernel)
    assert kernel.asked == [(number, 0x7F0000000000, 3 * MIB, MPOL_PREFERRED, [node], 0)]


def test_a_refusal_is_said_quietly(caplog):
    with caplog.at_level(logging.DEBUG):
        assert not prefer_node(1 << 30, MIB, 1, syscall=Kernel(-1))
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "can't be placed on memory node 1" in record.getMessage()


def test_an_unknown_kind_of_machine_and_an_impossible_node_are_not_asked(monkeypatch):
    kernel = Kernel()
    assert not prefer_node(1 << 30, MIB, -1, syscall=kernel)
    assert not prefer_node(1 << 30, MIB, 1 << 20, syscall=kernel)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not prefer_node(1 << 30, MIB, 0, syscall=kernel)
    assert kernel.asked == []


def policy_of(address):
    """Return the policy of a page and its nodes, as get_mempolicy(2) tells them."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    result = ctypes.CDLL(None).syscall(
        *(ctypes.c_long(number), ctypes.byref(mode), mask, ctypes.c_ulong(1024)),
        *(ctypes.c_void_p(address), ctypes.c_ulong(2)),
    )
    return (mode.value, mask[0]) if result == 0 else None


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="no number of mbind(2) for this machine"
)
def test_this_machine_s_kernel_takes_the_wish():
    pages = mmap.mmap(-1, 4 * MIB)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    if not prefer_node(address, 4 * MIB, 0):
        pytest.skip("the kernel doesn't permit mbind(2) here")
    assert policy_of(address + 2 * MIB) in ((MPOL_PREFERRED, 1), None)
    pages.write(b"x" * 4 * MIB)
    assert pages[-1:] == b"x"
    assert not prefer_node(address + 1, MIB, 0), "an address inside of a page is refused"
