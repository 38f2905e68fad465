"""Two ranks that train with rows under a wrapper and compare every bit with the same without.

torchrun --standalone --nproc-per-node 2 rows_worker.py WRAPPER
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
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
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    found = []
    for length in (8, 8, 12, 5):
        tokens = torch.randint(50, (2, length))
        if context is None:
            loss = net(tokens).square().mean()
        else:
            with context:
                loss = net(tokens).square().mean()
        loss.backward()
        grads = [p.grad for p in net.parameters()]
        found += [loss.detach(), *(getattr(g, "_local_tensor", g).clone() for g in grads)]
        optimizer.step()
        optimizer.zero_grad()
    if context is not None:
        assert context.end_step()
        by_name = context.last_step.by_name
        assert by_name["mlp"].offloaded_bytes
        assert by_name["mlp"].recomputed_bytes
        assert by_name["layer"].recomputed_bytes
        assert by_name["norm"].recomputed_bytes
    return [*found, torch.get_rng_state()]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    expected = train(sys.argv[1], has_rows=False)
    found = train(sys.argv[1], has_rows=True)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    sys.stdout.write("equal\n")
    dist.destroy_process_group()
