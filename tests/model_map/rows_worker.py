"""Two ranks that train with rows under wrappers and compare every bit with the same without.

torchrun --standalone --nproc-per-node 2 rows_worker.py WRAPPER ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from programs import assert_same, take_steps
from small_net import around, make_net
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ROWS = [
    {"site": "mlp", "layers": "0-1", "offload": "all"},
    {"site": "mlp", "layers": 2, "recompute": True},
    {"site": "layer", "layers": 3, "recompute": True},
    {"site": "norm", "layers": "0-2", "recompute": True},
]


def wrapped(net, wrapper):
    if wrapper == "ddp":
        return DistributedDataParallel(net)
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def train(wrapper, *, has_rows):
    net = wrapped(make_net(), wrapper)
    inner = net.module if wrapper == "ddp" else net
    context = around(inner, ROWS, max_inflight_bytes=0, prefetch_bytes=0) if has_rows else None
    found = take_steps(net, context, (8, 8, 12, 5), seed=dist.get_rank())
    if context is not None:
        assert context.end_step()
        by_name = context.last_step.by_name
        assert by_name["mlp"].offloaded_bytes
        assert all(by_name[name].recomputed_bytes for name in ("mlp", "layer", "norm"))
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for wrapper in sys.argv[1:]:
        assert_same(train(wrapper, has_rows=False), train(wrapper, has_rows=True))
        sys.stdout.write(f"{wrapper}\n")
    dist.destroy_process_group()
