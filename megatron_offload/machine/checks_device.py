"""What GPUs and their links are like: one small function for each question.

A number that was measured beats one that the bus claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_offload.backends.base import DeviceInfo
from megatron_offload.files.kernel import read_kernel_text
from megatron_offload.machine.finding import Finding
from megatron_offload.machine.pci import PciPath
from megatron_offload.machine.profile import CopyRates

_GOOD_SHARE = 0.7
"""Of what a link carries, packet headers take 10 to 20 %; less than this has another cause."""

_FREE_SHARE = 0.9
"""A rate that falls no further than this, when others copy too, is as good as undisturbed."""

_MEASURE = "measure it: leave out --no-bandwidth"

_SLOW = (
    "see the findings on memory nodes and IOMMU, whether a link on the way is narrower or a switch "
    "shares it (lspci -vv), whether something else copies, and, in a virtual machine, how its "
    "memory is placed"
)

_NARROW = (
    "see that the GPU sits firmly in a slot of that width, and what riser, BIOS and board allow"
)

_NO_CUDA = (
    "install a PyTorch that is built for CUDA; see that the driver is loaded (nvidia-smi), that "
    "CUDA_VISIBLE_DEVICES hides nothing, and that a container was started with its GPUs"
)


def check_devices(devices: Sequence[DeviceInfo], num_shown: int) -> Finding:
    """Say which GPUs PyTorch can use, of those that the driver shows."""
    title = "GPUs"
    if devices:
        kinds = sorted({device.name for device in devices})
        return Finding("ok", title, f"{len(devices)} of {', '.join(kinds)}")
    if num_shown:
        found = f"the driver shows {num_shown}, and PyTorch can use none"
        return Finding("warning", title, found, _NO_CUDA)
    found = "the driver shows none: offload runs on the simulated device, for tests"
    advice = "run this where the training runs; a GPU that is there needs its driver (nvidia-smi)"
    return Finding("note", title, found, advice)


def check_copy_engines(index: int, device: DeviceInfo) -> Finding:
    """Say whether copies run beside kernels, and beside each other."""
    title, count = f"GPU {index}: copy engines", device.num_copy_engines
    if count is None:
        return Finding("note", title, "unknown")
    if count == 0:
        found = "none: no copy runs beside kernels"
        return Finding("warning", title, found, "use another GPU, or recompute instead of offload")
    if count == 1:
        found = "1: copies to the host and back take turns"
        return Finding("note", title, found, "plan with the rates of both directions at once")
    return Finding("ok", title, str(count))


def check_link(index: int, path: PciPath | None, rates: CopyRates | None) -> Finding:
    """Hold what copies reach against what their link carries.

    Args:
        index: of the GPU.
        path: its link, read while copies ran where ``rates`` is given.
        rates: what was measured.
    """
    title = f"GPU {index}: link"
    if rates is None:
        if path is None:
            return Finding("note", title, "unknown: the driver doesn't show it", _MEASURE)
        if path.now == path.most:
            return Finding("ok", title, str(path.now))
        return Finding("note", title, f"{path.now} of {path.most} while idle", _MEASURE)
    alone = f"{rates.d2h_gbps:.1f} GB/s to the host, {rates.h2d_gbps:.1f} back"
    if path is None:
        return Finding("ok", title, f"{alone}; the driver doesn't show it")
    if min(rates.d2h_gbps, rates.h2d_gbps) >= _GOOD_SHARE * path.most.gbps:
        return Finding("ok", title, f"{alone}, of {path.most}")
    found, advice = f"{alone}, of {path.now}", _SLOW
    if path.now.gbps < path.most.gbps:
        found = f"{alone}; the link runs as {path.now}, and the GPU could do {path.most}"
        advice = _NARROW
    return Finding("warning", title, found, advice)


def check_node_rates(index: int, rates: CopyRates, num_gpus: int) -> Finding:
    """Say what is left of a GPU's rates when both directions and all GPUs copy."""
    both = min(rates.both_d2h_gbps / rates.d2h_gbps, rates.both_h2d_gbps / rates.h2d_gbps)
    node = min(rates.node_d2h_gbps / rates.d2h_gbps, rates.node_h2d_gbps / rates.h2d_gbps)
    found = f"{rates.both_d2h_gbps:.1f} GB/s to the host and {rates.both_h2d_gbps:.1f} back at once"
    if num_gpus > 1:
        found += (
            f"; {rates.node_d2h_gbps:.1f} and {rates.node_h2d_gbps:.1f} while all {num_gpus} GPUs "
            "copy"
        )
    title = f"GPU {index}: at once"
    if min(both, node) >= _FREE_SHARE:
        return Finding("ok", title, found)
    if num_gpus > 1 and node < _FREE_SHARE * both:
        advice = (
            "plan with the last numbers, since the machine's memory is shared; what later pipeline "
            "ranks keep, the first can use (resident_delta_bytes_across_pp_ranks)"
        )
    else:
        advice = "plan with these numbers: in a step, copies go both ways"
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
    if kind == "identity":
        return Finding("ok", title, "addresses pass through it")
    return Finding("ok", title, "none is shown")
