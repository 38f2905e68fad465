"""What all ranks of a job take their machines' bandwidths to be: kept from before, or measured now.

Owns who reads, measures and writes, and that all ranks learn the same. Must not know what is
planned with it.

On each machine its first rank looks for what was measured there before, on just those GPUs that the
job's ranks have. If any machine lacks it, all ranks measure, together.

Invariants: every rank returns the same, or raises the same error; of a measurement nothing is left
but its files, and a file that can't be written costs a warning. Read next:
`megatron_offload.machine.bandwidth`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron_offload.backends.base import Backend, DeviceInfo
from megatron_offload.errors import ConfigError
from megatron_offload.machine.bandwidth import BLOCK_BYTES, measure_gpu
from megatron_offload.machine.examine import identify_gpu, identify_machine
from megatron_offload.machine.job_ranks import JobRanks
from megatron_offload.machine.profile import (
    GpuIdentity,
    GpuProfile,
    MachineProfile,
    load_profile,
    profile_path,
    save_profile,
)

__all__ = ["JobMachines", "agree_on_machines"]

_logger = logging.getLogger(__name__)

_BLOCK_BYTES = BLOCK_BYTES // 2
"""A training job has less memory and time to spare than the doctor, and as good a cache."""


@dataclass(frozen=True, slots=True)
class JobMachines:
    """The machines of a job.

    Attributes:
        profiles: one for each machine, in the order of their first ranks.
        is_new: whether they were measured just now.
        path: where the first one's profile is kept; None where it couldn't be written.
    """

    profiles: tuple[MachineProfile, ...]
    is_new: bool
    path: Path | None


def agree_on_machines(
    backend: Backend,
    device: DeviceInfo,
    *,
    group: dist.ProcessGroup | None = None,
    cache: Path | None = None,
    root: Path = Path("/"),
) -> JobMachines:
    """Return what is known of the machines of a job, after measuring them if need be; collective.

    Measuring takes some tenths of a second for each GPU of a machine, and 128 MiB of its memory and
    of the host's, all of which is given back.

    Args:
        backend: this rank's, with nothing under way, and copy streams of its own.
        device: what it says of itself.
        group: all ranks of the job; None for all there are.
        cache: where profiles are kept; None takes the user's cache folder.
        root: the folder in which ``etc`` and ``proc`` lie.

    Raises:
        BandwidthError: a rank can't measure; on all ranks.
    """
    ranks = JobRanks(group, root=root)
    gpus = ranks.of_my_machine(ranks.gather(identify_gpu(device)))
    num_machines = len(set(ranks.machines))
    is_first = ranks.turn == 0
    kept = _load(gpus, cache, root) if is_first else None
    found = _known(ranks.gather(kept))
    if len(found) == num_machines:
        return _together(found, is_new=False)
    measured = ranks.of_my_machine(ranks.gather(_measure(backend, device, ranks)))
    kept = _save(gpus, measured, cache, root) if is_first else None
    return _together(_known(ranks.gather(kept)), is_new=True)


class _Kept(NamedTuple):
    """A machine's profile, and where it lies."""

    profile: MachineProfile
    path: Path | None


def _load(gpus: Sequence[GpuIdentity], cache: Path | None, root: Path) -> _Kept | None:
    identity = identify_machine(gpus, root=root)
    profile = load_profile(identity, cache)
    return None if profile is None else _Kept(profile, profile_path(identity, cache))


def _measure(backend: Backend, device: DeviceInfo, ranks: JobRanks) -> GpuProfile:
    """Measure together with all ranks; device memory that was taken for it goes back."""
    before_bytes = backend.reserved_bytes()
    try:
        return measure_gpu(backend, device.pci_address, block_bytes=_BLOCK_BYTES, ranks=ranks)
    finally:
        if backend.reserved_bytes() != before_bytes:
            backend.trim_device()


def _save(
    gpus: Sequence[GpuIdentity], measured: Sequence[GpuProfile], cache: Path | None, root: Path
) -> _Kept:
    profile = MachineProfile(
        identity=identify_machine(gpus, root=root),
        measured_at=datetime.now(UTC),
        gpus=tuple(measured),
    )
    try:
        return _Kept(profile, save_profile(profile, cache))
    except ConfigError as error:
        _logger.warning("what was measured on this machine is not kept: %s", error)
        return _Kept(profile, None)


def _known(kept: Sequence[_Kept | None]) -> list[_Kept]:
    return [each for each in kept if each is not None]


def _together(kept: Sequence[_Kept], *, is_new: bool) -> JobMachines:
    return JobMachines(tuple(each.profile for each in kept), is_new, kept[0].path)
