"""Looks at the machine as a whole, by one small function for each question.

The examining process opens no device and changes nothing; what fails becomes a finding.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from megatron_offload.backends import visible_devices
from megatron_offload.backends.base import DeviceInfo
from megatron_offload.backends.host_limit import default_cap_bytes
from megatron_offload.backends.numa import near_cpus
from megatron_offload.config import OffloadConfig
from megatron_offload.core.units import format_bytes
from megatron_offload.errors import shorten
from megatron_offload.files.kernel import read_kernel_text
from megatron_offload.machine.bandwidth import BandwidthError, measure_gpus
from megatron_offload.machine.profile import (
    CopyRates,
    MachineProfile,
    PciPath,
    num_nvidia_gpus,
    read_pci_path,
)

_PACKAGES = ("megatron-offload", "torch", "megatron-core", "transformer-engine", "numpy")

NEWEST_SEEN = {
    "python": "3.12",
    "torch": "2.13",
    "megatron-core": "0.19",
    "transformer-engine": "2.20",
}
"""The newest versions that this package was run with; README.md says how."""

_GOOD_SHARE = 0.7
"""Of what a link carries, packet headers take 10 to 20 %; less than this has another cause."""

_FREE_SHARE = 0.9
"""A rate that falls no further than this, when others copy too, is as good as undisturbed."""

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel and copy, so that nothing overlaps",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every release waits for the device",
}
"""Variables that make offload slow, and how."""

Level = Literal["ok", "note", "warning", "error"]
"""``note``: worth knowing; ``warning``: offload works and costs more than it should; ``error``: it
can't work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    title: str
    """What was looked at."""
    found: str
    """What was found, with the numbers."""
    advice: str = ""
    """What to do about it; empty where nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found."""

    findings: tuple[Finding, ...]
    profile: MachineProfile | None
    """Bandwidths; None where they were not measured."""


def examine(
    *, bandwidth: bool = True, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Examination:
    """Look at everything; ``bandwidth`` takes some seconds and wants idle GPUs."""
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
        findings.append(check_devices([device.name for device in devices], num_nvidia_gpus()))
    profile = None
    if devices and bandwidth:
        try:
            gpus = measure_gpus(len(devices))
            profile = MachineProfile(measured_at=datetime.now(UTC), gpus=gpus)
        except BandwidthError as error:
            advice = "see that the GPUs are free, and what the findings on host memory say"
            findings.append(Finding("error", "bandwidth", str(error), advice))
    for index, device in enumerate(devices):
        address = device.pci_address
        if profile is None:
            findings.append(check_link(index, read_pci_path(address), None))
        else:
            gpu = profile.gpus[index]
            findings.append(check_link(index, gpu.pci, gpu.rates))
            findings.append(check_node_rates(index, gpu.rates, len(devices)))
        findings.append(check_memory_node(index, address, root=root))
        findings.append(check_iommu(index, address, root=root))
    findings += [
        check_host_memory(max(1, len(devices)), OffloadConfig().host_slab_bytes, root=root),
        *check_environment(environ),
        check_versions(),
    ]
    return Examination(tuple(findings), profile)


def check_devices(names: Sequence[str], num_shown: int) -> Finding:
    """Say which GPUs PyTorch can use, of those that the driver shows."""
    if names:
        return Finding("ok", "GPUs", f"{len(names)} of {', '.join(sorted(set(names)))}")
    if num_shown:
        found = f"the driver shows {num_shown}, and PyTorch can use none"
        advice = "install a PyTorch that is built for CUDA; see that CUDA_VISIBLE_DEVICES hides "
        advice += "nothing, and that a container was started with its GPUs"
        return Finding("warning", "GPUs", found, advice)
    found = "the driver shows none: offload runs on the simulated device, for tests"
    advice = "run this where the training runs; a GPU that is there needs its driver (nvidia-smi)"
    return Finding("note", "GPUs", found, advice)


def check_link(index: int, path: PciPath | None, rates: CopyRates | None) -> Finding:
    """Hold what copies reach against what their link carries, where possible while they run."""
    title = f"GPU {index}: link"
    if rates is None:
        found = f"{path.now} of {path.most} while idle" if path else "the driver doesn't show it"
        return Finding("note", title, found, "measure it: leave out --no-bandwidth")
    alone = f"{rates.d2h_gbps:.1f} GB/s to the host, {rates.h2d_gbps:.1f} back"
    if path is None:
        return Finding("ok", title, f"{alone}; the driver doesn't show it")
    if min(rates.d2h_gbps, rates.h2d_gbps) >= _GOOD_SHARE * path.most.gbps:
        return Finding("ok", title, f"{alone}, of {path.most}")
    if path.now.gbps < path.most.gbps:
        found = f"{alone}; the link runs as {path.now}, and the GPU could do {path.most}"
        advice = "see that the GPU sits firmly in a slot of that width, and what the board allows"
        return Finding("warning", title, found, advice)
    advice = "see the findings on memory nodes and IOMMU, whether a link on the way is narrower or "
    advice += "shared (lspci -vv), whether something else copies, and, in a virtual machine, how "
    return Finding("warning", title, f"{alone}, of {path.now}", advice + "its memory is placed")


def check_node_rates(index: int, rates: CopyRates, num_gpus: int) -> Finding:
    """Say what is left of a GPU's rates when both directions and all GPUs copy."""
    title = f"GPU {index}: at once"
    both = min(rates.both_d2h_gbps / rates.d2h_gbps, rates.both_h2d_gbps / rates.h2d_gbps)
    node = min(rates.node_d2h_gbps / rates.d2h_gbps, rates.node_h2d_gbps / rates.h2d_gbps)
    found = f"{rates.both_d2h_gbps:.1f} GB/s to the host and {rates.both_h2d_gbps:.1f} back at once"
    if num_gpus > 1:
        found += f"; {rates.node_d2h_gbps:.1f} and {rates.node_h2d_gbps:.1f} while all {num_gpus} "
        found += "GPUs copy"
    if min(both, node) >= _FREE_SHARE:
        return Finding("ok", title, found)
    advice = "plan with these numbers: in a step, copies go both ways"
    if num_gpus > 1 and node < _FREE_SHARE * both:
        advice = "plan with the last numbers, since the machine's memory is shared; what later "
        advice += "ranks keep, the first can use (delta_bytes_across_pp_ranks)"
    return Finding("note", title, found, advice)


def check_iommu(index: int, address: str | None, *, root: Path = Path("/")) -> Finding:
    """Say whether an IOMMU translates the addresses of a GPU's copies, which costs bandwidth."""
    title = f"GPU {index}: IOMMU"
    if address is None:
        return Finding("note", title, "unknown")
    kind = read_kernel_text(root / "sys/bus/pci/devices" / address / "iommu_group/type").strip()
    if kind.startswith("DMA"):
        found = f"it translates this GPU's addresses (domain type {kind[:20]!r})"
        return Finding(
            "note", title, found, "where copies stay below their link, boot with iommu=pt"
        )
    passes = kind == "identity"
    return Finding("ok", title, "addresses pass through it" if passes else "none is shown")


def check_memory_node(index: int, address: str | None, *, root: Path = Path("/")) -> Finding:
    """Say whether a GPU's pinned memory comes from the memory next to it."""
    title = f"GPU {index}: memory node"
    near = near_cpus(address, sysfs=root / "sys")
    if not near:
        advice = "on a machine with several, bind each rank to the node next to its GPU (numactl, "
        return Finding("note", title, "unknown", advice + "nvidia-smi topo -m)")
    if os.sched_getaffinity(0) & near:
        return Finding("ok", title, "pinned memory comes from next to it")
    advice = f"give the rank CPUs of {min(near)} to {max(near)} (numactl, the container's "
    advice += "--cpuset-cpus): else launches, and maybe pinned memory, are far away"
    return Finding("warning", title, "no CPU of this process is next to it", advice)


def check_host_memory(num_ranks: int, slab_bytes: int, *, root: Path = Path("/")) -> Finding:
    """Say how much each rank of this machine may pin, in slabs, by what accounts have free."""
    share = 0.5  # of what is free, unless host_memory_share says otherwise
    cap_bytes = default_cap_bytes(share, {"LOCAL_WORLD_SIZE": str(num_ranks)}, root=root)
    ranks = f"each of {num_ranks} ranks" if num_ranks > 1 else "one rank"
    found = f"{format_bytes(cap_bytes)} may be pinned by {ranks} ({share:.0%} of what is free)"
    if cap_bytes >= slab_bytes:
        return Finding("ok", "host memory", found)
    found += f", less than one slab of {format_bytes(slab_bytes)}"
    advice = "free memory, raise the control group's limit (the container's --memory), or set "
    advice += "host_memory_bytes; over it, tensors stay on the device"
    return Finding("warning", "host memory", found, advice)


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """Say which environment variables stand in the way of copies beside kernels, or help."""
    findings = [_check_allocator(environ)]
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


def _check_allocator(environ: Mapping[str, str]) -> Finding:
    names = [n for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if environ.get(n)]
    values = {environ[name] for name in names}
    if len(values) > 1:
        found = "both are set, to different values"
        advice = "which one counts depends on PyTorch's version: set one"
        return Finding("warning", " and ".join(names), found, advice)
    title = names[0] if names else "PYTORCH_CUDA_ALLOC_CONF"
    shown = shorten(repr(environ[title])) if names else "not set"
    parts = (part.partition(":") for part in "".join(values).split(","))
    settings = {key.strip(): value.strip() for key, _, value in parts}
    if settings.get("backend", "native") != "native":
        advice = "a target of bytes (memory_target, device_target_bytes) is held against what that "
        advice += "one reserves; name modules or a fraction instead"
        return Finding("note", title, f"{shown}: not PyTorch's own allocator", advice)
    if settings.get("expandable_segments") == "True":
        return Finding("ok", title, shown)
    advice = "where much more is reserved than allocated, try expandable_segments:True"
    return Finding("note", title, shown, advice)


def found_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes.

    Of megatron-core that is what an import gives and not what pip lists: the two differ where
    another copy comes first on ``PYTHONPATH``.
    """
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    megatron = _megatron_version()
    return versions | ({"megatron-core": megatron} if megatron else {})


def _megatron_version() -> str:
    """Return the version that the megatron-core which would be imported gives itself, or ""."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError):
        return ""
    origin = Path(spec.origin) if spec is not None and spec.origin else Path()
    text = read_kernel_text(origin.parent / "package_info.py")
    parts = dict(re.findall(r"^(\w+) = '?\"?([\w.]*)['\"]?$", text, re.MULTILINE))
    numbers = [parts.get(key, "") for key in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(numbers) + parts.get("PRE_RELEASE", "") if "".join(numbers).isdigit() else ""


def check_versions() -> Finding:
    """Say what is installed, and what of it is newer than any that this package was run with."""
    found = found_versions()
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    newer = [
        f"{name} {seen}"
        for name, seen in NEWEST_SEEN.items()
        if _release(found.get(name, "")) > _release(seen)
    ]
    if not newer:
        return Finding("ok", "versions", text)
    advice = f"newest that were run with: {', '.join(newer)}; megatron-offload compare shows "
    return Finding("note", "versions", text, advice + "whether bits stay the same")


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
