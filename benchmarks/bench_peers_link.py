"""What the link between host and device gives in a run of `bench_peers.py`, and what is made of it.

`measure_link` copies plain blocks on all ranks together, one direction alone and both at once,
before there is a model. `link_shares` holds the copies of a traced step against that. Bandwidths
are in 10^9 bytes a second, and of page-locked memory as this package takes it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

BLOCK_BYTES = 64 * 2**20
NUM_BLOCKS = 4
"""Blocks of memory each way, used in turn; pinning much more would take longer than the copies."""

NUM_COPIES = 32
"""Copies each way: 2 GiB."""


def measure_link():
    """Return this rank's GB/s: ``d2h`` and ``h2d`` alone, ``both_d2h`` and ``both_h2d`` at once."""
    from megatron_offload.backends.cuda import CudaBackend

    backend = CudaBackend()
    streams = {"d2h": backend.d2h_stream, "h2d": backend.h2d_stream}
    pairs = {"d2h": [], "h2d": []}
    for _ in range(NUM_BLOCKS):
        for name, ends in pairs.items():
            host, device = backend.empty_host(BLOCK_BYTES), backend.empty_device(BLOCK_BYTES)
            ends.append((host, device) if name == "d2h" else (device, host))  # destination first

    def copy(*names):
        dist.barrier()
        torch.cuda.synchronize()
        marks = {name: [backend.timestamp(streams[name])] for name in names}
        for number in range(NUM_COPIES):
            for name in names:
                backend.copy([pairs[name][number % NUM_BLOCKS]], streams[name], "link")
                marks[name].append(backend.timestamp(streams[name]))
        torch.cuda.synchronize()
        first = marks[names[0]][0]
        return [[backend.sync_elapsed_us(first, mark) for mark in marks[name]] for name in names]

    copy("d2h", "h2d")  # a link that was idle may have to wake
    result = {}
    for names in (("d2h",), ("h2d",), ("d2h", "h2d")):
        prefix = "both_" if len(names) > 1 else ""
        for name, gbps in zip(names, gbps_of(copy(*names), BLOCK_BYTES), strict=True):
            result[prefix + name] = gbps
    return result


def gbps_of(ends_us, num_bytes):
    """Return the bandwidth of each stream of copies while all of them copied.

    Args:
        ends_us: per stream, when it began and when each of its copies ended.
        num_bytes: what each copy moved.
    """
    over_us = min(ends[-1] for ends in ends_us)
    result = []
    for start_us, *copied_us in ends_us:
        in_time = [end_us for end_us in copied_us if end_us <= over_us] or copied_us[:1]
        result.append(len(in_time) * num_bytes / (in_time[-1] - start_us) / 1e3)
    return result


def link_shares(spans, link_gbps):
    """Return for each copy stream what it moved over what the link would have moved meanwhile.

    The link is taken at its bandwidth alone where only this direction copied, and at its bandwidth
    in both directions where the other one copied too. None for a stream that never copied.

    Args:
        spans: of one traced step; those of the compute stream are passed over.
        link_gbps: what `measure_link` returned.
    """
    shares = {}
    for stream, other in (("d2h", "h2d"), ("h2d", "d2h")):
        mine = sorted((s.start_us, s.end_us) for s in spans if s.stream == stream)
        others = sorted((s.start_us, s.end_us) for s in spans if s.stream == other)
        both_us = overlap_us(mine, others)
        alone_us = sum(end - start for start, end in mine) - both_us
        expected = alone_us * link_gbps[stream] + both_us * link_gbps[f"both_{stream}"]
        moved_bytes = sum(span.num_bytes for span in spans if span.stream == stream)
        shares[stream] = moved_bytes / (expected * 1e3) if expected else None
    return shares


def overlap_us(left, right):
    """Return how long two lists of (start, end) overlap; each in order and without overlaps."""
    total_us, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        start_us = max(left[i][0], right[j][0])
        end_us = min(left[i][1], right[j][1])
        total_us += max(0.0, end_us - start_us)
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total_us
