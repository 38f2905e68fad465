"""What all ranks of a job take their machines' bandwidths to be: kept from before, or measured now.

Every rank returns the same, or raises the same error. A file that can't be written costs a warning.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron_offload.backends.base import Backend, DeviceInfo
from megatron_offload.errors import ConfigError
from megatron_offload.machine.bandwidth import BLOCK_BYTES, measure_copies
from megatron_offload.machine.examine import identify_machine
from megatron_offload.machine.job_ranks import JobRanks
from megatron_offload.machine.profile import (
    MachineProfile,
    load_profile,
    profile_path,
    save_profile,
)

_logger = logging.getLogger(__name__)

_BLOCK_BYTES = BLOCK_BYTES // 2
"""A training job has less memory and time to spare than the doctor."""


class JobMachines(NamedTuple):
    """The machines of a job, in the order of their first ranks."""

    profiles: tuple[MachineProfile, ...]
    is_new: bool
    """Whether they were measured just now."""
    path: Path | None
    """Where the first one's profile is kept; None where it couldn't be written."""


def agree_on_machines(
    backend: Backend,
    device: DeviceInfo,
    *,
    group: dist.ProcessGroup | None = None,
    cache: Path | None = None,
    root: Path = Path("/"),
) -> JobMachines:
    """Return what is known of the machines of a job, after measuring them if need be; collective.

    Measuring takes some tenths of a second a GPU, and 128 MiB of its memory and of the host's, all
    of which is given back.

    Args:
        backend: this rank's, with nothing under way, and copy streams of its own.
        device: what it says of itself.
        group: all ranks of the job; None for all there are.
        cache: as for `load_profile`.
        root: the folder in which ``etc`` and ``proc`` lie.

    Raises:
        BandwidthError: a rank can't measure; on all ranks.
    """
    ranks = JobRanks(group, root=root)
    gpus = ranks.of_my_machine(ranks.gather(device))
    # The first rank of each machine reads and writes its file.
    identity = identify_machine(gpus, root=root) if ranks.turn == 0 else None
    profile = load_profile(identity, cache) if identity is not None else None
    path = profile_path(identity, cache) if identity is not None else None
    known = [each for each in ranks.gather((profile, path)) if each[0] is not None]
    is_new = len(known) < len(set(ranks.machines))
    if is_new:
        before_bytes = backend.reserved_bytes()
        try:
            mine = measure_copies(backend, block_bytes=_BLOCK_BYTES, ranks=ranks)
        finally:
            if backend.reserved_bytes() != before_bytes:
                backend.trim_device()
        measured = tuple(ranks.of_my_machine(ranks.gather(mine)))
        if identity is not None:
            now = datetime.now(UTC)
            profile = MachineProfile(identity=identity, measured_at=now, gpus=measured)
            try:
                save_profile(profile, cache)
            except ConfigError as error:
                _logger.warning("what was measured on this machine is not kept: %s", error)
                path = None
        known = [each for each in ranks.gather((profile, path)) if each[0] is not None]
    profiles = tuple(profile for profile, _ in known if profile is not None)
    return JobMachines(profiles, is_new, known[0][1])
