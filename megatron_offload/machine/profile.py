"""What the driver says of a machine's GPUs, and what was measured on them, kept for later.

The driver is asked by NVML; without one all is unknown. Files lie in the user's cache folder, one
for each fingerprint: of the machine, its GPUs, the driver and CUDA. What is broken or of another
machine counts as absent.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import platformdirs
import pynvml
from pydantic import AwareDatetime, Field, model_validator

from megatron_offload.errors import ConfigError
from megatron_offload.files.strict_model import StrictModel, read_model
from megatron_offload.files.text import replace_text

_logger = logging.getLogger(__name__)

_MAX_PROFILE_BYTES = 256 * 1024
_MAX_GPUS = 64

_Answer = TypeVar("_Answer")

Word = Annotated[str, Field(max_length=200)]
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


class GpuIdentity(StrictModel):
    """Which GPU, and where."""

    name: Word
    pci_address: Word | None


class MachineIdentity(StrictModel):
    """All that bandwidth hangs on; where it changes, what was measured no longer counts."""

    host_hash: Word
    """Of the host's name and machine number, which others need not see."""
    kernel: Word
    gpus: tuple[GpuIdentity, ...] = Field(max_length=_MAX_GPUS)
    """Those that the process can use, in CUDA's order."""
    driver_version: Word | None
    cuda_version: Word | None
    torch_version: Word


class GpuProfile(StrictModel):
    """What was measured on one GPU."""

    rates: CopyRates
    pci: PciPath | None
    """Its link while copies ran; None where it can't be read."""


class MachineProfile(StrictModel):
    """What was measured on a machine."""

    version: Literal[2] = 2
    identity: MachineIdentity
    measured_at: AwareDatetime
    gpus: tuple[GpuProfile, ...] = Field(max_length=_MAX_GPUS)
    """For each of the identity's GPUs."""

    @model_validator(mode="after")
    def _one_for_each(self) -> MachineProfile:
        measured, there = len(self.gpus), len(self.identity.gpus)
        if measured != there:
            raise ValueError(f"{measured} GPUs were measured and the machine has {there}")
        return self


def profile_path(identity: MachineIdentity, folder: Path | None = None) -> Path:
    """Return where the profile of a machine is kept; ``folder`` as for `load_profile`."""
    folder = folder or platformdirs.user_cache_path("megatron-offload", appauthor=False)
    fingerprint = hashlib.sha256(identity.model_dump_json().encode()).hexdigest()[:32]
    return folder / f"machine-{fingerprint}.json"


def load_profile(identity: MachineIdentity, folder: Path | None = None) -> MachineProfile | None:
    """Return what was last measured on this machine as it is now; None where that is unknown.

    A file that can't be taken is warned of. ``folder`` is where profiles are kept; None takes the
    user's cache folder (XDG's rules on Linux).
    """
    path = profile_path(identity, folder)
    if not os.path.exists(path):
        return None
    try:
        profile = read_model(MachineProfile, path, limit_bytes=_MAX_PROFILE_BYTES)
    except ConfigError as error:
        _logger.warning("what was measured on this machine can't be read: %s", error)
        return None
    if profile.identity != identity:
        _logger.warning("%s is of another machine, and is not taken", path)
        return None
    return profile


def save_profile(profile: MachineProfile, folder: Path | None = None) -> Path:
    """Keep a profile for `load_profile`; return where it lies, or raise `ConfigError`."""
    path = profile_path(profile.identity, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, profile.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from error
    return path


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


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    return _ask(lambda: str(pynvml.nvmlSystemGetDriverVersion())[:200])


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
