"""The PCI Express links between a GPU and the processor, as the kernel shows them.

Owns their reading and what a link can carry. Must not know torch or what is copied.

Invariant: a link that can't be read, or that makes no sense (speed unknown, width 0 or 255, as on
virtual buses), is absent. An idle GPU runs its link slower than it can, so links are read while
copies run. Read next: `megatron_offload.machine.checks_device`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import Field

from megatron_offload.config import StrictModel
from megatron_offload.files.kernel import read_int, read_kernel_text

__all__ = ["PciLink", "PciPath", "num_nvidia_gpus", "read_pci_path"]

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SPEED = re.compile(r"(\d{1,3}(?:\.\d)?) GT/s")
_WIDEST = 32
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


class PciLink(StrictModel):
    """One link: its transfers a second on each lane, in 10^9, and its number of lanes."""

    gtps: float = Field(gt=0, le=1000)
    width: int = Field(ge=1, le=_WIDEST)

    @property
    def gbps(self) -> float:
        """What it carries each way at most, packet headers included, in 10^9 bytes a second.

        Generations 1 and 2 send 10 bits for each byte, later ones 130 bits for 16 bytes (PCI
        Express Base Specification, chapter 4); generation 6, with other framing, is close to that.
        """
        bytes_per_bit = 0.1 if self.gtps <= 5 else 16 / 130
        return self.gtps * self.width * bytes_per_bit

    def __str__(self) -> str:
        generation = _GENERATIONS.get(self.gtps)
        speed = f"PCIe {generation}.0" if generation else f"{self.gtps:g} GT/s"
        return f"{speed} x{self.width} ({self.gbps:.1f} GB/s)"


class PciPath(StrictModel):
    """The way from a GPU to the processor."""

    now: PciLink
    """The GPU's own link."""

    most: PciLink
    """What that could be, by the GPU."""

    narrowest: PciLink
    """The link on the way that carries least, the GPU's own among them."""


def read_pci_path(address: str | None, *, root: Path = Path("/")) -> PciPath | None:
    """Return a GPU's way to the processor; None where it can't be read.

    As in the kernel's own ``pcie_bandwidth_available``, every bridge above the GPU counts.

    Args:
        address: such as ``0000:dc:02.0``.
        root: the folder in which ``sys`` lies.
    """
    if address is None or not _ADDRESS.fullmatch(address):
        return None
    folder = Path(os.path.realpath(root / "sys/bus/pci/devices" / address))
    now, most = _read_link(folder, "current"), _read_link(folder, "max")
    if now is None or most is None:
        return None
    bridges = [parent for parent in folder.parents if _ADDRESS.fullmatch(parent.name)]
    links = [now, *filter(None, (_read_link(bridge, "current") for bridge in bridges))]
    return PciPath(now=now, most=most, narrowest=min(links, key=lambda link: link.gbps))


def num_nvidia_gpus(*, root: Path = Path("/")) -> int:
    """Return how many NVIDIA GPUs are on the PCI bus, whether or not CUDA can use them."""
    folder = root / "sys/bus/pci/devices"
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    return sum(
        read_kernel_text(folder / name / "vendor").strip() == _NVIDIA
        and read_kernel_text(folder / name / "class").startswith(_DISPLAY_CLASS)
        for name in names
    )


def _read_link(folder: Path, which: str) -> PciLink | None:
    speed = _SPEED.match(read_kernel_text(folder / f"{which}_link_speed"))
    width = read_int(folder / f"{which}_link_width")
    if speed is None or float(speed[1]) == 0 or width is None or not 1 <= width <= _WIDEST:
        return None
    return PciLink(gtps=float(speed[1]), width=width)
