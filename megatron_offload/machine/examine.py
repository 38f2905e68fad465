"""Looks at the machine as a whole.

The examining process opens no device and changes nothing but the cached profile; what fails becomes
a finding.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from megatron_offload.backends import visible_devices
from megatron_offload.backends.base import DeviceInfo
from megatron_offload.config import OffloadConfig
from megatron_offload.errors import ConfigError
from megatron_offload.files.kernel import read_kernel_text
from megatron_offload.machine.bandwidth import BandwidthError
from megatron_offload.machine.checks_device import (
    check_copy_engines,
    check_devices,
    check_iommu,
    check_link,
    check_node_rates,
)
from megatron_offload.machine.checks_host import (
    check_host_memory,
    check_memlock,
    check_memory_node,
    check_swap,
)
from megatron_offload.machine.checks_software import (
    check_environment,
    check_python,
    check_versions,
    own_requirements,
)
from megatron_offload.machine.finding import Finding
from megatron_offload.machine.pci import driver_version, num_nvidia_gpus, read_pci_path
from megatron_offload.machine.profile import (
    GpuIdentity,
    GpuProfile,
    MachineIdentity,
    MachineProfile,
    load_profile,
    save_profile,
)
from megatron_offload.machine.ranks import measure_gpus


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found."""

    findings: tuple[Finding, ...]
    profile: MachineProfile | None
    """Bandwidths, measured now or kept from before; None where there are none."""


def examine(
    *,
    bandwidth: bool = True,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    cache: Path | None = None,
) -> Examination:
    """Look at everything, and keep what was measured.

    Args:
        bandwidth: measure it, which takes some seconds and wants idle GPUs; else take what was
            measured before.
        environ: the environment that training runs in; None takes the process's own.
        root: the folder in which ``etc``, ``proc`` and ``sys`` lie.
        cache: where profiles are kept; None takes the user's cache folder.
    """
    findings = []
    devices: Sequence[DeviceInfo] = ()
    try:
        devices = visible_devices()
    except RuntimeError as error:
        first_line = str(error).strip().split("\n")[0]
        findings.append(
            Finding("error", "CUDA", f"it can't be started: {first_line}", "see nvidia-smi")
        )
    else:
        findings.append(check_devices(devices, num_nvidia_gpus()))
    profile = None
    if devices:
        identity = identify_machine([identify_gpu(device) for device in devices], root=root)
        if bandwidth:
            profile, failures = _measure(identity, cache)
            findings += failures
        else:
            profile = load_profile(identity, cache)
    for index, device in enumerate(devices):
        measured = profile.gpus[index] if profile is not None else None
        findings += _look_at(index, device, measured, len(devices), root)
    findings += [
        check_host_memory(max(1, len(devices)), OffloadConfig().host_slab_bytes, root=root),
        check_swap(),
        check_memlock(_memlock_bytes()),
        *check_environment(os.environ if environ is None else environ),
        check_python(),
        *check_versions(own_requirements()),
    ]
    return Examination(tuple(findings), profile)


def identify_gpu(device: DeviceInfo) -> GpuIdentity:
    """Return what tells a GPU from others."""
    return GpuIdentity(name=device.name, pci_address=device.pci_address)


def identify_machine(
    gpus: Sequence[GpuIdentity] | None = None, *, root: Path = Path("/")
) -> MachineIdentity:
    """Return the identity under which `load_profile` finds what was measured here.

    Args:
        gpus: those that share the machine's bandwidth; None for all that the process can use.
        root: the folder in which ``etc`` lies.

    Raises:
        RuntimeError: there are CUDA devices and CUDA can't be started.
    """
    if gpus is None:
        gpus = [identify_gpu(device) for device in visible_devices()]
    host = f"{platform.node()}\n{read_kernel_text(root / 'etc/machine-id')}".encode()
    return MachineIdentity(
        host_hash=hashlib.sha256(host).hexdigest()[:16],
        kernel=platform.release()[:200],
        gpus=tuple(gpus),
        driver_version=driver_version(),
        cuda_version=torch.version.cuda,
        torch_version=str(torch.__version__),
    )


def _measure(
    identity: MachineIdentity, cache: Path | None
) -> tuple[MachineProfile | None, list[Finding]]:
    title = "bandwidth"
    try:
        gpus = measure_gpus([gpu.pci_address for gpu in identity.gpus])
    except BandwidthError as error:
        advice = "see that the GPUs are free, and what the findings on host memory say"
        return None, [Finding("error", title, str(error), advice)]
    profile = MachineProfile(identity=identity, measured_at=datetime.now(UTC), gpus=gpus)
    try:
        save_profile(profile, cache)
    except ConfigError as error:
        return profile, [Finding("note", title, f"it is not kept: {error}", "set XDG_CACHE_HOME")]
    return profile, []


def _look_at(
    index: int, device: DeviceInfo, measured: GpuProfile | None, num_gpus: int, root: Path
) -> list[Finding]:
    address = device.pci_address
    if measured is None:
        copies = [check_link(index, read_pci_path(address), None)]
    else:
        copies = [check_link(index, measured.pci, measured.rates)]
        copies.append(check_node_rates(index, measured.rates, num_gpus))
    return [
        check_copy_engines(index, device),
        *copies,
        check_memory_node(index, address, root=root),
        check_iommu(index, address, root=root),
    ]


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
