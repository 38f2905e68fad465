"""Looks at the machine as a whole.

The examining process opens no device and changes nothing but the cached profile; what fails becomes
a finding.
"""

from __future__ import annotations

import hashlib
import os
import platform
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
from megatron_offload.machine import checks
from megatron_offload.machine.bandwidth import BandwidthError, measure_gpus
from megatron_offload.machine.checks import Finding
from megatron_offload.machine.profile import (
    GpuIdentity,
    MachineIdentity,
    MachineProfile,
    driver_version,
    load_profile,
    num_nvidia_gpus,
    read_pci_path,
    save_profile,
)


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found."""

    findings: tuple[Finding, ...]
    profile: MachineProfile | None
    """Bandwidths, measured now or kept from before; None where there are none."""


def examine(
    *,
    bandwidth: bool = True,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    cache: Path | None = None,
) -> Examination:
    """Look at everything, and keep what was measured.

    Args:
        bandwidth: measure it, which takes some seconds and wants idle GPUs; else take what was
            measured before.
        environ: the environment that training runs in.
        root: the folder in which ``etc``, ``proc`` and ``sys`` lie.
        cache: where profiles are kept; None takes the user's cache folder.
    """
    findings = []
    devices: Sequence[DeviceInfo] = ()
    try:
        devices = visible_devices()
    except RuntimeError as error:
        first_line = str(error).strip().split("\n")[0]
        found = f"it can't be started: {first_line}"
        findings.append(Finding("error", "CUDA", found, "see nvidia-smi"))
    else:
        names = [device.name for device in devices]
        findings.append(checks.check_devices(names, num_nvidia_gpus()))
    profile = None
    if devices:
        identity = identify_machine(devices, root=root)
        if bandwidth:
            profile, failures = _measure(identity, cache)
            findings += failures
        else:
            profile = load_profile(identity, cache)
    for index, device in enumerate(devices):
        address = device.pci_address
        if profile is None:
            findings.append(checks.check_link(index, read_pci_path(address), None))
        else:
            gpu = profile.gpus[index]
            findings.append(checks.check_link(index, gpu.pci, gpu.rates))
            findings.append(checks.check_node_rates(index, gpu.rates, len(devices)))
        findings.append(checks.check_memory_node(index, address, root=root))
        findings.append(checks.check_iommu(index, address, root=root))
    slab_bytes = OffloadConfig().host_slab_bytes
    findings += [
        checks.check_host_memory(max(1, len(devices)), slab_bytes, root=root),
        checks.check_swap(),
        checks.check_memlock(),
        *checks.check_environment(environ),
        *checks.check_versions(),
    ]
    return Examination(tuple(findings), profile)


def identify_machine(
    gpus: Sequence[DeviceInfo] | None = None, *, root: Path = Path("/")
) -> MachineIdentity:
    """Return the identity under which `load_profile` finds what was measured here.

    Args:
        gpus: those that share the machine's bandwidth; None for all that the process can use.
        root: the folder in which ``etc`` lies.

    Raises:
        RuntimeError: there are CUDA devices and CUDA can't be started.
    """
    gpus = gpus if gpus is not None else visible_devices()
    host = f"{platform.node()}\n{read_kernel_text(root / 'etc/machine-id')}".encode()
    return MachineIdentity(
        host_hash=hashlib.sha256(host).hexdigest()[:16],
        kernel=platform.release()[:200],
        gpus=tuple(GpuIdentity(name=gpu.name, pci_address=gpu.pci_address) for gpu in gpus),
        driver_version=driver_version(),
        cuda_version=torch.version.cuda,
        torch_version=str(torch.__version__),
    )


def _measure(
    identity: MachineIdentity, cache: Path | None
) -> tuple[MachineProfile | None, list[Finding]]:
    title = "bandwidth"
    try:
        gpus = measure_gpus(len(identity.gpus))
    except BandwidthError as error:
        advice = "see that the GPUs are free, and what the findings on host memory say"
        return None, [Finding("error", title, str(error), advice)]
    profile = MachineProfile(identity=identity, measured_at=datetime.now(UTC), gpus=gpus)
    try:
        save_profile(profile, cache)
    except ConfigError as error:
        return profile, [Finding("note", title, f"it is not kept: {error}", "set XDG_CACHE_HOME")]
    return profile, []
