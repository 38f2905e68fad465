"""One of two ranks of a job that agree on their machines' bandwidths, once in each situation."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch.distributed as dist
from fake_gpus import KIB, FakeGpu

from megatron_offload.autotune.agree import agree_on_bandwidths
from megatron_offload.config import OffloadConfig
from megatron_offload.core.policy_config import AutoConfig
from megatron_offload.engine.manager import PipelineOffloadManager
from megatron_offload.machine import agreement
from megatron_offload.machine.bandwidth import BandwidthError

GBPS = (25.0, 10.0)


def run(rank, folder):
    """Be one rank; leave what it has seen in ``rank_<rank>.json``."""
    agreement._BLOCK_BYTES = 64 * KIB
    os.environ["XDG_CACHE_HOME"] = str(folder / "home")
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    seen = {}
    one, two = folder / "one", folder / f"machine_{rank}"
    seen["measured"] = agree(rank, one, one / "cache")
    seen["kept"] = agree(rank, one, one / "cache")
    if rank == 0:
        (file,) = (one / "cache").iterdir()
        file.write_text("{")
    dist.barrier()
    seen["broken"] = agree(rank, one, one / "cache")
    seen["two"] = agree(rank, two, two / "cache")
    if rank == 1:
        (file,) = (two / "cache").iterdir()
        file.unlink()
    dist.barrier()
    seen["one_lacks"] = agree(rank, two, two / "cache")
    seen["two_kept"] = agree(rank, two, two / "cache")
    seen["no_pins"] = agree(rank, one, folder / "none", pins=rank == 0)
    seen["unwritable"] = agree(rank, one, folder / "store" / "cache")
    manager = PipelineOffloadManager(OffloadConfig(), backend=FakeGpu(GBPS[rank], f"{rank:02}"))
    seen["planned"] = agree_on_bandwidths(manager, AutoConfig(kind="auto")).model_dump()
    dist.destroy_process_group()
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))


def agree(rank, root, cache, *, pins=True):
    """Return what the ranks agreed on, and what this one did and said for it."""
    backend = FakeGpu(GBPS[rank], f"{rank:02}", pins=pins)
    warnings = Warnings()
    logging.getLogger("megatron_offload").addHandler(warnings)
    try:
        machines = agreement.agree_on_machines(
            backend, backend.describe(), cache=Path(cache), root=root
        )
        agreed = {
            "profiles": [profile.model_dump(mode="json") for profile in machines.profiles],
            "is_new": machines.is_new,
            "path": machines.path and str(machines.path),
        }
    except BandwidthError as error:
        agreed = {"error": str(error)}
    finally:
        logging.getLogger("megatron_offload").removeHandler(warnings)
    left_bytes = backend.reserved_bytes() - 1000
    own = {"num_copies": backend.num_copies, "left_bytes": left_bytes, "warnings": warnings.texts}
    return {"agreed": agreed, "own": own}


class Warnings(logging.Handler):
    """Keeps what was warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())
