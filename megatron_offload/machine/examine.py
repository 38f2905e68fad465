"""Looks at the machine as a whole, by one small function for each question.

The examining process opens no device and changes nothing; what fails becomes a finding.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from megatron_offload.backends import visible_devices
from megatron_offload.backends.host_limit import default_cap_bytes
from megatron_offload.config import OffloadConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import shorten
from megatron_offload.files.strict_model import StrictModel
from megatron_offload.machine.bandwidth import BandwidthError, measure_gpus
from megatron_offload.machine.profile import CopyRates, MachineProfile

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel and copy, so that nothing overlaps",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every release waits for the device",
}
"""Variables that make offload slow, and how."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["ok", "note", "warning", "error"]
    """``note``: worth knowing; ``warning``: offload works and costs more than it should; ``error``:
    it can't work."""
    title: str
    found: str
    """What was found, with the numbers."""
    advice: str = ""
    """What to do about it; empty where nothing is to be done."""


class Examination(StrictModel):
    """What was found."""

    format: Literal[1] = 1
    findings: tuple[Finding, ...]
    profile: MachineProfile | None
    """Bandwidths; None where they were not measured."""


def examine(
    *, bandwidth: bool = True, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Examination:
    """Look at everything; ``bandwidth`` takes some seconds and wants idle GPUs."""
    names: Sequence[str] = ()
    profile = None
    try:
        names = visible_devices()
        findings = [check_devices(names)]
    except RuntimeError as error:
        found = "it can't be started: " + str(error).strip().split("\n")[0]
        findings = [Finding("error", "CUDA", found, "see nvidia-smi")]
    if names and bandwidth:
        try:
            profile = MachineProfile(measured_at=datetime.now(UTC), gpus=measure_gpus(len(names)))
            findings += [check_rates(i, gpu, len(names)) for i, gpu in enumerate(profile.gpus)]
        except BandwidthError as error:
            advice = "see that the GPUs are free, and what the findings on host memory say"
            findings.append(Finding("error", "bandwidth", str(error), advice))
    versions = ", ".join(f"{name} {version}" for name, version in found_versions().items())
    findings += [
        check_host_memory(max(1, len(names)), OffloadConfig().host_slab_bytes, root=root),
        *check_environment(environ),
        Finding("ok", "versions", versions),
    ]
    return Examination(findings=tuple(findings), profile=profile)


def check_devices(names: Sequence[str]) -> Finding:
    """Say which GPUs PyTorch can use."""
    if names:
        return Finding("ok", "GPUs", f"{len(names)} of {', '.join(sorted(set(names)))}")
    found = "PyTorch can use none: offload runs on the simulated device, for tests"
    advice = "where there is one, see its driver (nvidia-smi), that PyTorch is made for CUDA, that "
    advice += "CUDA_VISIBLE_DEVICES hides nothing and that a container was started with its GPUs"
    return Finding("note", "GPUs", found, advice)


def check_rates(index: int, rates: CopyRates, num_gpus: int) -> Finding:
    """Say what a GPU's copies reach, and what is left of that when others copy too."""
    title = f"GPU {index}: copies"
    alone = min(rates.d2h_gbps, rates.h2d_gbps)
    together = min(rates.node_d2h_gbps / rates.d2h_gbps, rates.node_h2d_gbps / rates.h2d_gbps)
    found = f"{rates.d2h_gbps:.1f} GB/s to the host and {rates.h2d_gbps:.1f} back, at once "
    found += f"{rates.both_d2h_gbps:.1f} and {rates.both_h2d_gbps:.1f}"
    if num_gpus > 1:
        found += f"; {rates.node_d2h_gbps:.1f} and {rates.node_h2d_gbps:.1f} while all {num_gpus} "
        found += "GPUs copy"
    if alone < 20.0:  # a x16 slot of PCI Express 4.0 gives 25 or so each way
        advice = "see what width and generation the link has (lspci -vv), whether something else "
        advice += "copies, whether memory lies next to the GPU (numactl, nvidia-smi topo -m), "
        advice += "and whether an IOMMU translates addresses (boot with iommu=pt)"
        return Finding("warning", title, found, advice)
    if together >= 0.9:  # as good as undisturbed
        return Finding("ok", title, found)
    advice = "plan with the last numbers: in a step copies go both ways, and GPUs share memory"
    return Finding("note", title, found, advice)


def check_host_memory(num_ranks: int, slab_bytes: int, *, root: Path = Path("/")) -> Finding:
    """Say how much each rank of this machine may pin, in slabs, by what accounts have free."""
    share = 0.5  # of what is free, unless host_memory_share says otherwise
    cap_bytes = default_cap_bytes(share, root=root) // num_ranks
    ranks = f"each of {num_ranks} ranks" if num_ranks > 1 else "one rank"
    found = f"{format_bytes(cap_bytes)} may be pinned by {ranks} ({share:.0%} of what is free)"
    if cap_bytes >= slab_bytes:
        return Finding("ok", "host memory", found)
    found += f", less than one slab of {format_bytes(slab_bytes)}"
    advice = "free memory, raise the control group's limit (the container's --memory), or set "
    advice += "host_memory_bytes; over it, tensors are kept on the device"
    return Finding("warning", "host memory", found, advice)


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """Say which environment variables hinder copies beside kernels, or help."""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    advice = "where much more is reserved than allocated, try expandable_segments:True"
    findings = [Finding("note", name, "not set", advice)]
    if environ.get(name):
        findings = [Finding("ok", name, shorten(repr(environ[name])))]
    for name, effect in _SLOW.items():
        if environ.get(name, "0") not in ("", "0"):
            found = f"{shorten(repr(environ[name]))}: {effect}"
            findings.append(Finding("warning", name, found, f"unset {name}"))
    if environ.get(name := "CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found = "as Megatron asks with tensor parallelism on GPUs before Blackwell: all streams "
        found += "share one queue, in which a copy may stand behind a kernel"
        advice = f"unset {name} (then it is 8) where copies come late, without tensor parallelism"
        findings.append(Finding("note", name, found, advice))
    return findings


def found_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes.

    Of megatron-core, once it is imported, that is its own and not what pip lists: the two differ
    where another copy comes first on ``PYTHONPATH``.
    """
    versions = {"python": platform.python_version()}
    for name in ("megatron-offload", "torch", "megatron-core", "transformer-engine", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    megatron = sys.modules.get("megatron.core")
    return versions | ({"megatron-core": megatron.__version__} if megatron else {})
