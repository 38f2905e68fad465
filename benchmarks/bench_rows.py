"""What a row takes of the host's time, by layer: 24 small layers on a CPU, with rows and without.

    python benchmarks/bench_rows.py [--cold-mib 16] [--output FILE]

Steps of a net with a row and of the same net without the package go by turns, in one process; of
both the median counts. ``checkpoint`` is torch's own around each MLP. ``--cold-mib`` writes so much
memory before each layer, as a job's other work may: caches hold nothing of the package then.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_offload import OffloadConfig, get_act_offloading_ctx_manager

WIDTH, LAYERS, STEPS = 64, 24, 100
ROWS = {
    "no row": [],
    "offload one tensor of each MLP": [{"site": "mlp", "offload": 1}],
    "recompute norms": [{"site": "norm", "recompute": True}],
    "recompute activations": [{"site": "mlp_act", "recompute": True}],
    "recompute MLPs": [{"site": "mlp", "recompute": True}],
    "recompute layers": [{"site": "layer", "recompute": True}],
    "checkpoint": None,
}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    others = torch.zeros(0)
    is_checkpointed = False

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        self.others.add_(1)
        x = self.norm(x)
        if self.is_checkpointed:
            return x + checkpoint(self.mlp, x, use_reentrant=False)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def step(net, context, x):
    """Return the time of a step in microseconds."""
    began = time.perf_counter()
    with context:
        loss = net(x).sum()
    loss.backward()
    return 1e6 * (time.perf_counter() - began)


def measure(rows):
    """Return by how many microseconds a layer takes longer."""
    plain, net, x = Net(), Net(), torch.randn(4, WIDTH)
    context = torch.enable_grad()
    if rows is None:
        for layer in net.layers:
            layer.is_checkpointed = True
    else:
        config = OffloadConfig(rows=rows, min_tensor_bytes=0)
        context = get_act_offloading_ctx_manager(net, warn_if_no_head=False, config=config)
    times = [
        (step(plain, torch.enable_grad(), x), step(net, context, x)) for _ in range(STEPS + 30)
    ]
    without, taken = map(statistics.median, zip(*times[30:], strict=True))
    return (taken - without) / LAYERS


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cold-mib", type=int, default=0, help="written before each layer")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("megatron_offload").setLevel(logging.ERROR)
    Layer.others = torch.zeros(options.cold_mib << 20, dtype=torch.uint8)
    found = {}
    for name, rows in ROWS.items():
        found[name] = round(statistics.median(measure(rows) for _ in range(3)), 1)
        print(f"{name:32} {found[name]:+8.1f} us a layer", flush=True)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "torch": torch.__version__,
        "us_a_layer": found,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
