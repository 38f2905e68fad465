"""What the driver says of a machine's GPUs, by NVML, and what was measured on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import pynvml
from pydantic import AwareDatetime, Field

from megatron_offload.files.strict_model import StrictModel

_Answer = TypeVar("_Answer")

Rate = Annotated[float, Field(gt=0, le=1e6)]

_LANE_GBPS = (0.25, 0.5, 0.985, 1.969, 3.938, 7.563)
"""What a lane carries each way at most, by generation, packet headers included, in 10^9 bytes a
second: the transfers of the PCI Express Base Specification, chapter 4, less their line coding."""


class PciLink(StrictModel):
    """One link."""

    generation: int = Field(ge=1, le=len(_LANE_GBPS))
    width: int = Field(ge=1, le=32)

    @property
    def gbps(self) -> float:
        """What it carries each way at most, packet headers included, in 10^9 bytes a second."""
        return _LANE_GBPS[self.generation - 1] * self.width

    def __str__(self) -> str:
        return f"PCIe {self.generation}.0 x{self.width} ({self.gbps:.1f} GB/s)"


class PciPath(StrictModel):
    """A GPU's link."""

    now: PciLink
    most: PciLink
    """What that could be, by the GPU."""


class CopyRates(StrictModel):
    """How fast one GPU copies, in 10^9 bytes a second, from and to page-locked memory."""

    d2h_gbps: Rate
    """To the host, alone."""
    h2d_gbps: Rate
    """To the device, alone."""
    both_d2h_gbps: Rate
    """To the host while as much comes back."""
    both_h2d_gbps: Rate
    """To the device meanwhile."""
    node_d2h_gbps: Rate
    """To the host while all GPUs of the job on this machine copy both ways."""
    node_h2d_gbps: Rate
    """To the device meanwhile."""


class GpuProfile(StrictModel):
    """What was measured on one GPU."""

    rates: CopyRates
    pci: PciPath | None
    """Its link while copies ran; None where it can't be read."""


class MachineProfile(StrictModel):
    """What was measured on a machine."""

    version: Literal[3] = 3
    measured_at: AwareDatetime
    gpus: tuple[GpuProfile, ...] = Field(max_length=64)
    """Those that the process could use, in CUDA's order."""


def read_pci_path(address: str | None) -> PciPath | None:
    """Return the link of the GPU at a PCI address; None where it is unknown or makes no sense."""

    def path() -> PciPath:
        gpu = pynvml.nvmlDeviceGetHandleByPciBusId(address)
        return PciPath(
            now=PciLink(
                generation=pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
                width=pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
            ),
            most=PciLink(
                generation=pynvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu),
                width=pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
            ),
        )

    return _ask(path) if address is not None else None


def num_nvidia_gpus() -> int:
    """Return how many NVIDIA GPUs the driver shows, whether or not CUDA can use them."""
    return _ask(lambda: int(pynvml.nvmlDeviceGetCount())) or 0


def _ask(question: Callable[[], _Answer]) -> _Answer | None:
    """Return what the driver answers; None where it doesn't, or where the answer makes no sense."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question()
    except (pynvml.NVMLError, ValueError):
        return None
    finally:
        pynvml.nvmlShutdown()
