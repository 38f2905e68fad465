"""One of two ranks of a job that measure their machines together."""

from __future__ import annotations

import json

import torch.distributed as dist
from fake_gpus import KIB, FakeGpu

from megatron_offload.machine import bandwidth
from megatron_offload.machine.job_ranks import JobRanks

GBPS = (25.0, 10.0)


def run(rank, folder):
    """Be one rank; leave what it has seen in ``rank_<rank>.json``."""
    bandwidth.BLOCK_BYTES = 128 * KIB
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    gpu, stubborn = (FakeGpu(GBPS[rank], f"{rank:02}", pins=pins) for pins in (True, rank == 0))
    seen = {
        name: d2h(gpu, folder / root) for name, root in (("one", "one"), ("two", f"machine_{rank}"))
    }
    try:
        d2h(stubborn, folder / "one")
    except bandwidth.BandwidthError as error:
        seen["no_pins"] = str(error)
    dist.destroy_process_group()
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))


def d2h(backend, root):
    rates = bandwidth.measure_copies(backend, ranks=JobRanks(root=root)).rates
    return [rates.d2h_gbps, rates.node_h2d_gbps]
